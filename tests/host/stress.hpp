// Declarations that the files of the stress program share: the engine's functions, checks, threads as ranks.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "driver_abi.h"
#include "base/abi.hpp"

extern "C" {
#define DECLARE(ret, name, params) ret name params;
NCCLPY_DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE
}

extern "C" CUresult ncclpyHostEventHelp(CUevent event, double seconds);
extern "C" CUresult ncclpyHostEventAwait(CUevent event, double seconds);
extern "C" CUresult ncclpyHostEventTell(CUevent event, void (*tell)(void*), void* argument);

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      std::fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, ncclGetLastError(nullptr)); \
      std::_Exit(1); \
    } \
  } while (0)
#define OK(call) CHECK((call) == 0)

// Makes the device current and returns a stream on it.
inline CUstream stream_on(int device) {
  CUcontext context;
  CUstream stream;
  OK(cuDevicePrimaryCtxRetain(&context, device));
  OK(cuCtxSetCurrent(context));
  OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
  return stream;
}

inline void on_threads(int n, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; rank++) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

inline void sleep_us(unsigned microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// In stress_more.cpp: what ranks execute together on a communicator, as threads or processes.
void puts_and_signals(ncclComm_t comm, int rank, int n, CUstream stream);
void replays(ncclComm_t comm, int rank, int n, CUstream stream);
void helps(ncclComm_t comm, int rank, int n, CUstream stream);
void suspended_and_aborted(ncclComm_t comm, int rank, int n, CUstream stream, unsigned seed);
void suspensions(ncclComm_t comm, CUstream stream);
void shrink_and_grow(ncclComm_t comm, int rank, int n, CUstream stream);
// These start their own threads.
void one_graph(int n);
void windows_of_one_thread(int n);
void revocations(int n, unsigned seed);
void random_aborts(int n, unsigned seed);
void stuck_replay();
