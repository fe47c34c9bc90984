// The text is written once and never changed.
#include "disagreement.hpp"

#include <algorithm>
#include <cstring>

namespace ncclpy::host {

bool Disagreement::report(const std::string& text) {
  uint32_t expected = none;
  if (!state_.compare_exchange_strong(expected, begun, std::memory_order_acq_rel)) return false;
  std::memcpy(text_, text.data(), std::min(text.size(), sizeof text_));  // the rest is still zero
  state_.store(written, std::memory_order_release);
  return true;
}

std::string Disagreement::text() const { return {text_, strnlen(text_, sizeof text_)}; }

}  // namespace ncclpy::host
