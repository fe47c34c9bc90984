// The records of frames, upwards and downwards, and how the parts of an operation are merged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "node.hpp"

namespace ncclpy::coordinator {

// The kinds of records, upwards and downwards. "Slots" are those of the response cache.
enum Up : uint64_t {
  kUpFull,      // an operation, in full
  kUpBits,      // the slots of operations
  kUpJoin,      // ranks that have joined
  kUpShutDown,  // a rank shuts the coordinator down
  kUpClosed,    // the reply to kDownClosing: no rank of the sender's subtree brings anything more
  kUpLost,      // ranks that are lost
  kUpHint,      // an operation that waits for long, and the ranks of the subtree that have brought it
  kUpCount      // no kind: the bound of the numbers that a reader accepts
};
enum Down : uint64_t {
  kDownBits,       // the slots of operations to run
  kDownNew,        // an operation to run, in full, and the slot that keeps it, if any
  kDownMismatch,   // an operation on which the ranks disagree
  kDownAfterJoin,  // an operation that is not defined without the ranks that have joined
  kDownOverdue,    // an operation that not all ranks have brought in time
  kDownJoined,     // ranks that have joined
  kDownAllJoined,  // all ranks have joined
  kDownGroup,      // a new process set
  kDownClosing,    // a shutdown with `drain` has begun
  kDownEnded,      // the coordinator has ended
  kDownCount,      // no kind: the bound of the numbers that a reader accepts
};

constexpr uint32_t kNoSlot = UINT32_MAX;

inline void write_parts(Writer& out, const std::vector<Part>& parts) {
  out.number(parts.size());
  for (const Part& part : parts) {
    out.text(part.fixed);
    part.ranks.write(out);
  }
}

// Adds ranks to the part with the same `fixed`, or to a new one.
inline void merge(std::vector<Part>& parts, const std::string& fixed, const Bits& ranks) {
  for (Part& part : parts) {
    if (part.fixed == fixed) {
      part.ranks.add(ranks);
      return;
    }
  }
  parts.push_back({fixed, ranks});
}

inline Bits single(uint32_t rank) {
  Bits made;
  made.add(rank);
  return made;
}

// The index of a rank among the members of its set.
inline size_t position(const Bits& members, uint32_t rank) {
  size_t before = 0;
  for (const uint32_t member : members.list()) {
    if (member == rank) break;
    ++before;
  }
  return before;
}

}  // namespace ncclpy::coordinator
