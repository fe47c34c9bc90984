// Guards a rank's part of a window against the other ranks of its process: they write to it between enter() and
// leave(), and close() precedes the release of the memory. (A rank of another process writes through a mapping of its
// own, which keeps the memory.)
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace ncclpy::host {

class PutGate {
 public:
  // Returns false if the gate is closed; otherwise leave() must follow.
  bool enter() {
    inside_.fetch_add(1, std::memory_order_seq_cst);
    if (!closed_.load(std::memory_order_seq_cst)) return true;
    leave();
    return false;
  }
  void leave() { inside_.fetch_sub(1, std::memory_order_seq_cst); }
  // Returns when no rank is inside. Ranks inside only copy, and wait for nothing.
  void close() {
    closed_.store(true, std::memory_order_seq_cst);
    while (inside_.load(std::memory_order_seq_cst) != 0) sched_yield();
  }

 private:
  std::atomic<uint32_t> inside_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace ncclpy::host
