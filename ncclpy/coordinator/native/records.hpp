// The records of frames, upwards and downwards, and how the parts of an operation are merged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "node.hpp"

namespace ncclpy::coordinator {

// The kinds of records. kUpClosed: after kDownClosing, no rank below brings anything more. kDownEnded: the coordinator
// has ended. kUpEnd and kDownEnd are no kinds: they bound the numbers that a reader accepts.
enum Up : uint64_t { kUpFull, kUpBits, kUpJoin, kUpShutDown, kUpClosed, kUpLost, kUpHint, kUpEnd };
enum Down : uint64_t {
  kDownBits,
  kDownNew,
  kDownMismatch,
  kDownAfterJoin,
  kDownOverdue,
  kDownJoined,
  kDownAllJoined,
  kDownGroup,
  kDownClosing,
  kDownEnded,
  kDownEnd,
};

constexpr uint32_t kNoSlot = UINT32_MAX;

inline void write_parts(Writer& out, const std::vector<Part>& parts) {
  out.number(parts.size());
  for (const Part& part : parts) {
    out.text(part.fixed);
    part.ranks.write(out);
  }
}

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

inline size_t position(const Bits& members, uint32_t rank) {
  size_t before = 0;
  for (const uint32_t member : members.list()) {
    if (member == rank) break;
    ++before;
  }
  return before;
}

}  // namespace ncclpy::coordinator
