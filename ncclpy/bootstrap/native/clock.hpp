// The clock, and the start of native threads.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <cmath>

namespace ncclpy::store {

// Monotonic seconds, those of Python's time.monotonic().
inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Milliseconds for poll() to sleep until the time `then`, at most a minute; rounded up, so that poll() does not return
// just before that time.
inline int milliseconds_until(double then) {
  const double left = (then - now()) * 1e3;
  return left <= 0 ? 0 : left > 60e3 ? 60000 : static_cast<int>(std::ceil(left));
}

// Starts a thread that blocks all signals but faults: Python's handlers belong to the main thread, while a fault must
// reach its handler in any thread. Returns false if no thread can be started.
inline bool start_thread(pthread_t& thread, const char* name, void* (*main)(void*), void* argument) {
  sigset_t all, before;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int failed = pthread_create(&thread, nullptr, main, argument);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!failed) pthread_setname_np(thread, name);
  return !failed;
}

}  // namespace ncclpy::store
