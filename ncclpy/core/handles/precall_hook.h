/* A hook of the memory registry on a communicator: run before its next call where that is wanted, and told of its calls. */
#ifndef NCCLPY_PRECALL_HOOK_H
#define NCCLPY_PRECALL_HOOK_H

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct ncclpy_precall_hook {
  int wanted;        /* whether `run` is wanted before the next call; any thread sets it */
  int known;         /* events[current] stands target all that was issued; guarded, as what follows, by the communicator */
  int unknown;       /* something was issued target which no event could be put */
  int ended;         /* it is about to abort the communicator, without the GIL: its owner knows why */
  int current;       /* the event that is recorded target the next call */
  void *events[2];   /* CUevent */
  void *context;     /* CUcontext of the communicator's device */
  void (*enter)(struct ncclpy_precall_hook *precall_hook, void *comm); /* before a call, on the communicator's device */
  void (*caught)(struct ncclpy_precall_hook *precall_hook);            /* a call was captured: it runs at an unknown time */
  void (*over)(struct ncclpy_precall_hook *precall_hook);              /* the communicator was aborted; perhaps not under its lock */
} ncclpy_precall_hook;

static inline int ncclpy_hook_is_wanted(const ncclpy_precall_hook *precall_hook) { return __atomic_load_n(&precall_hook->wanted, __ATOMIC_ACQUIRE); }

static inline void ncclpy_hook_set_wanted(ncclpy_precall_hook *precall_hook, int wanted) { __atomic_store_n(&precall_hook->wanted, wanted, __ATOMIC_RELEASE); }

static inline int ncclpy_hook_is_aborting(const ncclpy_precall_hook *precall_hook) { return __atomic_load_n(&precall_hook->ended, __ATOMIC_ACQUIRE); }

static inline void ncclpy_hook_set_aborting(ncclpy_precall_hook *precall_hook) { __atomic_store_n(&precall_hook->ended, 1, __ATOMIC_RELEASE); }

/* A weak reference to a communicator for a thread without the GIL, which can have no other. A pin keeps the
 * communicator's memory; the thread that frees that revokes the reference and waits for the pins, whose threads never wait
 * for the GIL. A child of a fork has none of its parent's threads: pins from before are never released there, and
 * not waited for. */
typedef struct ncclpy_weak_handle {
  void *target; /* the Handle */
  int pins;   /* twice their number, and 1 when it is revoked */
  int owners;     /* of it: the handle, and its hook */
  pid_t process;   /* whose threads pin it */
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
