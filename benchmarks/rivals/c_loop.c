/* The lower bound of every call path: C that calls NCCL by the same kind of function pointer, and times itself. */
#include <time.h>

#include "driver_abi.h"
#include "nccl_abi.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
  ncclpy_nccl_table nccl; /* only the entries used are set */
  CUresult (*synchronize)(CUstream stream);
  const void* send;
  void* recv;
  size_t count;
  ncclComm_t comm;
  cudaStream_t stream;
  clockid_t clock;
} arguments;

EXPORT arguments* c_loop_arguments(void* all_reduce, void* group_start, void* group_end, void* synchronize,
                                   const void* send, void* recv, size_t count, void* comm, void* stream,
                                   int clock) {
  static arguments a;
  a.nccl.ncclAllReduce = all_reduce;
  a.nccl.ncclGroupStart = group_start;
  a.nccl.ncclGroupEnd = group_end;
  a.synchronize = synchronize;
  a.send = send;
  a.recv = recv;
  a.count = count;
  a.comm = comm;
  a.stream = stream;
  a.clock = clock;
  return &a;
}

static double now(const arguments* a) {
  struct timespec t;
  clock_gettime(a->clock, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static inline ncclResult_t call(const arguments* a) {
  return a->nccl.ncclAllReduce(a->send, a->recv, a->count, ncclFloat32, ncclSum, a->comm, a->stream);
}

/* Each returns the seconds of n operations, or minus NCCL's result where a call failed. */
#define TRY(expression) \
  do { \
    ncclResult_t result = (expression); \
    if (result != ncclSuccess) return -(double)result; \
  } while (0)

EXPORT double c_loop_host(const arguments* a, long n) {
  double start = now(a);
  for (long i = 0; i < n; i++) TRY(call(a));
  return now(a) - start;
}

EXPORT double c_loop_latency(const arguments* a, long n) {
  double start = now(a);
  for (long i = 0; i < n; i++) {
    TRY(call(a));
    if (a->synchronize(a->stream) != CUDA_SUCCESS) return -1.0;
  }
  return now(a) - start;
}

EXPORT double c_loop_group(const arguments* a, long n, long per_group) {
  double start = now(a);
  for (long i = 0; i < n / per_group; i++) {
    TRY(a->nccl.ncclGroupStart());
    for (long j = 0; j < per_group; j++) TRY(call(a));
    TRY(a->nccl.ncclGroupEnd());
  }
  return now(a) - start;
}

EXPORT double c_loop_empty_group(const arguments* a, long n) {
  double start = now(a);
  for (long i = 0; i < n; i++) {
    TRY(a->nccl.ncclGroupStart());
    TRY(a->nccl.ncclGroupEnd());
  }
  return now(a) - start;
}

/* One thread that drives several devices: n groups with an all-reduce on each of them. */
EXPORT double c_loop_devices(const arguments* a, long n, int devices, const ncclComm_t* comms,
                             const cudaStream_t* streams, const void* const* send, void* const* recv) {
  double start = now(a);
  for (long i = 0; i < n; i++) {
    TRY(a->nccl.ncclGroupStart());
    for (int j = 0; j < devices; j++)
      TRY(a->nccl.ncclAllReduce(send[j], recv[j], a->count, ncclFloat32, ncclSum, comms[j], streams[j]));
    TRY(a->nccl.ncclGroupEnd());
  }
  return now(a) - start;
}
