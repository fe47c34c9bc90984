/* Who lives beside a communicator: what is wanted of it before the communicator's next call, and what it is told. */
#ifndef NCCLPY_TENANT_H
#define NCCLPY_TENANT_H

typedef struct ncclpy_tenant {
  int wanted;        /* it wants in before the next call; any thread sets it */
  int known;         /* events[current] stands behind all that was issued; guarded, as what follows, by the communicator */
  int unknown;       /* something was issued behind which no event could be put */
  int current;       /* the event that is recorded behind the next call */
  void *events[2];   /* CUevent */
  void *context;     /* CUcontext of the communicator's device */
  void (*enter)(struct ncclpy_tenant *tenant, void *comm); /* before a call, on the communicator's device */
  void (*caught)(struct ncclpy_tenant *tenant);            /* a call was captured: nobody knows when it runs */
} ncclpy_tenant;

static inline int ncclpy_tenant_wants(const ncclpy_tenant *tenant) { return __atomic_load_n(&tenant->wanted, __ATOMIC_ACQUIRE); }

static inline void ncclpy_tenant_calls(ncclpy_tenant *tenant, int wanted) { __atomic_store_n(&tenant->wanted, wanted, __ATOMIC_RELEASE); }

#endif
