// The threads that run the streams: as many as streams have work at the same time, not one for each stream.
//
// A task may wait for other ranks for as long as it likes, so a stream that has work always gets a thread of its own,
// a new one if none is free. A thread that has nothing to do stays for a second, and then ends.
#pragma once

#include <memory>

namespace ncclpy::host {

class Stream;
class Worker;

// A thread that waits for the stream that it is to run; goes back to the others if it is not given one.
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
  // The thread calls `stream->run_tasks()`.
  void run(std::shared_ptr<Stream> stream);

 private:
  Worker* worker_ = nullptr;
};

// Throws std::system_error if there can be no more threads.
WorkerLease lease_worker();

}  // namespace ncclpy::host
