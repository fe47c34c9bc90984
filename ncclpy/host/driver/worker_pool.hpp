// The worker threads of the streams: as many as streams have work at the same time, not one for each stream.
//
// A task may wait for other ranks for any time, so no worker serves two streams at a time: a new thread is started if
// no worker is idle. An idle worker ends after a second.
#pragma once

#include <memory>

namespace ncclpy::host {

class Stream;
class Worker;

// A worker that is reserved for a stream. The destructor returns it to the pool if run() was not called.
class WorkerLease {
 public:
  WorkerLease() = default;
  explicit WorkerLease(Worker* worker) : worker_(worker) {}
  ~WorkerLease();
  WorkerLease(WorkerLease&& other) noexcept : worker_(other.worker_) { other.worker_ = nullptr; }
  WorkerLease& operator=(WorkerLease&& other) noexcept {
    Worker* const mine = worker_;
    worker_ = other.worker_;
    other.worker_ = mine;
    return *this;
  }
  explicit operator bool() const { return worker_ != nullptr; }
  // Has the worker call `stream->run_tasks()`.
  void run(std::shared_ptr<Stream> stream);

 private:
  Worker* worker_ = nullptr;
};

// Reserves an idle worker or starts one. Throws std::bad_alloc, or std::system_error if no thread can be started.
WorkerLease lease_worker();

}  // namespace ncclpy::host
