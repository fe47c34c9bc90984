// Noticing the death of other ranks.
//
// If a process ends without destroying its communicators, its ranks will never arrive at a barrier again. In each
// process one thread watches the processes of all segments of this process (watch.cpp).
#pragma once

#include <memory>

namespace ncclpy::host {

class Segment;

// The watching thread calls this function for the first dead rank of a segment, repeatedly while the segment exists.
// All segments share one function.
using DeathCallback = void (*)(Segment& segment, int rank);

// Starts to watch the segment's processes, including those that join later, until the segment is destroyed. Does
// nothing if no rank of another process has joined yet, so callers call it again when a rank has joined.
void watch_others(const std::shared_ptr<Segment>& segment, DeathCallback on_death);

}  // namespace ncclpy::host
