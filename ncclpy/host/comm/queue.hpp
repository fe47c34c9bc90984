// The order of one communicator's launches, over all of its streams, and what is still under way of them.
#pragma once

#include <atomic>
#include <mutex>

#include "base/mutex.hpp"
#include "base/wait.hpp"
#include "health.hpp"

namespace ncclpy::host {

enum class Turn {
  ready,
  stopped,  // before that
  suspended,     // by this thread, which goes its way
};

class Queue {
 public:
  explicit Queue(const Health& health) : health_(health) {}

  // Calls `put(ticket)`, which puts a launch on its streams, where no other thread can get between: the order on the
  // streams is that of the tickets. What `put` throws takes no ticket.
  template <class Put>
  void issue(Put put) {
    std::lock_guard lock(issuing_);
    const uint64_t ticket = issued_.load(std::memory_order_relaxed);
    put(ticket);
    issued_.store(ticket + 1, std::memory_order_release);
  }
  // A place in the order for a launch that was put on its streams before.
  uint64_t take_ticket() {
    std::lock_guard lock(issuing_);
    return issued_.fetch_add(1, std::memory_order_acq_rel);
  }

  // Waits for this launch's turn. One that was not left must leave() it; one that was has not been here.
  Turn enter(uint64_t ticket);
  void leave(uint64_t ticket);
  // Is at a launch no longer: that has left, or is to enter again.
  void end_run();
  // Waits until everything issued has run, or for its end.
  void drain();

  // A job in the background is about to work on the communicator, and has done so: an abort waits for that, as NCCL's.
  void begin_job() { jobs_.fetch_add(1, std::memory_order_seq_cst); }
  void end_job() {
    jobs_.fetch_sub(1, std::memory_order_seq_cst);
    changed.notify();
  }
  // Wait until no launch touches memory any more; and until no job works on it.
  void await_launches() {
    wait_until(changed, [this] { return running_.load(std::memory_order_seq_cst) == 0; });
  }
  void await_all() {
    wait_until(changed, [this] {
      return running_.load(std::memory_order_seq_cst) == 0 && jobs_.load(std::memory_order_seq_cst) == 0;
    });
  }

  FutexEvent changed;  // news within this process: a launch has run, an abort

 private:
  const Health& health_;
  Mutex<NCCLPY_LOCK_ISSUING> issuing_;
  std::atomic<uint64_t> issued_{0};
  std::atomic<uint64_t> executed_{0};
  std::atomic<uint32_t> running_{0};
  std::atomic<uint32_t> jobs_{0};
};

}  // namespace ncclpy::host
