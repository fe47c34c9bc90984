// Waiting for another rank: a short spin while the answer is likely to be near, then sleep on a futex.
//
// A Bell lies beside the data that it announces, in shared or private memory. Who changes the data rings; who waits
// looks at the data again after every ring. Sleepers are counted so that a ring nobody hears costs no system call.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "../driver/thread.hpp"

namespace ncclpy::host {

struct Bell {
  std::atomic<uint32_t> rung{0};
  std::atomic<uint32_t> sleepers{0};

  void ring() {
    // Both sides are sequentially consistent: either the ringer sees the sleeper, or the sleeper sees the new data.
    rung.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
  }
  void wake();
  void sleep(uint32_t seen);
};

// How many looks before the first sleep; 0 when there are more ranks than cores, where spinning only delays the others.
int spins_for(int ranks);

// How often the core is given away before the first sleep. A rank that shares it needs a few microseconds to come to
// its gate, which is what a sleep and a wake-up cost; with many ranks a round through all of them takes as many yields.
constexpr int yields = 100;

// Returns when `done()` is true. `done` is asked again after every ring of `bell`, so it covers abort as well.
template <class Done>
void wait_until(Bell& bell, int spins, Done done) {
  for (int i = 0; i < spins; i++) {
    if (done()) return;
    relax();
  }
  // Giving the core away lets a rank run that shares it; sleeping costs two system calls and a wake-up.
  for (int i = 0; i < yields; i++) {
    if (done()) return;
    sched_yield();
  }
  // `done` may do work and report that: a true answer counts, and is not asked for again.
  bool answer = done();
  while (!answer) {
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint32_t seen = bell.rung.load(std::memory_order_seq_cst);
    answer = done();
    if (!answer) bell.sleep(seen);
    bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (!answer) answer = done();
  }
}

}  // namespace ncclpy::host
