// Starting the engine's threads, and what a spinning thread executes.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace ncclpy::host {

// While an object exists, the calling thread blocks all signals but those of a crash, and so does each thread that it
// starts. The engine's threads leave the other signals to the main thread, which runs Python's handlers.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // A crash must still reach the program's handler.
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Starts a thread with SignalsBlocked; `name`, of up to 15 characters, is for debuggers. Throws std::system_error if
// no thread can be started.
template <class Work>
std::thread start_thread(const char* name, Work work) {
  SignalsBlocked blocked;
  try {
    std::thread thread(std::move(work));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(),
                            std::string("no thread can be started (") + name +
                                "); the limit of threads (ulimit -u, or a container's limit of pids) or of "
                                "memory (ulimit -v) is reached");
  }
}

// A spinning thread executes this between two polls, so that it slows the core's other hardware thread down less.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Fetches a cache line for writing, so that a store to it soon afterwards does not stall.
inline void prefetch_for_write([[maybe_unused]] const void* memory) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(memory)));
#else
  __builtin_prefetch(memory, 1);
#endif
}

}  // namespace ncclpy::host
