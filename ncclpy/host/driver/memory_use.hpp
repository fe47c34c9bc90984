// The uses of memory that forbid freeing it. They are recorded only with NCCLPY_HOST_CHECKS=1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"

namespace ncclpy::host {

// Whether NCCLPY_HOST_CHECKS is on; read once, when the engine is loaded.
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

// While this object exists, its ranges are in use.
class MemoryUse {
 public:
  enum Kind {
    copies,      // a copy or a memset of the driver; freeing memory waits for it
    operations,  // of a communicator; they may never complete
    registered,  // with a communicator, as a buffer or a window
  };

  // `description` names the user and ends with a verb that has the range as its object: "cuMemcpyAsync uses". `ended`
  // is called under a lock and must take none; if it returns true, the use no longer counts although the object
  // exists.
  MemoryUse(Kind kind, std::vector<Range> ranges, std::string description, std::function<bool()> ended = {});
  ~MemoryUse();
  MemoryUse(const MemoryUse&) = delete;
  MemoryUse& operator=(const MemoryUse&) = delete;

  // Why an allocation cannot be freed now, or "". With `waits_for_copies` copies are no reason: the caller waits for
  // them before it frees the memory.
  static std::string conflict(const Allocation& allocation, bool waits_for_copies);

 private:
  const Kind kind_;
  const std::vector<Range> ranges_;
  const std::string description_;
  const std::function<bool()> ended_;
};

// Why NCCLPY_HOST_CHECKS=1 refused the calling thread's last cuMemFree or cuMemFreeHost, for cuGetErrorString; "" if
// it did not.
extern thread_local std::string last_free_refusal;

}  // namespace ncclpy::host
