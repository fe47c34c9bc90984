// A store's mutexes, each of which has a place in the order of all locks; see ordered_mutex.h. A normal build uses the
// standard library's.
#pragma once

#include <condition_variable>
#include <mutex>

#include "ordered_mutex.h"

namespace ncclpy::store {

#if NCCLPY_DEBUG_LOCKS

template <ncclpy_lock place>
class Mutex : public std::mutex {
 public:
  void lock() {
    ncclpy_lock_wanted(place, this);
    std::mutex::lock();
    ncclpy_lock_taken(place, this);
  }
  bool try_lock() {  // does not wait, so it may be taken in any order
    if (!std::mutex::try_lock()) return false;
    ncclpy_lock_taken(place, this);
    return true;
  }
  void unlock() {
    ncclpy_lock_released(place, this);
    std::mutex::unlock();
  }
};
using Condition = std::condition_variable_any;

#else

template <ncclpy_lock>
using Mutex = std::mutex;
using Condition = std::condition_variable;

#endif

}  // namespace ncclpy::store
