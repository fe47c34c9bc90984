/* A program without ncclpy: NVIDIA's nccl.h and cuda.h, and a library with their symbols. Ranks are threads. */
#include <cuda.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define RANKS 4
#define COUNT 100003

#define CHECK(call, success, text) \
  do { \
    int result = (int)(call); \
    if (result != success) { \
      fprintf(stderr, "%s:%d: %s returned %d %s\n", __FILE__, __LINE__, #call, result, text); \
      exit(1); \
    } \
  } while (0)
#define NCCL(call) CHECK(call, ncclSuccess, ncclGetLastError(NULL))
#define CUDA(call) CHECK(call, CUDA_SUCCESS, "")

static ncclUniqueId id;

static void* run(void* argument) {
  const int rank = (int)(long)argument;
  CUcontext context;
  CUstream stream;
  ncclComm_t comm;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  int size = 0, version = 0;
  float* values = malloc(COUNT * sizeof *values);
  config.blocking = 1;
  CUDA(cuDevicePrimaryCtxRetain(&context, rank));
  CUDA(cuCtxSetCurrent(context));
  CUDA(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
  NCCL(ncclGetVersion(&version));
  NCCL(ncclCommInitRankConfig(&comm, RANKS, id, rank, &config));
  NCCL(ncclCommCount(comm, &size));
  for (int i = 0; i < COUNT; i++) values[i] = (float)(rank + i % 7);
  NCCL(ncclAllReduce(values, values, COUNT, ncclFloat32, ncclSum, comm, (cudaStream_t)stream));
  CUDA(cuStreamSynchronize(stream));
  for (int i = 0; i < COUNT; i++) {
    if (values[i] != (float)(6 + 4 * (i % 7)) || size != RANKS || version != NCCL_VERSION_CODE) {
      fprintf(stderr, "rank %d: element %d is %g, %d ranks, version %d\n", rank, i, values[i], size, version);
      exit(1);
    }
  }
  NCCL(ncclCommFinalize(comm));
  NCCL(ncclCommDestroy(comm));
  CUDA(cuStreamDestroy(stream));
  free(values);
  return NULL;
}

int main(void) {
  pthread_t threads[RANKS];
  CUDA(cuInit(0));
  NCCL(ncclGetUniqueId(&id));
  for (long rank = 0; rank < RANKS; rank++) pthread_create(&threads[rank], NULL, run, (void*)rank);
  for (int rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
  puts("ok");
  return 0;
}
