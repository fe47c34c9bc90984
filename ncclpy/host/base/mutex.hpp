// The host engine's mutexes. A debug build (NCCLPY_DEBUG_LOCKS) gives each mutex a place in the order of all locks and
// checks the order whenever a mutex is locked (ordered_mutex.h). In other builds they are std::mutex, SpinLock and
// std::shared_mutex.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>

#include "ordered_mutex.h"
#include "thread.hpp"

namespace ncclpy::host {

// For critical sections of a few instructions without a call that may wait. Costs half of what std::mutex costs.
class SpinLock {
 public:
  void lock() {
    for (int polls = 1; taken_.exchange(true, std::memory_order_acquire); ++polls) {
      if (polls % 64 == 0) {
        sched_yield();  // the holder may share this core
      } else {
        relax();
      }
    }
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

#if NCCLPY_DEBUG_LOCKS

template <ncclpy_lock place, class Base>
class Ordered : Base {
 public:
  void lock() {
    ncclpy_lock_wanted(place, this);
    Base::lock();
    ncclpy_lock_taken(place, this);
  }
  void unlock() {
    ncclpy_lock_released(place, this);
    Base::unlock();
  }
  void lock_shared() {
    ncclpy_lock_wanted(place, this);
    Base::lock_shared();
    ncclpy_lock_taken(place, this);
  }
  void unlock_shared() {
    ncclpy_lock_released(place, this);
    Base::unlock_shared();
  }
};

template <ncclpy_lock place>
using Mutex = Ordered<place, std::mutex>;
template <ncclpy_lock place>
using SpinMutex = Ordered<place, SpinLock>;
template <ncclpy_lock place>
using SharedMutex = Ordered<place, std::shared_mutex>;
using Condition = std::condition_variable_any;

#else

template <ncclpy_lock>
using Mutex = std::mutex;
template <ncclpy_lock>
using SpinMutex = SpinLock;
template <ncclpy_lock>
using SharedMutex = std::shared_mutex;
using Condition = std::condition_variable;

#endif

}  // namespace ncclpy::host
