// A stream: an ordered queue of tasks that runs concurrently with its callers, as a CUDA stream does.
//
// A stream that has tasks gets a worker thread (worker_pool.hpp), and returns it when the queue is empty. A caller
// that waits for a stream whose worker has not yet started on the work runs the tasks itself ("helping"), so that a
// small operation followed by a synchronisation needs no switch between threads. Tasks of one stream never overlap.
//
// If callers have waited many times in a row for what they had just queued, waking a worker for each task would be the
// largest cost: the worker would either find the work done, or take the work and the core from a caller that is about
// to run it. Such a stream is lazy: it gets no worker, and a sweeper checks a little later whether the caller has
// waited after all. A task that is not waited for promptly makes the stream eager again.
//
// A caller with a time limit for its wait helps with interruptible tasks only: those that wait for nothing, or that a
// thread can suspend in the middle. A worker or another caller resumes a suspended task by calling the task again.
//
// A task may block for any time: it delays only its own stream and what waits for that stream. A task must not throw,
// and must not rely on the thread that runs it or on that thread's current device.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "driver_abi.h"
#include "task.hpp"
#include "worker_pool.hpp"

namespace ncclpy::host {

class Stream;
using StreamMutex = Mutex<NCCLPY_LOCK_STREAM>;

// A position in a stream's queue: reached when the task with this number, and all before it, are done.
struct Point {
  std::shared_ptr<Stream> stream;
  std::uint64_t number = 0;

  bool reached() const;
  void wait() const;
};

class Capture;

// A stream's part in the capture that it is in, see graph.hpp.
struct CaptureState {
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> last;  // the nodes that the next node depends on
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // The legacy default stream of a device waits for all blocking streams of the device, and they wait for it.
  enum class Kind { legacy, blocking, non_blocking };

  Stream(int device, Kind kind) : device_(device), kind_(kind) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const { return device_; }
  Kind kind() const { return kind_; }

  // Appends a task and returns its number. Throws std::bad_alloc or std::system_error (no thread can be started). The
  // task is then not queued, except if the stream is lazy and the sweeper's thread cannot be started.
  std::uint64_t enqueue(Task task);
  // Runs the task immediately and returns 0 if everything that it would wait for is done; else appends the task and
  // returns its number.
  std::uint64_t enqueue_short(Task task);
  // Whether all tasks queued so far are done; on the legacy stream, also those of the blocking streams. Never blocks.
  bool done() const;
  // Returns when all tasks queued so far are done; on the legacy stream, also those of the blocking streams.
  void synchronize();
  // For a caller that polls the stream instead of waiting: gives the stream a worker if it has tasks, and neither a
  // worker nor a caller runs them. If no worker can be started, leaves the stream to the sweeper; throws
  // std::system_error if the sweeper's thread cannot be started either.
  void nudge();
  // For the sweeper: makes the stream eager and gives it a worker if no task runs now and none has finished since the
  // last sweep, although one was queued then. Returns whether to sweep again.
  bool sweep();
  // For a stream that no caller will wait for any more: as nudge(). Destructors call it, so it does not throw: if no
  // thread can be started, the stream's tasks run when a caller waits for one of them.
  void close() noexcept;
  // Called by a worker: runs tasks until the queue is empty, or until a caller runs the first task and still runs it
  // after a short spin.
  void run_tasks();

  Point last() { return {shared_from_this(), queued_.load(std::memory_order_acquire)}; }
  bool reached(std::uint64_t number) const { return finished_.load(std::memory_order_acquire) >= number; }
  // Returns when the task `number` is done. Meanwhile the calling thread runs tasks that no other thread runs.
  void wait(std::uint64_t number);
  // Runs tasks up to `number`, as long as the first one is interruptible and this thread's WaitControl has time left;
  // the remaining tasks get a worker. Returns whether the task `number` is done.
  bool help(std::uint64_t number);
  // Returns whether the task `number` is done. If not, the thread that completes it calls `callback` once, even if the
  // same call was made several times. `callback` runs under mutex_ and must not call the engine. Throws
  // std::bad_alloc.
  bool notify_when_done(std::uint64_t number, void (*callback)(void*), void* argument);
  // Sleeps until the task `number` is done, for at most `seconds`. Returns whether it is done. Throws std::bad_alloc.
  bool sleep_until(std::uint64_t number, double seconds);

  std::atomic<bool> capturing{false};
  CaptureState capture_state;  // guarded by captures_mutex() of graph.cpp

 private:
  std::vector<Point> predecessors() const;
  std::uint64_t append(Task task);
  // A function with the parameter `lock` is called with mutex_ locked by `lock`. run_first() releases mutex_ while the
  // task runs, spin() while it spins, and both return with mutex_ locked; the other functions return with mutex_
  // released. append(), note_wait(), be_eager() and notify_completed() are called with mutex_ locked, and keep it.
  void ensure_worker(std::unique_lock<StreamMutex>& lock);
  void assign_worker(WorkerLease worker, std::unique_lock<StreamMutex>& lock);
  void leave_to_sweeper(std::unique_lock<StreamMutex>& lock);
  void note_wait(std::uint64_t number);
  void be_eager();
  // Calls the callbacks of tasks that are done.
  void notify_completed();
  bool run_first(std::unique_lock<StreamMutex>& lock);
  bool runnable() const { return !running_.load(std::memory_order_relaxed) && !queue_.empty(); }
  template <class Condition>
  bool spin(std::unique_lock<StreamMutex>& lock, Condition condition);

  struct CompletionCallback {
    std::uint64_t number;
    void (*callback)(void*);
    void* argument;
  };

  const int device_;
  const Kind kind_;
  StreamMutex mutex_;                          // guards the fields below; atomics are written under it, read anywhere
  Condition progress_;                         // threads that wait for a task sleep here
  std::deque<Task> queue_;                     // tasks that have not finished
  std::atomic<std::uint64_t> queued_{0};       // number of the last task queued
  std::atomic<std::uint64_t> finished_{0};     // number of the last task done
  std::atomic<bool> running_{false};           // a worker or a helper runs a task
  std::uint64_t legacy_awaited_ = 0;           // the last task of the legacy stream that this stream waits for
  int waiting_ = 0;                            // number of threads that sleep on progress_
  std::vector<CompletionCallback> callbacks_;
  bool has_worker_ = false;                    // a worker runs this stream's tasks, or is being woken for them
  std::uint64_t last_uninterruptible_ = 0;     // number of the last task that is not interruptible
  bool lazy_ = false;
  std::uint64_t awaited_number_ = 0;           // newest task that was the queue's last task when a wait for it began
  int prompt_waits_ = 0;                       // prompt waits in a row, each for the last task of the queue
  int prompt_waits_needed_ = 8;                // this many prompt waits in a row make the stream lazy
  bool swept_ = false;                         // the sweeper has this stream on its list
  std::uint64_t queued_at_sweep_ = 0, finished_at_sweep_ = 0;
};

// Makes a stream and returns its CUDA handle.
CUstream create_stream(int device, Stream::Kind kind);
inline bool is_default_stream(CUstream handle) {
  return handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
}
// The stream of a handle, or nullptr if there is none. NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD mean the
// default streams of `device`; a created stream has its own device.
std::shared_ptr<Stream> stream_of(CUstream handle, int device);
// A stream without a handle that waits for no other stream.
std::shared_ptr<Stream> make_private_stream(int device);
// Removes the handle, ends a capture that began on the stream, and closes the stream. Returns false if there is no
// such stream.
bool destroy_stream(CUstream handle);
// Returns when all tasks queued for a device are done, including those of destroyed streams.
void synchronize_device(int device);

}  // namespace ncclpy::host
