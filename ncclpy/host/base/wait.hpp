// Waiting for another rank: a short spin while the answer is likely to be near, then sleep on a futex.
//
// A FutexEvent lies beside the data that it announces, in shared or private memory. Who changes the data rings; who waits
// looks at the data again after every ring. Sleepers are counted so that a ring nobody hears costs no system call.
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
    // Both sides have a fence: either the ringer sees the sleeper, or the sleeper sees the new data. While nobody sleeps,
    // a bell is only read, so that its cache line need not travel.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    notify_after_fence();
  }
  // The same for who has had one behind the change.
  void notify_after_fence() {
    if (waiters.load(std::memory_order_relaxed) == 0) return;
    generation.fetch_add(1, std::memory_order_seq_cst);
    wake();
  }
  void wake();
  // Until the next ring, or until the thread's own WaitControl is due.
  void sleep(uint32_t seen);
};

// The cores that the calling thread may use; none if that cannot be found out, with which ranks count as too many.
cpu_set_t own_cores();

// Spinning for as long as has paid lately. Two ranks that share a core, though another one is free, can only wait for
// each other in vain: the one that looks holds up the one it looks for. Several threads may use the same one.
//
// Such ranks stay where they are while they give the core to each other, and each operation takes the time of both. A
// sleep does not help everywhere: to Linux in a virtual machine, a core that idles is one that the host has taken away, and
// who wakes is not put there. So whoever has got the core back late some times goes to another one by itself.
class Spin {
 public:
  // With more ranks than cores, spinning only delays the others: not one look. Until the ranks are known, all are taken to
  // have this thread's cores.
  explicit Spin(int ranks);
  // The cores that each of the ranks may use: launchers may give each a core of its own.
  void set_cores(int ranks, const std::function<const cpu_set_t&(int)>& cores_of);

  // Whether `done()` has become true.
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
  // Give the core away, or go to another one.
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
  std::atomic<int> late_{0};                // how often the core came back late since a look was last in time
  std::atomic<int> late_needed_{few_late};  // to go
};

// How often the core is given away before the first sleep. A rank that shares it needs a few microseconds to come to
// its gate, which is what a sleep and a wake-up cost; with many ranks a round through all of them takes as many yields.
constexpr int yields = 100;
// With a core for each rank, it is given away for as long as a rank is busy with a megabyte: on a virtual machine to wake a core
// takes half of that.
constexpr std::chrono::microseconds yield_for{300};

// Returns when `done()` is true. `done` is asked again after every ring of `bell`, so it covers abort as well.
template <class Done>
void sleep_until(FutexEvent& changed, Done done) {
  // `done` may do work and report that: a true answer counts, and is not asked for again.
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

// The same, after giving the core away: that lets a rank run that shares it, and a sleep costs two system calls and a
// wake-up.
template <class Done>
void wait_until(FutexEvent& changed, Done done) {
  for (int i = 0; i < yields; i++) {
    if (done()) return;
    sched_yield();
  }
  sleep_until(changed, done);
}

// The same, after spinning.
template <class Done>
void wait_until(FutexEvent& changed, Spin& spin, Done done) {
  if (spin.until(done)) return;
  const auto until = std::chrono::steady_clock::now() + (spin.is_crowded() ? std::chrono::microseconds(0) : yield_for);
  for (int i = 1;; i++) {
    if (done()) return;
    spin.yield();
    if (i % 16 != 0) continue;
    WaitControl::poll();  // others may keep the core for long
    if (i >= yields && std::chrono::steady_clock::now() >= until) break;
  }
  sleep_until(changed, done);
}

}  // namespace ncclpy::host
