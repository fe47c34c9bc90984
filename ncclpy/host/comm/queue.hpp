// The order of one communicator's launches over all of its streams, and the launches that are still running.
#pragma once

#include <atomic>
#include <mutex>

#include "base/mutex.hpp"
#include "base/wait.hpp"
#include "health.hpp"

namespace ncclpy::host {

enum class Turn {
  ready,
  stopped,    // the communicator has stopped before the launch's turn
  suspended,  // the calling thread's time limit has passed
};

class Queue {
 public:
  explicit Queue(const Health& health) : health_(health) {}

  // Calls `put(ticket)`, which puts a launch on its streams, under a lock: the order on the streams is the order of
  // the tickets. If `put` throws, no ticket is taken.
  template <class Put>
  void issue(Put put) {
    std::lock_guard lock(issuing_);
    const uint64_t ticket = issued_.load(std::memory_order_relaxed);
    put(ticket);
    issued_.store(ticket + 1, std::memory_order_release);
  }
  // Takes a place in the order for a launch of a graph, which queues its tasks without issue().
  uint64_t take_ticket() {
    std::lock_guard lock(issuing_);
    return issued_.fetch_add(1, std::memory_order_acq_rel);
  }

  // Waits for this launch's turn. After `ready` or `stopped` the caller must call leave(), or end_run() if it suspends
  // the launch; after `suspended` neither.
  Turn enter(uint64_t ticket);
  void leave(uint64_t ticket);
  // Ends the thread's work on a launch that has completed, or that another thread will resume by enter().
  void end_run();
  // Records that a launch hangs until an abort or a revoke.
  void note_hang() {
    hangs_.store(true, std::memory_order_release);
    changed.notify();
  }
  // Waits until everything issued so far has run, or until a launch hangs or the communicator has stopped.
  void drain();

  // Called when a background job begins, and ends, its work on the communicator: an abort waits for the job, as in
  // NCCL.
  void begin_job() { jobs_.fetch_add(1, std::memory_order_seq_cst); }
  void end_job() {
    jobs_.fetch_sub(1, std::memory_order_seq_cst);
    changed.notify();
  }
  // Wait until no launch touches memory any more; await_all also until no job works on the communicator.
  void await_launches() {
    wait_until(changed, [this] { return running_.load(std::memory_order_seq_cst) == 0; });
  }
  void await_all() {
    wait_until(changed, [this] {
      return running_.load(std::memory_order_seq_cst) == 0 && jobs_.load(std::memory_order_seq_cst) == 0;
    });
  }

  FutexEvent changed;  // notified in this process when a launch or job has ended or hangs, or the communicator stops

 private:
  const Health& health_;
  Mutex<NCCLPY_LOCK_ISSUING> issuing_;
  std::atomic<uint64_t> issued_{0};
  std::atomic<uint64_t> executed_{0};
  std::atomic<uint32_t> running_{0};
  std::atomic<uint32_t> jobs_{0};
  std::atomic<bool> hangs_{false};
};

}  // namespace ncclpy::host
