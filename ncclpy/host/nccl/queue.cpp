// Turns.
#include "queue.hpp"

namespace ncclpy::host {

bool Queue::enter(uint64_t ticket) {
  running_.fetch_add(1, std::memory_order_seq_cst);
  if (executed_.load(std::memory_order_acquire) != ticket) {
    wait_until(bell, [&] { return executed_.load(std::memory_order_acquire) == ticket || health_.stopped(); });
  }
  return !health_.stopped();
}

void Queue::leave(uint64_t ticket) {
  // After an abort the order is void; the count only has to reach what was issued.
  if (executed_.load(std::memory_order_acquire) == ticket) executed_.store(ticket + 1, std::memory_order_release);
  running_.fetch_sub(1, std::memory_order_seq_cst);
  bell.ring();
}

void Queue::drain() {
  const uint64_t target = issued_.load(std::memory_order_acquire);
  wait_until(bell, [&] { return executed_.load(std::memory_order_acquire) >= target || health_.stopped(); });
}

}  // namespace ncclpy::host
