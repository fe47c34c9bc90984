// Noticing the death of other ranks.
//
// If a process ends without destroying its communicators, its ranks will never arrive at a barrier again. Each process
// watches the processes that it shares a segment with, by one thread that sleeps until one of them ends.
#pragma once

#include <memory>

namespace ncclpy::host {

class Segment;

// The watching thread calls it for the first dead rank of a segment, repeatedly while the segment exists. All segments
// share one function.
using DeathCallback = void (*)(Segment& segment, int rank);

// Starts to watch the segment's processes, including those that join later, until the segment is destroyed. Does
// nothing if no rank of another process has joined yet, so callers call it again when a rank has joined.
void watch_others(const std::shared_ptr<Segment>& segment, DeathCallback on_death);

}  // namespace ncclpy::host
