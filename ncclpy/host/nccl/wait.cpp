// The futex behind Bell, and the machine's core count.
#include "wait.hpp"

#include <chrono>
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ncclpy::host {

// Not FUTEX_PRIVATE: the same bell may be mapped at different addresses of several processes.
void Bell::wake() { syscall(SYS_futex, &rung, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void Bell::sleep(uint32_t seen) {
  const double seconds = Interruption::patience();
  if (seconds < 0) {
    syscall(SYS_futex, &rung, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    return;
  }
  timespec patience;  // relative, which futexes measure on the monotonic clock
  patience.tv_sec = time_t(seconds);
  patience.tv_nsec = long((seconds - double(patience.tv_sec)) * 1e9);
  syscall(SYS_futex, &rung, FUTEX_WAIT, seen, &patience, nullptr, 0);
}

Spin::Spin(int ranks) {
  static const int cores = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  }();
  looks_ = ranks <= cores ? most : 0;
}

}  // namespace ncclpy::host
