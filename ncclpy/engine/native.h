/* The clock, atomic words, and futexes: threads sleep on a word until it changes. */
#ifndef NCCLPY_ENGINE_NATIVE_H
#define NCCLPY_ENGINE_NATIVE_H

#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Sequentially consistent: a thread changes a word and then looks for sleepers; a sleeper counts itself and then looks
   at the word. One of them must see the other. With acquire and release alone both could read too early, on ARM. */
static inline int ncclpy_load(const int* word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
static inline int ncclpy_add(int* word, int value) { return __atomic_add_fetch(word, value, __ATOMIC_SEQ_CST); }
static inline int ncclpy_swap(int* word, int value) { return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST); }
static inline void ncclpy_store(int* word, int value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Changes *word to `to` if it is `from`. Returns whether it was `from`. */
static inline int ncclpy_change(int* word, int from, int to) {
  return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

static inline double ncclpy_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Sleeps while *word is `value`, for at most so many seconds and an hour; may return earlier, after a signal. */
static inline void ncclpy_sleep_on(int* word, int value, double seconds) {
  struct timespec t;
  if (seconds <= 0) return;
  if (seconds > 3600) seconds = 3600;
  t.tv_sec = (time_t)seconds;
  t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &t, NULL, 0);
}

static inline void ncclpy_wake(int* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0); }

static inline void ncclpy_wake_one(int* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static inline void ncclpy_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  sched_yield();
#endif
}

/* Lets this thread's sleeps end within a microsecond of their time; by default the kernel adds up to 50 us to each. */
static inline void ncclpy_sharp_timers(void) { prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); }

/* A job for a lane (lanes.hpp). The lane does not use the job after it has called `run`, since `run` lets other
   threads free or push the job again. */
typedef struct ncclpy_job {
  struct ncclpy_job* next;
  void (*run)(struct ncclpy_job*);
} ncclpy_job;

#endif
