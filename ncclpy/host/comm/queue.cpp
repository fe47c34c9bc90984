// The order of launches.
#include "queue.hpp"

namespace ncclpy::host {

Turn Queue::enter(uint64_t ticket) {
  running_.fetch_add(1, std::memory_order_seq_cst);
  const auto ready = [&] { return executed_.load(std::memory_order_acquire) == ticket; };
  if (!ready()) wait_until(changed, [&] { return ready() || health_.stopped() || WaitControl::must_leave(); });
  if (health_.stopped()) return Turn::stopped;
  if (ready()) return Turn::ready;
  end_run();
  return Turn::suspended;
}

void Queue::end_run() {
  running_.fetch_sub(1, std::memory_order_seq_cst);
  changed.notify();
}

void Queue::leave(uint64_t ticket) {
  // A launch that leaves before its turn is not counted: the communicator has stopped, and enter() and drain() no
  // longer wait for the count.
  if (executed_.load(std::memory_order_acquire) == ticket) executed_.store(ticket + 1, std::memory_order_release);
  end_run();
}

void Queue::drain() {
  const uint64_t target = issued_.load(std::memory_order_acquire);
  wait_until(changed, [&] {
    return executed_.load(std::memory_order_acquire) >= target || hangs_.load(std::memory_order_acquire) ||
           health_.stopped();
  });
}

}  // namespace ncclpy::host
