// What the ranks of a communicator do not agree on, in the memory that they share.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace ncclpy::host {

// In the ranks' shared memory: which messages have met that differ. The first rank that finds any writes it, once, for all.
class Disagreement {
 public:
  // False if another one has been first.
  bool report(const std::string& text);
  bool is_reported() const { return state_.load(std::memory_order_acquire) == written; }
  std::string text() const;

 private:
  enum : uint32_t { none, begun, written };
  std::atomic<uint32_t> state_{none};
  char text_[508];
};

}  // namespace ncclpy::host
