// Calls of the ranks that do not match, recorded in their shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace ncclpy::host {

// The description of a mismatch between calls or messages. The first rank that finds one writes it, once, for all
// ranks.
class Disagreement {
 public:
  // Stores the text, cut at 508 bytes. Returns false, and stores nothing, if another mismatch was reported before.
  bool report(const std::string& text);
  bool is_reported() const { return state_.load(std::memory_order_acquire) == written; }
  std::string text() const;

 private:
  enum : uint32_t { none, begun, written };
  std::atomic<uint32_t> state_{none};
  char text_[508];
};

}  // namespace ncclpy::host
