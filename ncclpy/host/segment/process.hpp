// Which process a rank belongs to, and whether it has ended.
#pragma once

#include <cstdint>

namespace ncclpy::host {

// When this process started, in the kernel's ticks since boot; with the pid it tells one process from a later one that
// got the same pid. 0 if that could not be found out.
uint64_t start_of_this_process();

// Whether the process that started then (0: nobody knows when) has ended, though its parent may not have asked for it
// yet. A look that fails, say for want of a descriptor, says nothing: who cannot be looked at is alive.
bool has_ended(int32_t pid, uint64_t start);

}  // namespace ncclpy::host
