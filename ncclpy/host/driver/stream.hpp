// A stream: an ordered queue of tasks that runs beside its callers, as a CUDA stream does.
//
// A stream that has tasks gets a thread, see worker_pool.hpp, and gives it back when it has none. A caller that waits for a
// stream whose thread has not yet taken up the work runs the work itself ("helping"), so that a small operation
// followed by a synchronisation costs no switch between threads. Tasks of one stream never overlap.
//
// Where callers have come back many times in a row to wait for what they have just queued, waking a thread for each
// task is what costs most: it would either find that the work is done, or take the work and the core from a caller that
// is about to do it. Such a stream is lazy: it gets no thread, and a sweeper looks a little later whether the caller has
// come back after all. What is not waited for at once makes the stream eager again.
//
// A caller that cannot wait to the end may help with brief tasks: those that wait for nobody, or that it can leave in
// the middle. What it leaves is a thread's, which calls it again.
//
// A task may block for as long as it likes: it holds up its own stream and whoever waits for that, nothing else.
// A task must not throw, and must not rely on the calling thread or on its current device.
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

// A place in a stream's queue: reached when the task with this number, and all before it, are done.
struct Point {
  std::shared_ptr<Stream> stream;
  std::uint64_t number = 0;

  bool reached() const;
  void wait() const;
};

class Capture;

// What a stream knows of the capture that it is in, see graph.hpp.
struct CaptureState {
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> last;  // the nodes that what comes next depends on
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // The legacy default stream of a device waits for all blocking streams of the device, and they for it.
  enum class Kind { legacy, blocking, non_blocking };

  Stream(int device, Kind kind) : device_(device), kind_(kind) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const { return device_; }
  Kind kind() const { return kind_; }

  // Append a task. Throws std::bad_alloc or std::system_error (no thread can be started) with nothing queued.
  std::uint64_t enqueue(Task task);
  // Run the task here and now if everything it would have to wait for is done, else append it.
  std::uint64_t enqueue_short(Task task);
  // Whether all tasks queued so far are done; on the legacy stream, those of the blocking streams too. Never blocks.
  bool done() const;
  // Return when all tasks queued so far are done; on the legacy stream, those of the blocking streams too.
  void synchronize();
  // Somebody asks whether the stream is done instead of waiting: do not leave it without a thread.
  void nudge();
  // For the sweeper: find a thread if a task has been left lying since the last sweep. Whether to look again.
  bool sweep();
  // Nobody will wait for this stream any more: do not leave it without a thread.
  void close() { nudge(); }
  // The life of a thread at this stream: until there is nothing to do.
  void run_tasks();

  Point last() { return {shared_from_this(), queued_.load(std::memory_order_acquire)}; }
  bool reached(std::uint64_t number) const { return finished_.load(std::memory_order_acquire) >= number; }
  void wait(std::uint64_t number);
  // Run what this thread's WaitControl lets it leave; whether that was all up to the task with this number.
  bool help(std::uint64_t number);
  // Whether the task with this number is done. If not, `tell` is called as soon as it is, once, by whoever has run it: it
  // must not call the engine. Throws std::bad_alloc.
  bool notify_when_done(std::uint64_t number, void (*callback)(void*), void* argument);
  // Sleep until the task with this number is done, for so many seconds at most; whether it is. Throws std::bad_alloc.
  bool sleep_until(std::uint64_t number, double seconds);

  std::atomic<bool> capturing{false};
  CaptureState capture_state;  // guarded by the mutex of all captures, in graph.cpp

 private:
  std::vector<Point> predecessors() const;
  std::uint64_t append(Task task);
  void ensure_worker(std::unique_lock<StreamMutex>& lock);
  void assign_worker(WorkerLease worker, std::unique_lock<StreamMutex>& lock);
  void leave_to_sweeper(std::unique_lock<StreamMutex>& lock);
  void note_wait(std::uint64_t number);
  void be_eager();
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
  StreamMutex mutex_;                         // guards what follows; the atomics are written under it, read anywhere
  Condition progress_;                        // those who wait for a task sleep here
  std::deque<Task> queue_;                    // tasks not yet begun
  std::atomic<std::uint64_t> queued_{0};      // number of the last task queued
  std::atomic<std::uint64_t> finished_{0};    // number of the last task done
  std::atomic<bool> running_{false};          // a task is being run, by the thread or by a helper
  std::uint64_t fenced_ = 0;                  // the legacy stream's number that this stream has already waited for
  int waiting_ = 0;                           // how many sleep on progress_
  std::vector<CompletionCallback> callbacks_;                  // who is to be told of which task
  bool has_worker_ = false;                     // a thread is here, or on its way
  std::uint64_t last_uninterruptible_ = 0;               // number of the last task that is not brief
  bool lazy_ = false;
  std::uint64_t awaited_number_ = 0;             // number of the last task at the queue's end that was waited for
  int prompt_waits_ = 0;                           // how often in a row a caller has waited for its last task at once
  int prompt_waits_needed_ = 8;                    // to be lazy
  bool swept_ = false;                        // the sweeper knows this stream
  std::uint64_t queued_at_sweep_ = 0, finished_at_sweep_ = 0;
};

// Streams by their CUDA handle.
CUstream create_stream(int device, Stream::Kind kind);
inline bool is_default_stream(CUstream handle) {
  return handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
}
// The stream behind a handle, or nullptr if there is none. NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD mean the
// default streams of `device`; a created stream knows its own device.
std::shared_ptr<Stream> stream_of(CUstream handle, int device);
// A stream without a handle, which waits for no other.
std::shared_ptr<Stream> make_private_stream(int device);
// Forget the handle and close the stream; false if there is none.
bool destroy_stream(CUstream handle);
// Return when all that is queued for a device is done, in destroyed streams too.
void synchronize_device(int device);

}  // namespace ncclpy::host
