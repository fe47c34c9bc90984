// Drives the host engine from C++, to be built with a sanitizer: -fsanitize=thread, or address,undefined.
//
//   pytest tests/host/test_host_engine_stress.py
//
// Threads as ranks, one thread for all ranks, processes, splits, messages, nonblocking calls, aborts at random
// moments, and the copies of the reduction loops against each other; stress_more.cpp has the rest. "ok" and exit code
// 0 mean success.
#include "stress.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>

#include "reduction/reduce.hpp"

namespace {

// All operations that ranks execute together, on a communicator of their own.
void work(ncclComm_t comm, int rank, int n, CUstream stream) {
  for (size_t count : {size_t(1), size_t(500), size_t(100003)}) {
    std::vector<float> x(count, float(rank + 1)), y(count), all(count * size_t(n)), part(count);
    OK(ncclAllReduce(x.data(), y.data(), count, ncclFloat32, ncclSum, comm, stream));
    OK(ncclAllGather(x.data(), all.data(), count, ncclFloat32, comm, stream));
    OK(ncclReduceScatter(all.data(), part.data(), count, ncclFloat32, ncclAvg, comm, stream));
    OK(ncclBroadcast(x.data(), x.data(), count, ncclFloat32, 0, comm, stream));
    OK(ncclAlltoAll(all.data(), all.data() + 0, 0, ncclFloat32, comm, stream));
    OK(cuStreamSynchronize(stream));
    for (size_t i = 0; i < count; i++) {
      CHECK(y[i] == float(n * (n + 1) / 2));
      CHECK(all[size_t(n - 1) * count + i] == float(n));
      CHECK(part[i] == float(rank + 1));
      CHECK(x[i] == 1.0f);
    }
    std::vector<float> from(count * size_t(n));
    OK(ncclGroupStart());
    for (int peer = 0; peer < n; peer++) {
      OK(ncclSend(y.data(), count, ncclFloat32, peer, comm, stream));
      OK(ncclRecv(from.data() + size_t(peer) * count, count, ncclFloat32, peer, comm, stream));
    }
    OK(ncclGroupEnd());
    OK(cuStreamSynchronize(stream));
    for (float value : from) CHECK(value == y[0]);
  }
}

void rank_body(const ncclUniqueId& id, int rank, int n) {
  CUstream stream = stream_on(rank);
  ncclComm_t comm, child = nullptr;
  OK(ncclCommInitRank(&comm, n, id, rank));
  work(comm, rank, n, stream);
  OK(ncclCommSplit(comm, rank % 2, -rank, &child, nullptr));
  int child_rank, child_size;
  OK(ncclCommUserRank(child, &child_rank));
  OK(ncclCommCount(child, &child_size));
  work(child, child_rank, child_size, stream);
  OK(ncclCommDestroy(child));
  puts_and_signals(comm, rank, n, stream);
  replays(comm, rank, n, stream);
  helps(comm, rank, n, stream);
  for (unsigned seed = 0; seed < 16; seed++) {
    OK(ncclCommSplit(comm, 0, rank, &child, nullptr));
    suspended_and_aborted(child, rank, n, stream, seed);
  }
  suspensions(comm, stream);
  shrink_and_grow(comm, rank, n, stream);
  OK(ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
  OK(cuStreamDestroy_v2(stream));
}

void threads(int n) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  on_threads(n, [&](int rank) { rank_body(id, rank, n); });
}

// Runs this program again as each process of a communicator.
void processes(int n, int threads_each) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  std::string hex;
  for (char byte : id.internal) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(byte));
    hex += two;
  }
  std::vector<pid_t> children;
  for (int first = 0; first < n; first += threads_each) {
    const std::string numbers[] = {std::to_string(n), std::to_string(first), std::to_string(threads_each)};
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      execl("/proc/self/exe", "stress", hex.c_str(), numbers[0].c_str(), numbers[1].c_str(), numbers[2].c_str(),
            nullptr);
      std::_Exit(127);
    }
    children.push_back(pid);
  }
  for (pid_t child : children) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

int one_process(char** argv) {
  ncclUniqueId id;
  for (size_t i = 0; i < sizeof id.internal; i++)
    id.internal[i] = char(std::stoi(std::string(argv[1] + 2 * i, 2), nullptr, 16));
  const int n = std::stoi(argv[2]), first = std::stoi(argv[3]);
  OK(cuInit(0));
  on_threads(std::stoi(argv[4]), [&](int i) { rank_body(id, first + i, n); });
  return 0;
}

void one_thread(int n) {
  std::vector<ncclComm_t> comms(static_cast<size_t>(n));
  OK(ncclCommInitAll(comms.data(), n, nullptr));
  std::vector<CUstream> streams;
  std::vector<std::vector<float>> values(size_t(n), std::vector<float>(20000, 1.0f));
  for (int rank = 0; rank < n; rank++) streams.push_back(stream_on(rank));
  for (int i = 0; i < 20; i++) {
    OK(ncclGroupStart());
    for (size_t r = 0; r < size_t(n); r++) {
      float* const x = values[r].data();
      OK(ncclAllReduce(x, x, values[r].size(), ncclFloat32, ncclMax, comms[r], streams[r]));
      OK(ncclBroadcast(x, x, 10, ncclFloat32, i % n, comms[r], nullptr));
    }
    OK(ncclGroupEnd());
  }
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
  for (const auto& value : values) CHECK(value[0] == 1.0f);
}

void nonblocking(int n) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  on_threads(n, [&](int rank) {
    CUstream stream = stream_on(rank);
    ncclConfig_t config;
    std::memset(&config, 0xff, sizeof config);
    for (int* field = &config.blocking; field < reinterpret_cast<int*>(&config + 1); field++)
      *field = NCCL_CONFIG_UNDEF_INT;
    config.size = sizeof config;
    config.magic = NCCL_API_MAGIC;
    config.version = NCCLPY_ABI_VERSION;
    config.netName = config.commName = nullptr;
    config.blocking = 0;
    ncclComm_t comm;
    // A call returns at once; the state tells when its work is over.
    const auto finish = [](ncclComm_t of, ncclResult_t state) {
      CHECK(state == ncclInProgress || state == ncclSuccess);
      do OK(ncclCommGetAsyncError(of, &state));
      while (state == ncclInProgress);
      OK(state);
    };
    const ncclResult_t started = ncclCommInitRankConfig(&comm, n, id, rank, &config);
    finish(comm, started);
    std::vector<double> x(1000, 1.0);
    const auto reduce = [&](ncclComm_t on) {
      finish(on, ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat64, ncclMin, on, stream));
    };
    for (int i = 0; i < 5; i++) reduce(comm);
    ncclComm_t child = nullptr, fewer = nullptr;
    finish(comm, ncclCommSplit(comm, 0, rank, &child, nullptr));
    reduce(child);
    OK(ncclCommDestroy(child));
    int last = n - 1;
    if (rank != last) {
      finish(comm, ncclCommShrink(comm, &last, 1, &fewer, nullptr, NCCL_SHRINK_DEFAULT));
      reduce(fewer);
      OK(ncclCommDestroy(fewer));
    }
    ncclWindow_t window;
    finish(comm, ncclCommWindowRegister(comm, x.data(), x.size() * 8, &window, NCCL_WIN_COLL_SYMMETRIC));
    finish(comm, ncclSignal((rank + 1) % n, 0, 0, 0, comm, stream));
    ncclWaitSignalDesc_t signal = {1, (rank + n - 1) % n, 0, 0};
    finish(comm, ncclWaitSignal(1, &signal, comm, stream));
    OK(cuStreamSynchronize(stream));
    finish(comm, ncclCommWindowDeregister(comm, window));
    finish(comm, ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    finish(comm, ncclCommResume(comm));
    reduce(comm);
    if (rank % 2 == 0) {
      finish(comm, ncclCommFinalize(comm));
      OK(ncclCommDestroy(comm));
    } else {
      OK(cuStreamSynchronize(stream));
      finish(comm, ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
      OK(ncclCommAbort(comm));
    }
  });
}

void aborts(int n, unsigned seed) {
  std::mt19937 random(seed);
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  std::vector<unsigned> delays;
  for (int i = 0; i < n; i++) delays.push_back(unsigned(random() % 20000));
  const bool missing = seed % 3 == 0;  // one rank never calls
  on_threads(n, [&](int rank) {
    if (missing && rank == n - 1) return;
    CUstream stream = stream_on(rank);
    std::atomic<ncclComm_t> handle{nullptr};
    std::vector<float> x(50000, 1.0f), y(50000);
    ncclComm_t comm = nullptr;
    OK(ncclGroupStart());
    OK(ncclCommInitRank(&comm, n, id, rank));
    handle = comm;
    std::atomic<bool> over{false};
    int rounds = 0;
    std::thread worker([&, rank] {
      while (!over) {
        ncclComm_t now = handle;
        // Refused before the communicator is complete and after the abort.
        if (ncclAllReduce(x.data(), y.data(), x.size(), ncclFloat32, ncclSum, now, stream) != ncclSuccess) {
          sleep_us(100);
          continue;
        }
        (void)ncclGroupStart();
        (void)ncclSend(x.data(), x.size(), ncclFloat32, (rank + 1) % n, now, stream);
        (void)ncclRecv(y.data(), y.size(), ncclFloat32, (rank + n - 1) % n, now, stream);
        (void)ncclGroupEnd();
        if (++rounds % 4 == 0) (void)cuStreamSynchronize(stream);
      }
      (void)cuStreamSynchronize(stream);
    });
    std::thread aborter([&, rank] {
      sleep_us(delays[size_t(rank)]);
      // A rank that aborts after another one's abort is refused if its handle is already gone.
      const ncclResult_t result = ncclCommAbort(handle);
      CHECK(result == ncclSuccess || result == ncclInvalidArgument);
      over = true;
      if (result != ncclSuccess) return;
      std::fill(x.begin(), x.end(), 0.0f);  // after the abort no thread reads or writes them
      std::fill(y.begin(), y.end(), 0.0f);
    });
    (void)ncclGroupEnd();
    aborter.join();
    worker.join();
  });
}

// Makes all NaNs equal: their sign and payload depend on the order in which an instruction takes its operands.
template <class Bits>
void unify_nans(std::vector<uint64_t>& words, Bits infinity, Bits magnitude) {
  for (uint64_t& word : words) {
    Bits elements[sizeof word / sizeof(Bits)];
    std::memcpy(elements, &word, sizeof word);
    for (Bits& element : elements) {
      if ((element & magnitude) > infinity) element = magnitude;
    }
    std::memcpy(&word, elements, sizeof word);
  }
}

void unify_nans(std::vector<uint64_t>& words, int dtype) {
  switch (dtype) {
    case ncclFloat16: return unify_nans<uint16_t>(words, 0x7c00, 0x7fff);
    case ncclBfloat16: return unify_nans<uint16_t>(words, 0x7f80, 0x7fff);
    case ncclFloat32: return unify_nans<uint32_t>(words, 0x7f800000, 0x7fffffff);
    case ncclFloat64: return unify_nans<uint64_t>(words, uint64_t(0x7ff) << 52, ~uint64_t(0) >> 1);
    case ncclFloat8e4m3: return unify_nans<uint8_t>(words, 0x7e, 0x7f);
    case ncclFloat8e5m2: return unify_nans<uint8_t>(words, 0x7c, 0x7f);
    default: return;
  }
}

void kernels() {
  using namespace ncclpy::host;
  std::mt19937_64 random(7);
  constexpr size_t few = 2000, many = (1 << 17) + 1000;
  std::vector<uint64_t> input[3];
  for (auto& words : input) {
    for (size_t i = 0; i < many; i++) words.push_back(random());
  }
  const auto copies = usable_kernels();
  const void* inputs[3] = {input[0].data(), input[1].data(), input[2].data()};
  const uint64_t scalars[3] = {random(), random(), random()};
  auto agree = [&](int dtype, Operator op, size_t words) {
    std::vector<uint64_t> first;
    const size_t element = size_of(ncclDataType_t(dtype)), count = words * 8 / element - 3;
    for (auto copy : copies) {
      for (const size_t ahead : {0, 5}) {  // elements, so that cache lines are entered at both ends
        const bool nontemporal = ahead != 0;
        std::vector<char> memory(words * 8 + 128, 'x');
        void* output = memory.data() + ahead * element;
        copy({ncclDataType_t(dtype), op, 3, inputs, 1, &output, count, scalars, nontemporal});
        CHECK(std::count(memory.begin(), memory.begin() + long(ahead * element), 'x') == long(ahead * element));
        CHECK(std::count(memory.end() - 64, memory.end(), 'x') == 64);
        std::vector<uint64_t> result(words);
        std::memcpy(result.data(), output, count * element);
        unify_nans(result, dtype);
        if (first.empty()) first = result;
        CHECK(first == result);
      }
    }
    return first;
  };
  for (int dtype = 0; dtype < ncclNumTypes; dtype++) {
    for (uint32_t op = 0; op <= uint32_t(Operator::premulsum); op++) agree(dtype, Operator(op), few);
    // In larger blocks the bits are the same.
    const std::vector<uint64_t> begin = agree(dtype, Operator::sum, few), all = agree(dtype, Operator::sum, many);
    CHECK(std::equal(begin.begin(), begin.end() - 3, all.begin()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5) return one_process(argv);
  processes(2, 1);
  processes(4, 2);
  OK(cuInit(0));
  kernels();
  for (int n : {2, 4}) {
    threads(n);
    one_thread(n);
    nonblocking(n);
    one_graph(n);
    windows_of_one_thread(n);
  }
  stuck_replay();
  for (unsigned seed = 0; seed < 30; seed++) aborts(3, seed);
  for (unsigned seed = 0; seed < 40; seed++) {
    revocations(3, seed);
    random_aborts(3, seed);
  }
  std::puts("ok");
  return 0;
}
