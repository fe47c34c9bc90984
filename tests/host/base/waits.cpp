// Yields the core as a waiting rank does, and gets it back late each time; prints how often it has moved to another
// core, or what was wrong with a move. Arguments: the number of ranks, and "pinned" to bind the process to one core.
// Or, with "know" and the cores of each rank ("0,1 1"), prints whether there are fewer cores than ranks anywhere.
#include <dlfcn.h>
#include <sched.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/wait.hpp"

static cpu_set_t had;
static int calls = 0;
static const char* wrong = nullptr;

// Replaces the C library's.
extern "C" int sched_yield() noexcept {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
  while (std::chrono::steady_clock::now() < until) continue;
  return 0;
}

extern "C" int sched_setaffinity(pid_t thread, size_t bytes, const cpu_set_t* mask) noexcept {
  static const auto real = reinterpret_cast<decltype(&sched_setaffinity)>(dlsym(RTLD_NEXT, "sched_setaffinity"));
  if (calls++ % 2 == 0) {
    if (CPU_COUNT(mask) != 1) wrong = "not to one core";
    cpu_set_t both;
    CPU_AND(&both, mask, &had);
    if (!CPU_EQUAL(&both, mask)) wrong = "to a core that is not its";
  } else if (!CPU_EQUAL(mask, &had)) {
    wrong = "not left as free as it was";
  }
  return real(thread, bytes, mask);
}

static int know(int count, char** arguments) {
  std::vector<cpu_set_t> of_ranks(count);
  for (int rank = 0; rank < count; rank++) {
    CPU_ZERO(&of_ranks[rank]);
    for (char* core = std::strtok(arguments[rank], ","); core != nullptr; core = std::strtok(nullptr, ","))
      CPU_SET(std::atoi(core), &of_ranks[rank]);
  }
  for (int ranks : {1, 1 << 20}) {  // whatever was assumed before
    ncclpy::host::Spin spin(ranks);
    spin.set_cores(count, [&](int rank) -> const cpu_set_t& { return of_ranks[rank]; });
    std::puts(spin.is_crowded() ? "crowded" : "a core each");
  }
  return 0;
}

int main(int count, char** arguments) {
  if (count > 2 && std::strcmp(arguments[1], "know") == 0) return know(count - 2, arguments + 2);
  if (count > 2 && std::strcmp(arguments[2], "pinned") == 0) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    had = one;
    sched_setaffinity(0, sizeof one, &one);
    calls = 0;
  }
  sched_getaffinity(0, sizeof had, &had);
  ncclpy::host::Spin spin(std::atoi(arguments[1]));
  for (int i = 0; i < 3000; i++) spin.yield();
  cpu_set_t has;
  sched_getaffinity(0, sizeof has, &has);
  if (calls % 2 != 0 || !CPU_EQUAL(&has, &had)) wrong = "not as free as it was";
  if (wrong != nullptr) std::puts(wrong);
  else std::printf("%d\n", calls / 2);
}
