// What memory is needed for, so that nobody gives it back too soon: kept with NCCLPY_HOST_CHECKS=1, and only then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"

namespace ncclpy::host {

// Whether the environment asks for checks; read once, when the engine is loaded.
extern const bool checks;

struct Range {
  const void* base;
  std::size_t bytes;

  bool overlaps(const void* other, std::size_t size) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(base), at = reinterpret_cast<std::uintptr_t>(other);
    return bytes > 0 && size > 0 && begin < at + size && at < begin + bytes;
  }
  std::string text() const;  // "16 bytes at 0x..."
};

// Somebody needs some memory for as long as this object is there.
class MemoryUse {
 public:
  enum Kind {
    copies,      // a copy or a memset of the driver's: to give back memory waits for it
    operations,  // of a communicator, which may never come to an end
    registered,
  };

  // `words` say who, and what for: "..., rank 0 of ..., reads". `ended` is asked under a lock, and takes none itself: then
  // the claim is void although it is there.
  MemoryUse(Kind kind, std::vector<Range> ranges, std::string description, std::function<bool()> ended = {});
  ~MemoryUse();
  MemoryUse(const MemoryUse&) = delete;
  MemoryUse& operator=(const MemoryUse&) = delete;

  // Why an allocation cannot be given back now, or "". Who waits for copies does not ask for those.
  static std::string conflict(const Allocation& allocation, bool waits_for_copies);

 private:
  const Kind kind_;
  const std::vector<Range> ranges_;
  const std::string description_;
  const std::function<bool()> ended_;
};

// The last text of a refusal to this thread, for cuGetErrorString; "" if there was none.
extern thread_local std::string last_free_refusal;

}  // namespace ncclpy::host
