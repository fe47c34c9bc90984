/* The memory registry's hook on a communicator. `run` is called before the communicator's next call of NCCL if
 * `wanted` is set and `lacks_event` is not; the registry is also told of captured calls and of the communicator's end.
 * `wanted` and `aborting` are atomic; the communicator's lock guards `has_event`, `lacks_event`, `current` and
 * `events`. */
#ifndef NCCLPY_PRECALL_HOOK_H
#define NCCLPY_PRECALL_HOOK_H

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct ncclpy_precall_hook {
  int wanted;      /* whether `run` is wanted before the next call; any thread sets it */
  int has_event;   /* events[current] is recorded behind all issued work, unless `lacks_event` is set */
  int lacks_event; /* an operation was issued, or NCCL is still issuing one, that has no event behind it */
  int aborting;    /* the hook's owner is about to abort the communicator without the GIL, and can tell why */
  int current;     /* index of the event to record behind the next call */
  void *events[2]; /* CUevent */
  void *context;   /* CUcontext of the communicator's device */
  void (*run)(struct ncclpy_precall_hook *precall_hook, void *comm); /* before a call, on the communicator's device */
  void (*note_capture)(struct ncclpy_precall_hook *precall_hook);    /* a call was captured */
  void (*note_ended)(struct ncclpy_precall_hook *precall_hook); /* after a close or an abort, perhaps without the lock */
} ncclpy_precall_hook;

static inline int ncclpy_hook_is_wanted(const ncclpy_precall_hook *precall_hook) { return __atomic_load_n(&precall_hook->wanted, __ATOMIC_ACQUIRE); }

static inline void ncclpy_hook_set_wanted(ncclpy_precall_hook *precall_hook, int wanted) { __atomic_store_n(&precall_hook->wanted, wanted, __ATOMIC_RELEASE); }

static inline int ncclpy_hook_is_aborting(const ncclpy_precall_hook *precall_hook) { return __atomic_load_n(&precall_hook->aborting, __ATOMIC_ACQUIRE); }

static inline void ncclpy_hook_set_aborting(ncclpy_precall_hook *precall_hook) { __atomic_store_n(&precall_hook->aborting, 1, __ATOMIC_RELEASE); }

/* A weak reference to a communicator for threads without the GIL, which cannot use Python's weak references. A pin
 * keeps the communicator's memory from being freed. The thread that frees the memory revokes the reference and waits
 * until the pins are released; a thread that holds a pin never waits for the GIL. A forked child has none of its
 * parent's threads, so it does not wait for pins from before the fork, which are never released. */
typedef struct ncclpy_weak_handle {
  void *target; /* the Handle */
  int pins;   /* twice the number of pins, plus 1 when the reference is revoked */
  int owners;     /* how many of the handle and its hook still use this struct; the last one frees it */
  pid_t process;   /* the process in which it was made */
} ncclpy_weak_handle;

static inline ncclpy_weak_handle *ncclpy_weak_handle_new(void *target) {
  ncclpy_weak_handle *weak = (ncclpy_weak_handle *)malloc(sizeof(ncclpy_weak_handle));
  if (weak != NULL) {
    weak->target = target;
    weak->pins = 0;
    weak->owners = 2;
    weak->process = getpid();
  }
  return weak;
}

static inline int ncclpy_weak_handle_pin(ncclpy_weak_handle *weak) {
  if (weak == NULL) return 0;
  if ((__atomic_fetch_add(&weak->pins, 2, __ATOMIC_ACQ_REL) & 1) == 0) return 1;
  __atomic_fetch_sub(&weak->pins, 2, __ATOMIC_ACQ_REL);
  return 0;
}

static inline void ncclpy_weak_handle_unpin(ncclpy_weak_handle *weak) { __atomic_fetch_sub(&weak->pins, 2, __ATOMIC_ACQ_REL); }

static inline void ncclpy_weak_handle_free(ncclpy_weak_handle *weak) {
  if (weak != NULL && __atomic_sub_fetch(&weak->owners, 1, __ATOMIC_ACQ_REL) == 0) free(weak);
}

static inline void ncclpy_weak_handle_revoke(ncclpy_weak_handle *weak) {
  if (weak == NULL) return;
  __atomic_fetch_or(&weak->pins, 1, __ATOMIC_ACQ_REL);
  if (weak->process == getpid()) {
    while (__atomic_load_n(&weak->pins, __ATOMIC_ACQUIRE) != 1) sched_yield();
  }
  ncclpy_weak_handle_free(weak);
}

#endif
