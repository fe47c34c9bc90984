// The identity of a rank's process, and whether the process has ended.
#pragma once

#include <cstdint>

namespace ncclpy::host {

// The start time of this process, in the kernel's ticks since boot. With the pid it distinguishes the process from a
// later one with the same pid. 0 if it could not be read.
uint64_t start_of_this_process();

// Whether the process with this pid and start time (0: unknown) has ended, even if its parent has not reaped it yet. A
// process that cannot be inspected, for example for want of a file descriptor, counts as alive.
bool has_ended(int32_t pid, uint64_t start);

}  // namespace ncclpy::host
