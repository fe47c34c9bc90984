/* Who lives beside a communicator: what is wanted of it before the communicator's next call, and what it is told. */
#ifndef NCCLPY_TENANT_H
#define NCCLPY_TENANT_H

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct ncclpy_tenant {
  int wanted;        /* it wants in before the next call; any thread sets it */
  int known;         /* events[current] stands behind all that was issued; guarded, as what follows, by the communicator */
  int unknown;       /* something was issued behind which no event could be put */
  int ended;         /* it is about to abort the communicator, without the GIL: the landlord knows why */
  int current;       /* the event that is recorded behind the next call */
  void *events[2];   /* CUevent */
  void *context;     /* CUcontext of the communicator's device */
  void (*enter)(struct ncclpy_tenant *tenant, void *comm); /* before a call, on the communicator's device */
  void (*caught)(struct ncclpy_tenant *tenant);            /* a call was captured: nobody knows when it runs */
  void (*over)(struct ncclpy_tenant *tenant);              /* the communicator was aborted; perhaps not under its lock */
} ncclpy_tenant;

static inline int ncclpy_tenant_wants(const ncclpy_tenant *tenant) { return __atomic_load_n(&tenant->wanted, __ATOMIC_ACQUIRE); }

static inline void ncclpy_tenant_calls(ncclpy_tenant *tenant, int wanted) { __atomic_store_n(&tenant->wanted, wanted, __ATOMIC_RELEASE); }

static inline int ncclpy_tenant_ended(const ncclpy_tenant *tenant) { return __atomic_load_n(&tenant->ended, __ATOMIC_ACQUIRE); }

static inline void ncclpy_tenant_ends(ncclpy_tenant *tenant) { __atomic_store_n(&tenant->ended, 1, __ATOMIC_RELEASE); }

/* The way to a communicator for who has no reference to it, and cannot have one without the GIL. Who is within keeps the
 * communicator's memory; who frees that shuts the door, and waits for those within, who never wait for the GIL. A
 * child of a fork has none of its parent's threads: who was within then never leaves there, and is not waited for. */
typedef struct ncclpy_door {
  void *behind; /* the Handle */
  int within;   /* twice their number, and 1 when it is shut */
  int kept;     /* the handle has it, and its tenant */
  pid_t home;   /* the process whose threads go through it */
} ncclpy_door;

static inline ncclpy_door *ncclpy_door_new(void *behind) {
  ncclpy_door *door = (ncclpy_door *)malloc(sizeof(ncclpy_door));
  if (door != NULL) {
    door->behind = behind;
    door->within = 0;
    door->kept = 2;
    door->home = getpid();
  }
  return door;
}

static inline int ncclpy_door_enter(ncclpy_door *door) {
  if (door == NULL) return 0;
  if ((__atomic_fetch_add(&door->within, 2, __ATOMIC_ACQ_REL) & 1) == 0) return 1;
  __atomic_fetch_sub(&door->within, 2, __ATOMIC_ACQ_REL);
  return 0;
}

static inline void ncclpy_door_leave(ncclpy_door *door) { __atomic_fetch_sub(&door->within, 2, __ATOMIC_ACQ_REL); }

static inline void ncclpy_door_free(ncclpy_door *door) {
  if (door != NULL && __atomic_sub_fetch(&door->kept, 1, __ATOMIC_ACQ_REL) == 0) free(door);
}

static inline void ncclpy_door_shut(ncclpy_door *door) {
  if (door == NULL) return;
  __atomic_fetch_or(&door->within, 1, __ATOMIC_ACQ_REL);
  if (door->home == getpid()) {
    while (__atomic_load_n(&door->within, __ATOMIC_ACQUIRE) != 1) sched_yield();
  }
  ncclpy_door_free(door);
}

#endif
