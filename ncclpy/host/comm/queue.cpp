// Turns.
#include "queue.hpp"

namespace ncclpy::host {

Turn Queue::enter(uint64_t ticket) {
  running_.fetch_add(1, std::memory_order_seq_cst);
  const auto come = [&] { return executed_.load(std::memory_order_acquire) == ticket; };
  if (!come()) wait_until(bell, [&] { return come() || health_.stopped() || Interruption::wants_out(); });
  if (health_.stopped()) return Turn::stopped;
  if (come()) return Turn::come;
  end_run();
  return Turn::left;
}

void Queue::end_run() {
  running_.fetch_sub(1, std::memory_order_seq_cst);
  bell.ring();
}

void Queue::leave(uint64_t ticket) {
  // After an abort the order is void; the count only has to reach what was issued.
  if (executed_.load(std::memory_order_acquire) == ticket) executed_.store(ticket + 1, std::memory_order_release);
  end_run();
}

void Queue::drain() {
  const uint64_t target = issued_.load(std::memory_order_acquire);
  wait_until(bell, [&] { return executed_.load(std::memory_order_acquire) >= target || health_.stopped(); });
}

}  // namespace ncclpy::host
