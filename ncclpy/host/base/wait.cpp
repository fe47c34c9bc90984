// The futex behind FutexEvent, and the cores of the ranks.
#include "wait.hpp"

#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ncclpy::host {

// Not FUTEX_PRIVATE: one event may be mapped at different addresses in several processes.
void FutexEvent::wake() { syscall(SYS_futex, &generation, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void FutexEvent::sleep(uint32_t seen) {
  const double seconds = WaitControl::max_sleep();
  if (seconds < 0) {
    syscall(SYS_futex, &generation, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    return;
  }
  timespec timeout;  // relative; the futex measures it on the monotonic clock
  timeout.tv_sec = time_t(seconds);
  timeout.tv_nsec = long((seconds - double(timeout.tv_sec)) * 1e9);
  syscall(SYS_futex, &generation, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

// If a yield takes longer than this, another rank has used the core for an operation, or another program has used it.
constexpr std::chrono::microseconds late_after{8};

// Moves the calling thread to the next of its allowed cores, then restores its affinity mask.
static void change_core() {
  cpu_set_t allowed, next;
  const int here = sched_getcpu();
  if (here < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  int core = here;
  do core = (core + 1) % CPU_SETSIZE;
  while (!CPU_ISSET(core, &allowed));
  CPU_ZERO(&next);
  CPU_SET(core, &next);
  if (core == here || sched_setaffinity(0, sizeof next, &next) != 0) return;
  if (sched_setaffinity(0, sizeof allowed, &allowed) == 0) return;
  std::memset(&allowed, 0xff, sizeof allowed);  // the cpuset has changed meanwhile: allow all cores that it has now
  sched_setaffinity(0, sizeof allowed, &allowed);
}

cpu_set_t own_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) CPU_ZERO(&cores);
  return cores;
}

using CoresOf = std::function<const cpu_set_t&(int)>;

// Whether more ranks are confined to `set` than it has cores. It suffices to ask this for each rank's set and for the
// union of all sets, since the sets that launchers assign are disjoint, equal or nested.
static bool are_too_many(const cpu_set_t& set, int ranks, const CoresOf& cores_of) {
  int within = 0;
  for (int rank = 0; rank < ranks; rank++) {
    cpu_set_t shared;
    CPU_AND(&shared, &cores_of(rank), &set);
    within += CPU_EQUAL(&shared, &cores_of(rank)) != 0;
  }
  return within > CPU_COUNT(&set);
}

static bool are_crowded(int ranks, const CoresOf& cores_of) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int rank = 0; rank < ranks; rank++) {
    CPU_OR(&all, &all, &cores_of(rank));
    // A set that equals the previous rank's was checked with it. Threads of one process usually have equal sets.
    const bool same = rank > 0 && CPU_EQUAL(&cores_of(rank), &cores_of(rank - 1));
    if (!same && are_too_many(cores_of(rank), ranks, cores_of)) return true;
  }
  return are_too_many(all, ranks, cores_of);
}

Spin::Spin(int ranks) {
  const cpu_set_t cores = own_cores();
  polls_ = ranks <= CPU_COUNT(&cores) ? most : 0;
}

void Spin::set_cores(int ranks, const CoresOf& cores_of) {
  // All ranks of one process call this and compute the same value. Only a change is stored: by then other ranks may
  // already spin and have adapted the number of polls.
  const bool crowded = are_crowded(ranks, cores_of);
  if (crowded != is_crowded()) polls_.store(crowded ? 0 : most, std::memory_order_relaxed);
}

void Spin::yield() {
  if (is_crowded()) {  // there is no free core to move to
    sched_yield();
    return;
  }
  const auto began = std::chrono::steady_clock::now();
  sched_yield();
  const auto ended = std::chrono::steady_clock::now();
  if (ended - began <= late_after) return;
  const int needed = late_needed_.load(std::memory_order_relaxed);
  if (late_.fetch_add(1, std::memory_order_relaxed) + 1 < needed) return;
  late_.store(0, std::memory_order_relaxed);
  late_needed_.store(std::min(2 * needed, many_late), std::memory_order_relaxed);
  // Of two threads on one core only one should move, or they would meet again on the next core. The clock decides
  // which one moves.
  if (ended.time_since_epoch().count() / 16 % 2 == 0) change_core();
}

}  // namespace ncclpy::host
