// Waiting for another rank: a short spin while the answer is likely to come soon, then a sleep on a futex.
//
// A FutexEvent lies beside the data that it announces, in shared or private memory. The thread that changes the data
// calls notify(); a waiting thread reads the data again after every notification. Sleeping threads are counted, so
// that notify() makes no system call when none sleeps.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

#include "thread.hpp"
#include "wait_control.hpp"

namespace ncclpy::host {

struct FutexEvent {
  std::atomic<uint32_t> generation{0};
  std::atomic<uint32_t> waiters{0};

  void notify() {
    // Both sides have a fence: either the notifying thread sees the waiter, or the waiter sees the new data. While no
    // thread waits, the event is only read, so that its cache line stays shared.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    notify_after_fence();
  }
  // Like notify(), for a caller that has executed a seq_cst fence after the change.
  void notify_after_fence() {
    if (waiters.load(std::memory_order_relaxed) == 0) return;
    generation.fetch_add(1, std::memory_order_seq_cst);
    wake();
  }
  void wake();
  // Sleeps while the generation is `seen`, for at most WaitControl::max_sleep(). May return early, for example after a
  // signal.
  void sleep(uint32_t seen);
};

// The cores that the calling thread may use. An empty set if they cannot be determined: Spin then assumes more ranks
// than cores.
cpu_set_t own_cores();

// Spins for as long as spinning has recently succeeded. Two ranks that share a core cannot succeed, even if another
// core is free: the spinning rank holds up the rank that it waits for. Several threads may use one Spin.
//
// The scheduler leaves two ranks on one core as long as they yield to each other, and each operation takes the time of
// both. A sleep does not always separate them: in a virtual machine Linux cannot tell an idle core from one that the
// host has taken away, so it does not place a woken thread there. A thread therefore moves itself to another core if
// several of its yields have returned late.
class Spin {
 public:
  // With more ranks than cores spinning only delays the other ranks, so until() does not poll at all. Before
  // set_cores() is called, all ranks are assumed to have this thread's cores.
  explicit Spin(int ranks);
  // Sets the cores that each rank may use: launchers may bind each rank to a core of its own.
  void set_cores(int ranks, const std::function<const cpu_set_t&(int)>& cores_of);

  // Returns whether `done()` has become true.
  template <class Done>
  bool until(Done done) {
    const int polls = polls_.load(std::memory_order_relaxed);
    for (int i = 0; i < polls; i++) {
      if (done()) {
        if (i > 0) note_hit(polls);
        return true;
      }
      for (int k = 0; k < 4; k++) relax();
    }
    if (polls > fewest) polls_.store(polls / 2, std::memory_order_relaxed);
    return false;
  }

  // Whether there are more ranks than cores.
  bool is_crowded() const { return polls_.load(std::memory_order_relaxed) == 0; }
  // Yields the core, or moves to another one.
  void yield();

 private:
  static constexpr int fewest = 16, most = 1024;
  static constexpr int few_late = 2, many_late = 256;

  void note_hit(int polls) {
    polls_.store(std::min(2 * polls, most), std::memory_order_relaxed);
    if (late_.load(std::memory_order_relaxed) == 0) return;
    late_.store(0, std::memory_order_relaxed);
    late_needed_.store(few_late, std::memory_order_relaxed);
  }

  std::atomic<int> polls_;
  std::atomic<int> late_{0};                // yields that returned late since the last successful spin
  // When late_ reaches this number, a thread may move to another core; late_ then restarts at 0, and this number
  // doubles.
  std::atomic<int> late_needed_{few_late};
};

// Yields before the first sleep. A rank on the same core reaches its barrier within a few microseconds, and a sleep
// with its wake-up costs as much. With many ranks on a core a round through all of them takes one yield for each.
constexpr int yields = 100;
// With a core for each rank, a waiting rank yields for as long as another rank needs for 1 MB, and then sleeps: on a
// virtual machine waking a core takes half of that time.
constexpr std::chrono::microseconds yield_for{300};

// Returns when `done()` is true. `done` is called again after every notification of `changed`. It must also return
// true after an abort, except where the wait is known to end by itself.
template <class Done>
void sleep_until(FutexEvent& changed, Done done) {
  // `done` may do work and return true because of that work, so it is not called again once it has returned true.
  bool answer = done();
  while (!answer) {
    changed.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = changed.generation.load(std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    answer = done();
    if (!answer) changed.sleep(seen);
    changed.waiters.fetch_sub(1, std::memory_order_seq_cst);
    if (!answer) answer = done();
    if (!answer) WaitControl::poll();
  }
}

// As sleep_until, after some yields: another rank on the same core can run, and a sleep costs two system calls and a
// wake-up.
template <class Done>
void wait_until(FutexEvent& changed, Done done) {
  for (int i = 0; i < yields; i++) {
    if (done()) return;
    sched_yield();
  }
  sleep_until(changed, done);
}

// Like the wait_until() above, but spins first, and may yield for longer.
template <class Done>
void wait_until(FutexEvent& changed, Spin& spin, Done done) {
  if (spin.until(done)) return;
  const auto until = std::chrono::steady_clock::now() + (spin.is_crowded() ? std::chrono::microseconds(0) : yield_for);
  for (int i = 1;; i++) {
    if (done()) return;
    spin.yield();
    if (i % 16 != 0) continue;
    WaitControl::poll();  // not only in the sleep: other threads may use the core for long during these yields
    if (i >= yields && std::chrono::steady_clock::now() >= until) break;
  }
  sleep_until(changed, done);
}

}  // namespace ncclpy::host
