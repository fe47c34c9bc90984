// Noticing the death of other ranks.
//
// A rank whose process ends without having destroyed its communicator will never come to a gate again. Each process
// watches the processes that it shares a segment with, in one thread that sleeps until one of them ends.
#pragma once

#include <memory>

namespace ncclpy::host {

class Segment;

// Told that a rank of the segment is dead, from the thread that watches; the same function for all segments.
using DeathCallback = void (*)(Segment& segment, int rank);

// Once a rank of another process is there, watches the segment's processes, also those that are still to come, until
// the segment is gone.
void watch_others(const std::shared_ptr<Segment>& segment, DeathCallback on_death);

}  // namespace ncclpy::host
