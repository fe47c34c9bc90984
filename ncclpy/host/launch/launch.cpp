// Putting operations on streams, and running them there.
#include "launch.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/wait.hpp"
#include "driver/exports.hpp"
#include "driver/graph.hpp"
#include "driver/stream.hpp"
#include "faults/abandon.hpp"
#include "faults/fault.hpp"
#include "launch_memory_use.hpp"
#include "transports/collective.hpp"
#include "transports/one_sided.hpp"
#include "transports/p2p.hpp"

namespace ncclpy::host {
namespace {

// The progress of a launch that one thread may suspend and another one resume.
struct LaunchProgress {
  explicit LaunchProgress(Comm& comm) : messages(comm) {}

  bool begun = false;
  Messages messages;
  size_t next_collective = 0;              // index of the first collective that has not run
  CollectiveProgress collective_progress;  // of that collective
};

// The part of a launch that runs only once. Returns false if no operation of the launch may run.
bool begin_operations(Comm& comm, const Operation* operations, size_t count, LaunchMemoryUse* memory_use,
                      LaunchProgress& progress) {
  const bool faults = faults_planned.load(std::memory_order_relaxed);
  for (size_t i = 0; faults && i < count; i++) {
    // An operation that does not run prevents the others of its launch, which NCCL would run in one kernel.
    if (!fault_in_run(comm, name_of(operations[i]))) return false;
  }
  progress.begun = true;
  for (size_t i = 0; i < count; i++) {
    if (operations[i].message()) progress.messages.add(operations[i]);
  }
  progress.messages.advance();
  for (size_t i = 0; i < count; i++) {
    if (operations[i].kind != Operation::put && operations[i].kind != Operation::signal) continue;
    const bool put = run_put(comm, operations[i]);
    if (memory_use != nullptr) memory_use->targets[i].reset();  // from now on only the peer uses the memory
    if (put) give_signal(comm, operations[i]);
  }
  return true;
}

// Returns false if the thread suspended the launch.
template <class PublishCall>
bool run_operations(Comm& comm, const Operation* operations, size_t count, LaunchMemoryUse* memory_use,
                    LaunchProgress& progress, PublishCall publish_call) {
  const bool faults = faults_planned.load(std::memory_order_relaxed);
  if (progress.begun) {
    progress.messages.advance();
  } else {
    if (comm.rendezvous.has_disagreed()) return hang_until_released(comm);  // other ranks do not reach this launch
    if (faults && WaitControl::has_time_limit()) return false;  // faults may block, and must be evaluated only once
    if (!begin_operations(comm, operations, count, memory_use, progress)) {  // a fault has stopped the communicator
      if (!hang_until_released(comm)) return false;
      abandon_operations(comm, operations, count);
      return true;
    }
  }
  for (size_t& i = progress.next_collective; i < count; i++) {
    if (operations[i].kind != Operation::collective) continue;
    if (comm.health.stopped()) {  // perhaps in the previous collective; other ranks may still wait at its barriers
      if (!hang_until_released(comm)) return false;
      abandon_operations(comm, &operations[i], 1);
      continue;
    }
    publish_call(operations[i].call);
    if (!run_collective(comm, operations[i], progress.collective_progress)) {
      progress.messages.retract();
      return false;
    }
    progress.collective_progress = {};
  }
  for (size_t i = count; i-- > 0;) {
    if (operations[i].message()) publish_call(operations[i].call);
  }
  if (!progress.messages.finish()) return false;
  wait_for_signals(comm, operations, count, publish_call);
  for (size_t i = 0; faults && i < count; i++) fault_in_result(comm, name_of(operations[i]), operations[i]);
  return true;
}

bool execute(Comm& comm, const Operation* operations, size_t count, LaunchMemoryUse* memory_use,
             LaunchProgress& progress) {
  // All ranks can see what this rank is running.
  RankSlot& slot = comm.segment->slot(comm.rank);
  const auto publish_call = [&slot](uint64_t call) {
    slot.current_call[data_side].store(call, std::memory_order_relaxed);
  };
  publish_call(operations[0].call);
  const bool done = run_operations(comm, operations, count, memory_use, progress, publish_call);
  if (done) slot.last_done.store(operations[count - 1].call, std::memory_order_relaxed);
  publish_call(0);  // also after a suspension: perhaps no thread will resume the launch
  return done;
}

// Runs the launch at its turn; if the communicator stops before, waits for an abort or a revoke instead. Returns false
// if the thread suspended the launch.
bool run(Comm& comm, uint64_t ticket, const Operation* operations, size_t count, LaunchMemoryUse* memory_use,
         LaunchProgress& progress) {
  const Turn turn = comm.queue.enter(ticket);
  if (turn == Turn::suspended) return false;
  if (turn == Turn::ready && !execute(comm, operations, count, memory_use, progress)) {
    comm.queue.end_run();
    return false;
  }
  if (turn == Turn::stopped) {
    if (!hang_until_released(comm)) {
      comm.queue.end_run();
      return false;
    }
    abandon_operations(comm, operations, count);
  }
  comm.queue.leave(ticket);
  return true;
}

// Whether a thread with a time limit may run the operations, and suspend them.
bool are_interruptible(const Comm& comm, const Operation* operations, size_t count) {
  if (faults_planned.load(std::memory_order_relaxed)) return false;
  size_t left = interruptible_max_bytes;  // for all operations together
  return std::all_of(operations, operations + count,
                     [&](const Operation& one) { return fits_interruptible(comm, one, &left); });
}

template <class Function>
Task task_of(bool is_interruptible, Function&& function) {
  return is_interruptible ? Task::interruptible(std::forward<Function>(function))
                          : Task(std::forward<Function>(function));
}

// Records the launch event of an operation, in stream order. The context is set so that a default stream means that of
// the communicator's device.
ncclResult_t record_launch(const Operation& operation, int device) {
  if (operation.launch_event == nullptr) return ncclSuccess;
  const CUcontext before = current_context();
  set_current_context(context_of(device));
  const CUresult recorded = cuEventRecord(operation.launch_event, operation.stream);
  set_current_context(before);
  if (recorded == CUDA_SUCCESS) return ncclSuccess;
  return fail(ncclUnhandledCudaError, "launchCompletionEvent %p cannot be recorded on stream %p",
              static_cast<void*>(operation.launch_event), static_cast<void*>(operation.stream));
}

// Adds the operations to a graph instead of the streams: each launch of the graph is a launch of these operations,
// with its own place in the communicator's order. The graph keeps the communicator alive, as NCCL's graphs keep its
// resources.
ncclResult_t issue_captured(const std::shared_ptr<Comm>& comm, std::vector<Operation> operations,
                            const std::vector<std::shared_ptr<Stream>>& streams) {
  const CUresult captured = capture(streams, comm->device, [comm, operations] {
    auto memory_use = find_memory_use(comm, operations.data(), operations.size());
    return Task([comm, operations, memory_use = std::move(memory_use), ticket = comm->queue.take_ticket()] {
      LaunchProgress progress(*comm);  // the task is not interruptible, so it is never suspended
      (void)run(*comm, ticket, operations.data(), operations.size(), memory_use.get(), progress);
    });
  });
  if (captured == CUDA_SUCCESS) return ncclSuccess;
  if (captured != CUDA_ERROR_STREAM_CAPTURE_MERGE)
    return fail(ncclUnhandledCudaError, "the capture of a stream given to NCCL was invalidated (CUDA error %d)", captured);
  return fail(ncclInvalidUsage,
              "Streams given to a communicator within a NCCL group must either be all uncaptured or all captured by the "
              "same graph.");
}

ncclResult_t find_stream(cudaStream_t given, int device, std::shared_ptr<Stream>* stream) {
  *stream = stream_of(given, device);
  if (*stream != nullptr) return ncclSuccess;
  return fail(ncclUnhandledCudaError, "stream %p is not a stream, or was destroyed", static_cast<void*>(given));
}

// Operations that run together on the first of their streams: all streams wait for each other before and after them.
struct Launch {
  explicit Launch(const std::shared_ptr<Comm>& one) : comm(one), progress(*one) {}

  std::shared_ptr<Comm> comm;
  std::vector<Operation> operations;
  std::shared_ptr<LaunchMemoryUse> memory_use;  // of the first stream's task
  LaunchProgress progress;                      // of the first stream's task
  std::atomic<size_t> streams_missing{0};
  std::atomic<bool> done{false};
};

}  // namespace

ncclResult_t issue(const std::shared_ptr<Comm>& comm, const Operation& operation) {
  std::shared_ptr<Stream> stream;
  NCCLPY_TRY(find_stream(operation.stream, comm->device, &stream));
  NCCLPY_TRY(record_launch(operation, comm->device));
  if (stream->capturing.load(std::memory_order_acquire)) return issue_captured(comm, {operation}, {stream});
  auto memory_use = find_memory_use(comm, &operation, 1);
  comm->queue.issue([&](uint64_t ticket) {
    stream->enqueue(task_of(are_interruptible(*comm, &operation, 1),
                            [comm, operation, memory_use = std::move(memory_use), ticket,
                             progress = LaunchProgress(*comm)]() mutable {
                              return run(*comm, ticket, &operation, 1, memory_use.get(), progress);
                            }));
  });
  return ncclSuccess;
}

ncclResult_t issue(const std::shared_ptr<Comm>& comm, std::vector<Operation> operations) {
  std::vector<std::shared_ptr<Stream>> streams;
  for (size_t i = 0; i < operations.size(); i++) {
    if (i > 0 && operations[i].stream == operations[i - 1].stream) continue;
    std::shared_ptr<Stream> stream;
    NCCLPY_TRY(find_stream(operations[i].stream, comm->device, &stream));
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(std::move(stream));
  }
  for (const Operation& operation : operations) NCCLPY_TRY(record_launch(operation, comm->device));
  for (const auto& stream : streams) {
    if (stream->capturing.load(std::memory_order_acquire)) return issue_captured(comm, std::move(operations), streams);
  }
  auto launch = std::make_shared<Launch>(comm);
  launch->operations = std::move(operations);
  launch->memory_use = find_memory_use(comm, launch->operations.data(), launch->operations.size());
  launch->streams_missing = streams.size() - 1;
  const bool is_interruptible =
      streams.size() == 1 && are_interruptible(*comm, launch->operations.data(), launch->operations.size());
  // As in NCCL, the launch runs on the first stream, which waits for the others; the others wait for its end.
  comm->queue.issue([&](uint64_t ticket) {
    try {
      for (size_t i = 1; i < streams.size(); i++) {
        streams[i]->enqueue([launch] {
          Comm& one = *launch->comm;
          launch->streams_missing.fetch_sub(1);
          one.queue.changed.notify();
          wait_until(one.queue.changed, [&] { return launch->done.load() || one.health.is_released(); });
        });
      }
      streams[0]->enqueue(task_of(is_interruptible, [launch, ticket] {
        Comm& one = *launch->comm;
        wait_until(one.queue.changed, [&] { return launch->streams_missing.load() == 0 || one.health.stopped(); });
        if (!run(one, ticket, launch->operations.data(), launch->operations.size(), launch->memory_use.get(),
                 launch->progress))
          return false;
        launch->memory_use.reset();
        launch->done.store(true);
        one.queue.changed.notify();
        return true;
      }));
    } catch (...) {  // no thread can be started for a stream: the other streams must not wait for the launch
      launch->done.store(true);
      comm->queue.changed.notify();
      throw;
    }
  });
  return ncclSuccess;
}

}  // namespace ncclpy::host
