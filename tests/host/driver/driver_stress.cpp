// Many threads use streams, events and memory of the host engine at once; run under a sanitizer.
//
// What a stream does in order is counted without atomics: if the order or visibility fails, so does a count, and
// ThreadSanitizer reports the race. Exits with 0, or prints what went wrong and aborts.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "driver_abi.h"

extern "C" {
#define DECLARE(ret, name, params) ret name params;
NCCLPY_DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE
}

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort(); \
    } \
  } while (0)
#define OK(call) CHECK((call) == CUDA_SUCCESS)

namespace {

constexpr int thread_count = 4, device_total = 2, round_count = 2000;

void use(int device) {
  CUcontext context;
  OK(cuDevicePrimaryCtxRetain(&context, device));
  OK(cuCtxSetCurrent(context));
}

void increment(void* counter) { ++*static_cast<long*>(counter); }

// Each thread drives its own streams, and synchronises with some streams of all threads.
struct Shared {
  CUstream streams[thread_count];
  CUevent events[thread_count];
};

void own_streams(Shared& shared, int me) {
  use(me % device_total);
  std::minstd_rand random(me + 1);
  const CUstream stream = shared.streams[me];
  long expected = 0, counter = 0, expected_ordered = 0, ordered = 0;
  for (int round = 0; round < round_count; ++round) {
    const int other = static_cast<int>(random() % thread_count);
    OK(cuLaunchHostFunc(stream, increment, &counter));
    ++expected;
    switch (random() % 9) {
      case 0:
        OK(cuStreamSynchronize(stream));
        CHECK(counter == expected);
        break;
      case 1:
        OK(cuStreamWaitEvent(stream, shared.events[other], 0));
        break;
      case 2:
        OK(cuEventRecord(shared.events[me], stream));
        break;
      case 3:
        OK(cuEventSynchronize(shared.events[other]));
        break;
      case 4:
        if (cuStreamQuery(stream) == CUDA_SUCCESS) CHECK(counter == expected);
        cuEventQuery(shared.events[other]);
        break;
      case 5: {
        CUstream temporary;
        OK(cuStreamCreateWithPriority(&temporary, random() % 2, 0));
        OK(cuEventRecord(shared.events[me], stream));
        OK(cuStreamWaitEvent(temporary, shared.events[me], 0));
        OK(cuLaunchHostFunc(temporary, increment, &counter));
        ++expected;
        CUevent done;
        OK(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
        OK(cuEventRecord(done, temporary));
        OK(cuStreamDestroy_v2(temporary));
        OK(cuStreamWaitEvent(stream, done, 0));
        OK(cuEventDestroy_v2(done));
        CHECK(cuStreamQuery(temporary) == CUDA_ERROR_INVALID_HANDLE);
        break;
      }
      case 6: {  // ordered by the legacy stream's fences alone
        const CUstream legacy = round % 2 ? nullptr : CU_STREAM_LEGACY;
        for (const CUstream each : {CU_STREAM_PER_THREAD, legacy, CU_STREAM_PER_THREAD, legacy})
          OK(cuLaunchHostFunc(each, increment, &ordered));
        expected_ordered += 4;
        if (random() % 2) OK(cuStreamSynchronize(legacy));
        break;
      }
      case 7: {
        CUdeviceptr memory;
        OK(cuMemAlloc_v2(&memory, 1000));
        OK(cuMemsetD8Async(memory, 5, 1000, stream));
        if (random() % 2) {
          char byte = 0;
          OK(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(&byte), memory + 999, 1, stream));
          CHECK(byte == 5);
        }
        OK(cuMemFree_v2(memory));  // waits for the stream
        break;
      }
      case 8:
        OK(cuCtxSynchronize());
        CHECK(counter == expected);
        break;
    }
  }
  OK(cuCtxSynchronize());
  CHECK(counter == expected);
  CHECK(ordered == expected_ordered);
}

// All threads synchronise one stream, and one thread fills it: helpers and the stream's worker compete.
void one_stream() {
  use(0);
  CUstream stream;
  OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
  long counter = 0;
  std::vector<std::thread> waiters;
  for (int i = 0; i < thread_count; ++i) {
    waiters.emplace_back([stream] {
      for (int round = 0; round < round_count; ++round) OK(cuStreamSynchronize(stream));
    });
  }
  for (int i = 0; i < 5 * round_count; ++i) OK(cuLaunchHostFunc(stream, increment, &counter));
  OK(cuStreamSynchronize(stream));
  CHECK(counter == 5 * round_count);
  for (std::thread& waiter : waiters) waiter.join();
  OK(cuStreamDestroy_v2(stream));
}

struct Hold {
  std::atomic<bool> reached{false}, open{false};
};

void hold(void* data) {
  Hold& self = *static_cast<Hold*>(data);
  self.reached = true;
  while (!self.open) std::this_thread::yield();
}

// A thread that synchronises usually runs the queue itself; tasks queued meanwhile must run as well.
void left_over() {
  use(0);
  CUstream stream;
  OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
  for (int round = 0; round < round_count / 10; ++round) {
    Hold held;
    long counter = 0;
    std::thread helper([&] {
      OK(cuLaunchHostFunc(stream, hold, &held));
      OK(cuStreamSynchronize(stream));
    });
    while (!held.reached) std::this_thread::yield();
    OK(cuLaunchHostFunc(stream, increment, &counter));
    held.open = true;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (cuStreamQuery(stream) != CUDA_SUCCESS) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      std::this_thread::yield();
    }
    CHECK(counter == 1);
    helper.join();
  }
  OK(cuStreamDestroy_v2(stream));
}

}  // namespace

int main() {
  OK(cuInit(0));
  Shared shared;
  for (int i = 0; i < thread_count; ++i) {
    use(i % device_total);
    OK(cuStreamCreateWithPriority(&shared.streams[i], i < 2 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING, 0));
    OK(cuEventCreate(&shared.events[i], CU_EVENT_DEFAULT));
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < thread_count; ++i) threads.emplace_back([&shared, i] { own_streams(shared, i); });
  for (std::thread& thread : threads) thread.join();
  one_stream();
  left_over();
  for (int i = 0; i < thread_count; ++i) OK(cuStreamDestroy_v2(shared.streams[i]));
  std::puts("all counts agree");
}
