// Windows, graphs, and communicators that are derived, revoked, suspended and resumed; see stress.cpp.
#include "stress.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

namespace {

int count_of(ncclComm_t comm) {
  int count;
  OK(ncclCommCount(comm, &count));
  return count;
}

int rank_of(ncclComm_t comm) {
  int rank;
  OK(ncclCommUserRank(comm, &rank));
  return rank;
}

// Ranks add up their numbers. The elements are enough for several blocks.
void check_sum(ncclComm_t comm, CUstream stream) {
  const int n = count_of(comm);
  std::vector<float> x(30000, float(rank_of(comm) + 1));
  OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, comm, stream));
  OK(cuStreamSynchronize(stream));
  CHECK(std::all_of(x.begin(), x.end(), [n](float value) { return value == float(n * (n + 1) / 2); }));
}

std::vector<ncclComm_t> all_ranks(int n) {
  std::vector<ncclComm_t> comms(static_cast<size_t>(n));
  OK(ncclCommInitAll(comms.data(), n, nullptr));
  return comms;
}

CUgraphExec end_capture(CUstream stream) {
  CUgraph graph;
  CUgraphExec exec;
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  OK(cuGraphDestroy(graph));
  return exec;
}

// Not atomic: what a graph runs out of order is a race.
void increment(void* counter) { ++*static_cast<long*>(counter); }

// One stream waits for the other one's work, in a capture as outside.
void follow(CUstream follower, CUstream stream) {
  CUcontext context;
  CUevent event;
  OK(cuStreamGetCtx(stream, &context));
  OK(cuCtxSetCurrent(context));  // the event must belong to the stream's device
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cuEventRecord(event, stream));
  OK(cuStreamWaitEvent(follower, event, 0));
  OK(cuEventDestroy_v2(event));
}

}  // namespace

// Values go around a ring through windows, beside all-reduces on another stream that tell when all ranks have read.
void puts_and_signals(ncclComm_t comm, int rank, int n, CUstream stream) {
  constexpr size_t count = 20000, bytes = count * sizeof(float);
  constexpr int rounds = 8;
  const int left = (rank + n - 1) % n, right = (rank + 1) % n;
  CUstream other;
  OK(cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0));
  std::vector<float> ones(1000, 1.0f);
  for (int windows = 0; windows < 2; windows++) {
    void *memory, *user;
    OK(ncclMemAlloc(&memory, 2 * bytes));
    float *mine = static_cast<float*>(memory), *from_left = mine + count;
    ncclWindow_t window;
    OK(ncclCommWindowRegister(comm, memory, 2 * bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
    OK(ncclWinGetUserPtr(comm, window, &user));
    CHECK(user == memory);
    for (int round = 0; round < rounds; round++) {
      std::fill_n(mine, count, float(rank + round));
      OK(ncclAllReduce(ones.data(), ones.data(), ones.size(), ncclFloat32, ncclMax, comm, other));
      OK(cuStreamSynchronize(other));
      OK(ncclPutSignal(mine, count, ncclFloat32, right, window, bytes, 0, 0, 0, comm, stream));
      OK(ncclSignal(left, 0, 0, 0, comm, stream));
      ncclWaitSignalDesc_t both[] = {{1, left, 0, 0}, {1, right, 0, 0}};
      OK(ncclWaitSignal(2, both, comm, stream));
      // The end of a window waits as well.
      if (round < rounds - 1) OK(cuStreamSynchronize(stream));
      else OK(ncclCommWindowDeregister(comm, window));
      // With two ranks both neighbours are the same rank, and their signals are counted together: both have arrived.
      CHECK(std::all_of(from_left, mine + 2 * count, [&](float value) { return value == float(left + round); }));
    }
    OK(ncclMemFree(memory));
  }
  OK(cuStreamDestroy_v2(other));
}

// Operations of all kinds that can be suspended, up to and just above the size limit; false if one was refused. `x` is
// this rank's, `y` and `z` have space for all ranks.
bool suspendable(int kind, size_t count, const float* x, float* y, float* z, ncclComm_t comm, int rank, int n, CUstream stream) {
  const int right = (rank + 1) % n, left = (rank + n - 1) % n;
  bool fine = true;
  const auto call = [&fine](ncclResult_t result) { fine = fine && result == ncclSuccess; };
  if (kind == 0) {
    const int root = int(count % size_t(n));
    if (count % 4 < 2) call(ncclAllReduce(x, y, count, ncclFloat32, ncclSum, comm, stream));
    else call(ncclReduce(x, y, count, ncclFloat32, ncclSum, root, comm, stream));
    call(ncclBroadcast(y, z, count, ncclFloat32, root, comm, stream));
  } else if (kind == 1) {
    call(ncclAllGather(x, y, count, ncclFloat32, comm, stream));
    call(ncclReduceScatter(y, z, count, ncclFloat32, ncclSum, comm, stream));
  } else if (kind == 2) {
    call(ncclGroupStart());
    call(ncclSend(x, count, ncclFloat32, right, comm, stream));
    call(ncclRecv(z, count, ncclFloat32, left, comm, stream));
    call(ncclAllReduce(x, y, count, ncclFloat32, ncclMax, comm, stream));
    call(ncclSend(x, 1 + count / 3, ncclFloat32, right, comm, stream));
    call(ncclRecv(y + count, 1 + count / 3, ncclFloat32, left, comm, stream));
    call(ncclGroupEnd());
  } else {
    // Around the ring, one rank after the other.
    if (rank > 0) call(ncclRecv(z, count, ncclFloat32, left, comm, stream));
    call(ncclSend(rank > 0 ? z : x, count, ncclFloat32, right, comm, stream));
    if (rank == 0) call(ncclRecv(z, count, ncclFloat32, left, comm, stream));
  }
  return fine;
}

// The contents of `z` after `suspendable`, for ranks with their number plus one in `x`.
float expected_of(int kind, int rank, int n) {
  if (kind == 0) return float(n * (n + 1) / 2);
  if (kind == 1) return float(n * (rank + 1));
  return kind == 2 ? float((rank + n - 1) % n + 1) : 1.0f;
}

// Callers run the work that they wait for and suspend it after a moment, or sleep until it is done, for one or two
// operations at a time, and get callbacks; ranks arrive at any moment.
void helps(ncclComm_t comm, int rank, int n, CUstream stream) {
  std::minstd_rand same(7), mine(unsigned(rank) + 1);
  CUevent event;
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  for (int round = 0; round < 150; round++) {
    const size_t most = round % 8 == 0 ? 400000 : round % 3 == 0 ? 30000 : 300;  // some are too large to be suspended
    const size_t count = 1 + same() % most;
    const int kind = int(same() % 4);
    std::vector<float> x(count, float(rank + 1)), y(count * size_t(n)), z(count * size_t(n));
    if (mine() % 8 == 0) sleep_us(unsigned(mine() % 400));
    CHECK(suspendable(kind, count, x.data(), y.data(), z.data(), comm, rank, n, stream));
    OK(cuEventRecord(event, stream));
    const auto help = [event](unsigned seed) {
      std::minstd_rand random(seed);
      const auto wait = random() % 2 == 0 ? ncclpyHostEventHelp : ncclpyHostEventAwait;
      CUresult result = CUDA_ERROR_NOT_READY;
      while (result == CUDA_ERROR_NOT_READY) result = wait(event, double(random() % 4) * 40e-6);
      OK(result);
    };
    std::atomic<int> told{0};
    const auto tell = [](void* count) { ++*static_cast<std::atomic<int>*>(count); };
    const CUresult asked = ncclpyHostEventTell(event, tell, &told);
    CHECK(asked == CUDA_ERROR_NOT_READY || asked == CUDA_SUCCESS);
    std::thread other;
    if (round % 5 == 0) other = std::thread(help, unsigned(mine()));
    help(unsigned(mine()));
    if (other.joinable()) other.join();
    for (size_t i = 0; i < count; i++) CHECK(z[i] == expected_of(kind, rank, n));
    while (asked == CUDA_ERROR_NOT_READY && told == 0) sched_yield();  // its callback refers to this round
    CHECK(told == (asked == CUDA_ERROR_NOT_READY ? 1 : 0));
  }
  OK(cuEventDestroy_v2(event));
}

// Each rank captures several operations and replays them on two streams in turn, beside operations that are not
// captured.
void replays(ncclComm_t comm, int rank, int n, CUstream stream) {
  CUstream other;
  OK(cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0));
  std::vector<double> x(5000, double(rank + 1)), y(x.size()), z(x.size());
  long runs = 0;
  const auto operations = [&] {
    OK(cuLaunchHostFunc(stream, increment, &runs));
    OK(ncclAllReduce(x.data(), y.data(), x.size(), ncclFloat64, ncclSum, comm, stream));
    OK(ncclGroupStart());
    OK(ncclSend(y.data(), y.size(), ncclFloat64, (rank + 1) % n, comm, stream));
    OK(ncclRecv(z.data(), z.size(), ncclFloat64, (rank + n - 1) % n, comm, stream));
    OK(ncclGroupEnd());
    OK(ncclSignal((rank + 1) % n, 0, 0, 0, comm, stream));
    ncclWaitSignalDesc_t signal = {1, (rank + n - 1) % n, 0, 0};
    OK(ncclWaitSignal(1, &signal, comm, stream));
    OK(ncclBroadcast(z.data(), x.data(), x.size(), ncclFloat64, 0, comm, stream));
  };
  operations();
  OK(cuStreamSynchronize(stream));
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  operations();
  const CUgraphExec exec = end_capture(stream);
  double expected = n * (n + 1) / 2;
  for (int round = 0; round < 6; round++) {
    OK(cuGraphLaunch(exec, round % 2 ? other : stream));
    OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat64, ncclSum, comm, stream));
    expected *= double(n) * n;
  }
  OK(cuGraphExecDestroy(exec));  // launched work continues
  OK(cuStreamSynchronize(stream));
  OK(cuStreamSynchronize(other));
  CHECK(runs == 7);
  CHECK(std::all_of(x.begin(), x.end(), [expected](double value) { return value == expected; }));
  OK(cuStreamDestroy_v2(other));
}

void suspensions(ncclComm_t comm, CUstream stream) {
  for (int round = 0; round < 3; round++) {
    uint64_t before, during;
    OK(ncclCommMemStats(comm, ncclStatGpuMemTotal, &before));
    OK(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    OK(ncclCommMemStats(comm, ncclStatGpuMemTotal, &during));
    CHECK(during <= before);
    float x = 1.0f;
    CHECK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, comm, stream) == ncclInvalidUsage);
    OK(ncclCommResume(comm));
    check_sum(comm, stream);
  }
}

// The last rank is excluded and returns; it learns the ids through the communicator of all ranks.
void shrink_and_grow(ncclComm_t comm, int rank, int n, CUstream stream) {
  int last = n - 1;
  const bool stays = rank != last;
  ncclComm_t fewer = nullptr;
  for (int i = 0; i < 5 && stays; i++) {  // one immediately after the other, by the same survivors
    if (fewer != nullptr) OK(ncclCommDestroy(fewer));
    OK(ncclCommShrink(comm, &last, 1, &fewer, nullptr, NCCL_SHRINK_DEFAULT));
    CHECK(count_of(fewer) == n - 1 && rank_of(fewer) == rank);
  }
  if (stays) check_sum(fewer, stream);
  for (int i = 0; i < 3; i++) {
    ncclComm_t grown = nullptr;
    ncclUniqueId id = {};
    if (rank == 0) OK(ncclCommGetUniqueId(fewer, &id));
    OK(ncclBroadcast(&id, &id, sizeof id, ncclUint8, 0, comm, stream));
    OK(cuStreamSynchronize(stream));
    if (stays) OK(ncclCommGrow(fewer, n, rank == 0 ? &id : nullptr, -1, &grown, nullptr));
    else OK(ncclCommGrow(nullptr, n, &id, last, &grown, nullptr));
    CHECK(count_of(grown) == n && rank_of(grown) == rank);
    check_sum(grown, stream);
    OK(ncclCommDestroy(grown));
  }
  if (stays) OK(ncclCommDestroy(fewer));
}

// All ranks of one thread in one graph; each stream is a branch.
void one_graph(int n) {
  const auto comms = all_ranks(n);
  std::vector<CUstream> streams;
  for (int rank = 0; rank < n; rank++) streams.push_back(stream_on(rank));
  std::vector<std::vector<double>> x(size_t(n), std::vector<double>(5000, 1.0));
  const auto reduce = [&] {
    OK(ncclGroupStart());
    for (size_t r = 0; r < size_t(n); r++)
      OK(ncclAllReduce(x[r].data(), x[r].data(), x[r].size(), ncclFloat64, ncclSum, comms[r], streams[r]));
    OK(ncclGroupEnd());
  };
  reduce();
  for (CUstream stream : streams) OK(cuStreamSynchronize(stream));
  std::vector<long> counts(static_cast<size_t>(n));
  const auto count_on = [&](auto stream_of) {
    for (size_t r = 0; r < size_t(n); r++) OK(cuLaunchHostFunc(stream_of(r), increment, &counts[r]));
  };
  OK(cuStreamBeginCapture_v2(streams[0], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  count_on([&](size_t) { return streams[0]; });
  for (size_t r = 1; r < size_t(n); r++) follow(streams[r], streams[0]);
  count_on([&](size_t r) { return streams[r]; });
  reduce();
  reduce();
  count_on([&](size_t r) { return streams[r]; });
  for (size_t r = 1; r < size_t(n); r++) follow(streams[0], streams[r]);
  count_on([&](size_t) { return streams[0]; });
  const CUgraphExec exec = end_capture(streams[0]);
  double expected = n;
  for (int round = 0; round < 5; round++) {
    OK(cuGraphLaunch(exec, streams[size_t(round % n)]));
    expected *= double(n) * n;
  }
  OK(cuGraphExecDestroy(exec));
  for (CUstream stream : streams) OK(cuStreamSynchronize(stream));
  for (long count : counts) CHECK(count == 4 * 5);
  for (const auto& values : x) {
    CHECK(std::all_of(values.begin(), values.end(), [expected](double value) { return value == expected; }));
  }
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
}

// Memory of any kind, registered for all ranks in one group; all ranks put into all parts.
void windows_of_one_thread(int n) {
  constexpr size_t count = 3000;
  const auto comms = all_ranks(n);
  std::vector<CUstream> streams;
  for (int rank = 0; rank < n; rank++) streams.push_back(stream_on(rank));
  std::vector<std::vector<float>> memory(size_t(n), std::vector<float>(count * size_t(n + 1)));
  std::vector<ncclWindow_t> windows(static_cast<size_t>(n));
  OK(ncclGroupStart());
  for (size_t r = 0; r < size_t(n); r++) {
    const size_t bytes = memory[r].size() * sizeof(float);
    OK(ncclCommWindowRegister(comms[r], memory[r].data(), bytes, &windows[r], NCCL_WIN_COLL_SYMMETRIC));
  }
  OK(ncclGroupEnd());
  for (size_t r = 0; r < size_t(n); r++) {
    float* const own = memory[r].data() + size_t(n) * count;
    std::fill_n(own, count, float(r + 1));
    OK(ncclGroupStart());
    for (int peer = 0; peer < n; peer++)
      OK(ncclPutSignal(own, count, ncclFloat32, peer, windows[r], r * count * 4, 0, 0, 0, comms[r], streams[r]));
    OK(ncclGroupEnd());
    std::vector<ncclWaitSignalDesc_t> all;
    for (int peer = 0; peer < n; peer++) all.push_back({1, peer, 0, 0});
    OK(ncclWaitSignal(n, all.data(), comms[r], streams[r]));
  }
  for (CUstream stream : streams) OK(cuStreamSynchronize(stream));
  for (const auto& part : memory) {
    for (size_t i = 0; i < count * size_t(n); i++) CHECK(part[i] == float(i / count + 1));
  }
  for (size_t r = 0; r < size_t(n); r++) OK(ncclCommWindowDeregister(comms[r], windows[r]));
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
}

// Each rank revokes at its own moment while its operations run; then the ranks continue in a child.
void revocations(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned> delays;
  for (int i = 0; i < n; i++) delays.push_back(unsigned(random() % 3000));
  const auto comms = all_ranks(n);
  on_threads(n, [&](int rank) {
    const ncclComm_t comm = comms[size_t(rank)];
    CUstream stream = stream_on(rank);
    std::vector<float> x(20000, 1.0f);
    std::thread worker([&] {
      ncclResult_t result = ncclSuccess;
      while (result == ncclSuccess) {
        result = ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclMax, comm, stream);
        sleep_us(50);
      }
      CHECK(result == ncclInvalidUsage);
      OK(cuStreamSynchronize(stream));
    });
    sleep_us(delays[size_t(rank)]);
    OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    std::fill(x.begin(), x.end(), 0.0f);  // after the revoke no thread reads or writes it
    worker.join();
    ncclComm_t child = nullptr;
    int last = n - 1;
    if (seed % 2 == 0) OK(ncclCommSplit(comm, 0, -rank, &child, nullptr));
    else if (rank != last) OK(ncclCommShrink(comm, &last, 1, &child, nullptr, NCCL_SHRINK_ABORT));
    if (child != nullptr) {
      check_sum(child, stream);
      OK(ncclCommDestroy(child));
    }
    OK(seed % 4 < 2 ? ncclCommAbort(comm) : ncclCommDestroy(comm));
    OK(cuStreamDestroy_v2(stream));
  });
}

// Aborts at random moments while the ranks split, shrink, register, suspend and signal. All calls may fail; none may
// hang.
void random_aborts(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned> delays;
  for (int i = 0; i < n; i++) delays.push_back(unsigned(random() % 20000));
  const auto comms = all_ranks(n);
  // Another rank may write to the second half until its own abort.
  std::vector<std::vector<float>> memory(size_t(n), std::vector<float>(4000));
  on_threads(n, [&](int rank) {
    const ncclComm_t comm = comms[size_t(rank)];
    CUstream stream = stream_on(rank);
    std::thread worker([&] {
      std::vector<float>& mine = memory[size_t(rank)];
      const size_t half = mine.size() / 2;
      int last = n - 1;
      for (unsigned step = seed; step < seed + 40; step++) {
        ncclComm_t child = nullptr;
        switch (step % 4) {
          case 0:
            (void)ncclCommSplit(comm, 0, rank, &child, nullptr);
            break;
          case 1:
            if (rank != last) (void)ncclCommShrink(comm, &last, 1, &child, nullptr, NCCL_SHRINK_DEFAULT);
            break;
          case 2: {
            ncclWindow_t window;
            const size_t bytes = mine.size() * sizeof(float);
            const int left = (rank + n - 1) % n, right = (rank + 1) % n;
            ncclWaitSignalDesc_t signal = {1, left, 0, 0};
            if (ncclCommWindowRegister(comm, mine.data(), bytes, &window, NCCL_WIN_COLL_SYMMETRIC) != 0) break;
            (void)ncclPutSignal(mine.data(), half, ncclFloat32, right, window, bytes / 2, 0, 0, 0, comm, stream);
            (void)ncclWaitSignal(1, &signal, comm, stream);
            (void)ncclCommWindowDeregister(comm, window);
            break;
          }
          case 3:
            (void)ncclCommSuspend(comm, NCCL_SUSPEND_MEM);
            (void)ncclCommResume(comm);
            break;
        }
        if (child == nullptr) continue;
        float x = 1.0f;
        (void)ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, child, stream);
        OK(ncclCommAbort(child));
        OK(cuStreamSynchronize(stream));  // x
      }
      OK(cuStreamSynchronize(stream));
    });
    sleep_us(delays[size_t(rank)]);
    OK(ncclCommAbort(comm));
    std::fill_n(memory[size_t(rank)].begin(), memory[size_t(rank)].size() / 2, 1.0f);
    worker.join();
    OK(cuStreamDestroy_v2(stream));
  });
}

// Whether the engine wrote this value because another rank was aborted (NCCLPY_HOST_ABORT_CORRUPTS).
bool is_corrupted(float value) {
  unsigned char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  return std::all_of(std::begin(bytes), std::end(bytes), [](unsigned char byte) { return byte == 0x5a; });
}

// At any moment a rank suspends its operations, aborts and has its memory back; the others still expect its messages.
void suspended_and_aborted(ncclComm_t comm, int rank, int n, CUstream stream, unsigned seed) {
  std::minstd_rand same(seed), mine(seed * 64 + unsigned(rank) + 1);
  // sizes with and without messages that are offered
  const size_t count = seed % 2 == 0 ? 66000 + same() % 64000 : 1 + same() % 3000;
  const int kind = int(seed % 4), quits = int(same() % unsigned(n));
  std::vector<float> x(count, float(rank + 1)), y(count * size_t(n)), z(count * size_t(n));
  CUevent event;
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  bool fine = true;
  for (int round = 0; fine && round < 40; round++) {
    if (mine() % 4 == 0) sleep_us(unsigned(mine() % 200));
    std::fill(z.begin(), z.end(), 0.0f);
    fine = suspendable(kind, count, x.data(), y.data(), z.data(), comm, rank, n, stream);
    OK(cuEventRecord(event, stream));
    CUresult result = CUDA_ERROR_NOT_READY;
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(rank == quits ? mine() % 300 : 30000);
    do result = ncclpyHostEventHelp(event, double(mine() % 4) * 20e-6);
    while (result == CUDA_ERROR_NOT_READY && std::chrono::steady_clock::now() < until);
    if (rank == quits && (round == 39 || result != CUDA_SUCCESS)) break;
    ncclResult_t state;
    if (result != CUDA_SUCCESS || ncclCommGetAsyncError(comm, &state) != 0 || state != ncclSuccess) break;
    // The wait may have ended because the communicator has.
    for (size_t i = 0; fine && i < count; i++) CHECK(z[i] == expected_of(kind, rank, n) || is_corrupted(z[i]));
  }
  OK(ncclCommAbort(comm));
  for (auto* memory : {&x, &y, &z}) {
    std::fill(memory->begin(), memory->end(), -1.0f);
    std::vector<float>().swap(*memory);
  }
  sleep_us(2000);
  OK(cuStreamSynchronize(stream));
  OK(cuEventDestroy_v2(event));
}

// Only one rank launches: its replay waits until the abort.
void stuck_replay() {
  const auto comms = all_ranks(2);
  CUstream stream = stream_on(0);
  std::vector<float> x(1000, 1.0f);
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, comms[0], stream));
  const CUgraphExec exec = end_capture(stream);
  for (int i = 0; i < 3; i++) OK(cuGraphLaunch(exec, stream));
  std::thread aborter([&] {
    sleep_us(1000);
    for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
  });
  OK(cuStreamSynchronize(stream));
  aborter.join();
  OK(cuGraphLaunch(exec, stream));  // on a communicator that has ended
  OK(cuStreamSynchronize(stream));
  OK(cuGraphExecDestroy(exec));
}
