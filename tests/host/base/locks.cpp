// Takes locks of ordered_mutex.h in the way that the argument names; prints "ok" if the check of the order accepts it.
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/mutex.hpp"

using namespace ncclpy::host;

static Mutex<NCCLPY_LOCK_ISSUING> outer;
static Mutex<NCCLPY_LOCK_STREAM> inner;
static Mutex<NCCLPY_LOCK_HANDLES> leaf, other_leaf;
static ncclpy_mutex comms[2], list;

int main(int count, char** arguments) {
  const char* const way = count > 1 ? arguments[1] : "";
  const auto is = [way](const char* name) { return std::strcmp(way, name) == 0; };
  for (auto& comm : comms) ncclpy_mutex_init(&comm, NCCLPY_LOCK_COMM);
  ncclpy_mutex_init(&list, NCCLPY_LOCK_LIST);
  if (is("in order")) {
    std::lock_guard first(outer);
    std::lock_guard second(inner);
  } else if (is("in a wrong order")) {
    std::lock_guard first(inner);
    std::lock_guard second(outer);
  } else if (is("two of one line")) {
    std::lock_guard first(leaf);
    std::lock_guard second(other_leaf);
  } else if (is("one twice")) {
    std::lock_guard first(leaf);
    std::lock_guard second(leaf);
  } else if (is("communicators by address")) {
    ncclpy_mutex_lock(&comms[0]);
    ncclpy_mutex_lock(&comms[1]);
    ncclpy_mutex_unlock(&comms[0]);
    ncclpy_mutex_unlock(&comms[1]);
  } else if (is("communicators against their addresses")) {
    ncclpy_mutex_lock(&comms[1]);
    ncclpy_mutex_lock(&comms[0]);
  } else if (is("tried")) {
    ncclpy_mutex_lock(&list);
    if (ncclpy_mutex_trylock(&comms[0]) != 0) return 1;
    ncclpy_mutex_unlock(&comms[0]);
    ncclpy_mutex_unlock(&list);
  } else if (is("under one that was tried")) {
    if (ncclpy_mutex_trylock(&list) != 0) return 1;
    ncclpy_mutex_lock(&comms[0]);
  } else if (is("given back by who has it not")) {
    ncclpy_mutex_unlock(&list);
  } else if (is("a task under a lock")) {
    std::lock_guard first(leaf);
    ncclpy_lock_none(NCCLPY_LOCK_CONTROL, "it runs a task of a stream");
  } else {
    return 2;
  }
  std::puts("ok");
  return 0;
}
