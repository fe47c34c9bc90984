/* What the engine needs of the machine: atomic words that threads sleep on, and first-in-first-out threads.
 *
 * A thread here never takes the GIL, so Python can neither hold it up nor be held up by it.
 */
#ifndef NCCLPY_ENGINE_NATIVE_H
#define NCCLPY_ENGINE_NATIVE_H

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ordered_mutex.h"

/* In one order for all threads: who changes a word and then looks for sleepers must not miss one who has counted
   itself in and then looked at the word. Acquire and release alone would let both look too early, on ARM. */
static inline int ncclpy_load(const int* word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
static inline int ncclpy_add(int* word, int value) { return __atomic_add_fetch(word, value, __ATOMIC_SEQ_CST); }
static inline int ncclpy_swap(int* word, int value) { return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST); }
static inline void ncclpy_store(int* word, int value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Returns whether *word was `from`, and is `to` now. */
static inline int ncclpy_change(int* word, int from, int to) {
  return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

static inline double ncclpy_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Sleeps while *word is `value`, for at most so many seconds. */
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

/* Lets this thread sleep for microseconds: by default the kernel adds 50 to every sleep. */
static inline void ncclpy_sharp_timers(void) { prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); }

/* A piece of work for a lane; whoever pushes it owns it again once `run` has returned. */
typedef struct ncclpy_job {
  struct ncclpy_job* next;
  void (*run)(struct ncclpy_job*);
} ncclpy_job;

/* A thread with a queue. It spins for a while when the queue is empty, since work comes in bursts, and then sleeps. */
typedef struct ncclpy_lane {
  ncclpy_mutex mutex; /* guards the list */
  ncclpy_mutex turn;  /* held while a job runs, or by who runs something in the lane's stead */
  ncclpy_job* first;
  ncclpy_job* last;
  int pushed;   /* counts jobs, to be slept on */
  int asleep;
  int pending;  /* jobs pushed and not yet run, and whoever has borrowed the lane */
  double spin;  /* seconds */
} ncclpy_lane;

static inline void* ncclpy_lane_main(void* argument) {
  ncclpy_lane* lane = (ncclpy_lane*)argument;
  ncclpy_sharp_timers();
  for (;;) {
    int seen = ncclpy_load(&lane->pushed);
    ncclpy_job* job;
    ncclpy_mutex_lock(&lane->mutex);
    job = lane->first;
    if (job != NULL) {
      lane->first = job->next;
      if (lane->first == NULL) lane->last = NULL;
    }
    ncclpy_mutex_unlock(&lane->mutex);
    if (job != NULL) {
      ncclpy_mutex_lock(&lane->turn);
      job->run(job);
      ncclpy_mutex_unlock(&lane->turn);
      ncclpy_add(&lane->pending, -1);
      continue;
    }
    const double until = ncclpy_now() + lane->spin;
    int spins = 0;
    while (ncclpy_load(&lane->pushed) == seen && ((++spins & 63) != 0 || ncclpy_now() < until)) ncclpy_relax();
    if (ncclpy_load(&lane->pushed) != seen) continue;
    __atomic_store_n(&lane->asleep, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&lane->pushed, __ATOMIC_SEQ_CST) == seen) ncclpy_sleep_on(&lane->pushed, seen, 3600);
    ncclpy_store(&lane->asleep, 0);
  }
  return NULL;
}

/* Returns NULL when no thread can be started. A lane lives as long as the process. */
static inline ncclpy_lane* ncclpy_lane_start(double spin) {
  ncclpy_lane* lane = (ncclpy_lane*)calloc(1, sizeof(ncclpy_lane));
  pthread_attr_t attributes;
  pthread_t thread;
  sigset_t all, before;
  int failed;
  if (lane == NULL) return NULL;
  ncclpy_mutex_init(&lane->mutex, NCCLPY_LOCK_LIST);
  ncclpy_mutex_init(&lane->turn, NCCLPY_LOCK_TURN);
  lane->spin = spin;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  /* Signals are for the program's threads, Python's handlers want the main one; a crash is for who has a handler. */
  sigfillset(&all);
  sigdelset(&all, SIGSEGV);
  sigdelset(&all, SIGBUS);
  sigdelset(&all, SIGFPE);
  sigdelset(&all, SIGILL);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  failed = pthread_create(&thread, &attributes, ncclpy_lane_main, lane);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  if (failed) {
    free(lane);
    return NULL;
  }
  pthread_setname_np(thread, "ncclpy-lane");
  return lane;
}

static inline void ncclpy_lane_push(ncclpy_lane* lane, ncclpy_job* job) {
  job->next = NULL;
  ncclpy_add(&lane->pending, 1);
  ncclpy_mutex_lock(&lane->mutex);
  if (lane->last != NULL) lane->last->next = job;
  else lane->first = job;
  lane->last = job;
  ncclpy_mutex_unlock(&lane->mutex);
  __atomic_add_fetch(&lane->pushed, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&lane->asleep, __ATOMIC_SEQ_CST)) ncclpy_wake(&lane->pushed);
}

/* Takes the lane's place, if it has nothing to do: what is pushed meanwhile waits for ncclpy_lane_give_back. */
static inline int ncclpy_lane_borrow(ncclpy_lane* lane) {
  if (ncclpy_mutex_trylock(&lane->turn) != 0) return 0;
  if (ncclpy_change(&lane->pending, 0, 1)) return 1;
  ncclpy_mutex_unlock(&lane->turn);
  return 0;
}

static inline int ncclpy_lane_is_asleep(ncclpy_lane* lane) { return ncclpy_load(&lane->asleep); }

static inline void ncclpy_lane_give_back(ncclpy_lane* lane) {
  ncclpy_add(&lane->pending, -1);
  ncclpy_mutex_unlock(&lane->turn);
}

#endif
