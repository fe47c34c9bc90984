// A gate before a rank's part of a window, for the other ranks of its process: who writes into it is inside, and who gives
// the memory up closes it. (Of other processes the mapping keeps the memory.)
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace ncclpy::host {

class PutGate {
 public:
  // False if it is closed; else leave() it.
  bool enter() {
    inside_.fetch_add(1, std::memory_order_seq_cst);
    if (!closed_.load(std::memory_order_seq_cst)) return true;
    leave();
    return false;
  }
  void leave() { inside_.fetch_sub(1, std::memory_order_seq_cst); }
  // Returns when nobody is inside; they copy, and wait for nobody.
  void close() {
    closed_.store(true, std::memory_order_seq_cst);
    while (inside_.load(std::memory_order_seq_cst) != 0) sched_yield();
  }

 private:
  std::atomic<uint32_t> inside_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace ncclpy::host
