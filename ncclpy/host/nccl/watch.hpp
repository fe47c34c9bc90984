// Noticing the death of other ranks.
//
// A rank whose process ends without having destroyed its communicator will never come to a gate again. Each process
// watches the processes that it shares a segment with, in one thread that sleeps until one of them ends.
#pragma once

#include <cstdint>
#include <memory>

namespace ncclpy::host {

class Segment;

// Watches the other processes of the segment, also those that are still to come, until the segment is gone.
void watch(const std::shared_ptr<Segment>& segment);

// A watched segment is gone.
void forget_segments();

// When this process started, in the kernel's ticks since boot; with the pid it tells one process from a later one that
// got the same pid. 0 if that could not be found out.
uint64_t start_of_this_process();

// Whether the process that started then (0: nobody knows when) has ended, though its parent may not have asked for it
// yet. A look that fails, say for want of a descriptor, says nothing: who cannot be looked at is alive.
bool has_ended(int32_t pid, uint64_t start);

}  // namespace ncclpy::host
