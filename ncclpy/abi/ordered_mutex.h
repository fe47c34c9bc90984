/* Mutexes that all threads take in the same order. In a normal build they are pthread mutexes. With -Ddebug_locks=true
 * each mutex has a position in that order, and each thread keeps a record of the locks that it holds: a thread that
 * waits for a lock out of order ends the process with a message.
 *
 * The list is the one in docs/locks.md, outermost locks first, and a test compares the two. A row has the lock's name,
 * the words by which that page names it, the locks that may be taken directly under it (whatever may be taken under
 * those is allowed as well), and flags: rules for the lock and the GIL, and how one thread may take it several times.
 */
#ifndef NCCLPY_ORDERED_MUTEX_H
#define NCCLPY_ORDERED_MUTEX_H

#include <pthread.h>
#include <stddef.h>

#define NCCLPY_LOCKS(LOCK)                                                                                           \
  LOCK(DEFAULT_MANAGER, "the default Manager's", 0, NCCLPY_TAKES_GIL)                                                \
  LOCK(PLAN, "a plan's mutex", NCCLPY_BELOW(MANAGER), NCCLPY_TAKES_GIL | NCCLPY_AWAITED_WITHOUT_GIL)                 \
  LOCK(MANAGER, "the Manager's `Lock`",                                                                              \
       NCCLPY_ONE(ORDER) | NCCLPY_ONE(LIST) | NCCLPY_ONE(MONITOR) | NCCLPY_ONE(HANDLES),                             \
       NCCLPY_TAKES_GIL | NCCLPY_AWAITED_WITHOUT_GIL)                                                                \
  LOCK(ORDER, "the lanes' order", NCCLPY_ONE(LIST), 0)                                                               \
  LOCK(LIST, "a lane's list", 0, 0)                                                                                  \
  LOCK(COMM, "communicators' mutexes", NCCLPY_BELOW(COMM), NCCLPY_BY_ADDRESS | NCCLPY_AWAITED_WITHOUT_GIL)           \
  LOCK(GATE, "a communicator's gate", NCCLPY_ENGINE, 0)                                                              \
  LOCK(MONITOR, "the monitor's mutex", 0, 0)                                                                         \
  LOCK(SEGMENTS, "the mutex of segments", 0, 0)                                                                      \
  LOCK(LIBRARY, "the library's", 0, NCCLPY_TAKES_GIL | NCCLPY_RECURSIVE)                                             \
  /* Locks of the host engine. */                                                                                    \
  LOCK(CONTROL, "a communicator's `control`", NCCLPY_BELOW(CONTROL), NCCLPY_AWAITED_WITHOUT_GIL)                     \
  LOCK(GRAPH, "a graph's mutex", NCCLPY_ONE(ISSUING) | NCCLPY_STREAMS, 0)                                            \
  LOCK(ISSUING, "a communicator's `issuing_`", NCCLPY_STREAMS, 0)                                                    \
  LOCK(REGISTRY, "the registry of segments", NCCLPY_ONE(IDS) | NCCLPY_ONE(WATCH), 0)                                 \
  LOCK(STATE, "a communicator's `mutex`", NCCLPY_ONE(MEMORY_USE) | NCCLPY_ONE(WATCH), 0)                             \
  LOCK(SEGMENT, "a segment's `mutex`", NCCLPY_ONE(WATCH), 0)                                                         \
  LOCK(DEVICE, "the list of a device's streams", 0, 0)                                                               \
  LOCK(STREAM, "a stream's mutex", NCCLPY_ONE(WORKERS) | NCCLPY_ONE(MEMORY_USE), 0)                                  \
  LOCK(WORKERS, "the worker pool's", 0, 0)                                                                           \
  LOCK(CAPTURES, "captures", 0, 0)                                                                                   \
  LOCK(SHARED_ABORT, "shared aborts", 0, 0)                                                                          \
  LOCK(FAULTS, "faults", 0, 0)                                                                                       \
  LOCK(GROUP, "jobs of a group", 0, 0)                                                                               \
  LOCK(BACKGROUND, "background jobs", 0, 0)                                                                          \
  LOCK(IDS, "unique ids", 0, 0)                                                                                      \
  LOCK(HANDLES, "handles", 0, 0)                                                                                     \
  LOCK(ALLOCATIONS, "allocations", 0, 0)                                                                             \
  LOCK(MEMORY_USE, "memory in use", 0, 0)                                                                            \
  LOCK(EVENT, "events", 0, 0)                                                                                        \
  LOCK(AWAITED_RANKS, "awaited ranks", 0, 0)                                                                         \
  LOCK(SWEEPER, "the sweeper's", 0, 0)                                                                               \
  LOCK(WATCH, "the watch's", 0, 0)                                                                                   \
  /* Locks of stores and of the coordinator. */                                                                      \
  LOCK(STORE_CLIENT, "a store's client's", NCCLPY_ONE(STORE_CONNECTIONS) | NCCLPY_ONE(STORE_DESCRIPTORS), 0)         \
  LOCK(STORE_CONNECTIONS, "the connection thread's", NCCLPY_ONE(STORE_DESCRIPTORS), 0)                               \
  LOCK(COORDINATOR, "a coordinator's control plane's", NCCLPY_ONE(STORE_DESCRIPTORS), 0)                             \
  LOCK(STORE_DESCRIPTORS, "descriptors of stores", 0, 0)                                                             \
  LOCK(STORE_LINES, "a store's server's lines for the log", 0, 0)                                                   

#define NCCLPY_LOCK_NUMBER(name, words, under, how) NCCLPY_LOCK_##name,
typedef enum { NCCLPY_LOCKS(NCCLPY_LOCK_NUMBER) NCCLPY_LOCK_COUNT } ncclpy_lock;

enum {
  NCCLPY_TAKES_GIL = 1,            /* a thread that holds the lock may wait for the GIL */
  NCCLPY_AWAITED_WITHOUT_GIL = 2,  /* the lock may be held for long: a thread must release the GIL to wait for it */
  NCCLPY_BY_ADDRESS = 4,           /* a thread may hold several such locks, taken in the order of their addresses */
  NCCLPY_RECURSIVE = 8                 /* the lock is recursive: a thread that holds it may take it again */
};

#ifndef NCCLPY_DEBUG_LOCKS

#define NCCLPY_DEBUG_LOCKS 0
typedef pthread_mutex_t ncclpy_mutex;
#define ncclpy_mutex_init(mutex, lock) pthread_mutex_init(mutex, NULL)
#define ncclpy_mutex_destroy(mutex) pthread_mutex_destroy(mutex)
#define ncclpy_mutex_lock(mutex) pthread_mutex_lock(mutex)
#define ncclpy_mutex_trylock(mutex) pthread_mutex_trylock(mutex)
#define ncclpy_mutex_unlock(mutex) pthread_mutex_unlock(mutex)
#define ncclpy_lock_wanted(lock, which) ((void)0)
#define ncclpy_lock_taken(lock, which) ((void)0)
#define ncclpy_lock_released(lock, which) ((void)0)
#define ncclpy_lock_none(first, before) ((void)0)

#else

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclpy_mutex {
  pthread_mutex_t raw;
  ncclpy_lock lock;
} ncclpy_mutex;

/* Called before this thread waits for a lock: ends the process if the wait is out of order. A thread that only tries
   to take a lock does not call this: it does not wait, so it cannot be part of a deadlock. If it gets the lock, the
   lock is recorded like any other. */
void ncclpy_lock_wanted(ncclpy_lock lock, const void* which);
void ncclpy_lock_taken(ncclpy_lock lock, const void* which);
void ncclpy_lock_released(ncclpy_lock lock, const void* which);
/* Ends the process if this thread holds `first` or a lock after it in the list. `before` is for the message: what the
   thread is about to do. */
void ncclpy_lock_none(ncclpy_lock first, const char* before);

static inline int ncclpy_mutex_init(ncclpy_mutex* mutex, ncclpy_lock lock) {
  mutex->lock = lock;
  return pthread_mutex_init(&mutex->raw, NULL);
}

static inline int ncclpy_mutex_destroy(ncclpy_mutex* mutex) { return pthread_mutex_destroy(&mutex->raw); }

static inline int ncclpy_mutex_lock(ncclpy_mutex* mutex) {
  int failed;
  ncclpy_lock_wanted(mutex->lock, mutex);
  failed = pthread_mutex_lock(&mutex->raw);
  ncclpy_lock_taken(mutex->lock, mutex);
  return failed;
}

static inline int ncclpy_mutex_trylock(ncclpy_mutex* mutex) {
  int failed = pthread_mutex_trylock(&mutex->raw);
  if (!failed) ncclpy_lock_taken(mutex->lock, mutex);
  return failed;
}

static inline int ncclpy_mutex_unlock(ncclpy_mutex* mutex) {
  ncclpy_lock_released(mutex->lock, mutex);
  return pthread_mutex_unlock(&mutex->raw);
}

#ifdef __cplusplus
}
#endif

#endif
#endif
