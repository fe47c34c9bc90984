// Driver calls about streams and events.
//
// An event refers to the position in a stream's queue where it was last recorded. Recording it again makes a new
// record, so that a stream that waits for the old record is not delayed by the new one.
#include <chrono>
#include <utility>

#include "base/handles.hpp"
#include "base/mutex.hpp"
#include "base/wait_control.hpp"
#include "exports.hpp"

using namespace ncclpy::host;

namespace {

struct Record {
  std::shared_ptr<Capture> capture;  // set if recorded during a capture
  std::vector<std::size_t> nodes;
  Point point;
  std::chrono::steady_clock::time_point time;  // valid when the point is reached
};

struct Event {
  Event(int of_device, bool timed) : device(of_device), timing(timed) {}

  std::shared_ptr<Record> latest() {
    std::lock_guard lock(mutex);
    return record;
  }

  const int device;
  const bool timing;
  Mutex<NCCLPY_LOCK_EVENT> mutex;  // guards record
  std::shared_ptr<Record> record;  // nullptr: never recorded
};

HandleTable<Event>& events() {
  static auto* const table = new HandleTable<Event>('E');
  return *table;
}

// As driver_call, for a body that takes the Event& of a handle.
template <class Body>
CUresult event_call(CUevent handle, Body body) {
  return driver_call([&]() -> CUresult {
    const std::shared_ptr<Event> event = events().find(reinterpret_cast<std::uint64_t>(handle));
    return event == nullptr ? CUDA_ERROR_INVALID_HANDLE : body(*event);
  });
}

// Returns the error for a query of an event that was recorded during a capture, or that a capture in progress forbids
// as an unsafe call; otherwise CUDA_SUCCESS.
CUresult forbid_query(const std::shared_ptr<Record>& record) {
  if (record == nullptr || record->capture == nullptr) return unsafe_while_capturing();
  invalidate_capture(record->capture);
  return CUDA_ERROR_CAPTURED_EVENT;
}

thread_local bool running_host_function = false;

}  // namespace

bool ncclpy::host::in_host_function() { return running_host_function; }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int /*priority*/) {
  return driver_call([&] {
    if (stream == nullptr || (flags & ~CU_STREAM_NON_BLOCKING) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const bool blocking = (flags & CU_STREAM_NON_BLOCKING) == 0;
    *stream = create_stream(current_device(), blocking ? Stream::Kind::blocking : Stream::Kind::non_blocking);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  return driver_call([&] { return destroy_stream(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; });
}

CUresult cuStreamSynchronize(CUstream stream) {
  return stream_call(stream, [](Stream& found) -> CUresult {
    if (in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
    const CUresult captured = forbid_capture(found);
    if (captured != CUDA_SUCCESS) return captured;
    found.synchronize();
    return CUDA_SUCCESS;
  });
}

// As cuStreamSynchronize, and calls `tick` from time to time during the wait, so that a deadline or a signal can end
// the wait by aborting what runs on the stream. Not a call of CUDA.
extern "C" __attribute__((visibility("default"))) CUresult ncclpyHostStreamWait(CUstream stream,
                                                                                double (*tick)(void*), void* argument) {
  const WaitControl control(tick, argument);
  return cuStreamSynchronize(stream);
}

CUresult cuStreamQuery(CUstream stream) {
  return stream_call(stream, [](Stream& found) -> CUresult {
    const CUresult captured = forbid_capture(found);
    if (captured != CUDA_SUCCESS) return captured;
    if (found.done()) return CUDA_SUCCESS;
    found.nudge();
    return CUDA_ERROR_NOT_READY;
  });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
  return stream_call(stream, [&](Stream& waiter) -> CUresult {
    if (flags != CU_EVENT_WAIT_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
    return event_call(event, [&](Event& awaited) -> CUresult {
      const std::shared_ptr<Record> record = awaited.latest();
      const bool captured = record != nullptr && record->capture != nullptr;
      if (captured || waiter.capturing.load(std::memory_order_acquire)) {
        if (record == nullptr) return CUDA_SUCCESS;  // a wait for an event that was never recorded has no effect
        return capture_wait(waiter.shared_from_this(), record->capture, record->nodes);
      }
      if (record != nullptr && !record->point.reached()) waiter.enqueue([record] { record->point.wait(); });
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  return stream_call(stream, [&](Stream& found) -> CUresult {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = context_of(found.device());
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn fn, void* userData) {
  return stream_call(stream, [&](Stream& found) -> CUresult {
    if (fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return add_step(found, [fn, userData] {
      const bool outer = std::exchange(running_host_function, true);
      fn(userData);
      running_host_function = outer;
    });
  });
}

CUresult cuEventCreate(CUevent* event, unsigned int flags) {
  return driver_call([&] {
    if (event == nullptr || (flags & ~(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) != 0)
      return CUDA_ERROR_INVALID_VALUE;
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const bool timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    *event = reinterpret_cast<CUevent>(events().add(std::make_shared<Event>(current_device(), timing)));
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return stream_call(stream, [&](Stream& found) -> CUresult {
    return event_call(event, [&](Event& recorded) -> CUresult {
      if (recorded.device != found.device()) return CUDA_ERROR_INVALID_HANDLE;
      auto record = std::make_shared<Record>();
      if (found.capturing.load(std::memory_order_acquire)) {
        const CUresult placed = captured_place(found, &record->capture, &record->nodes);
        if (placed != CUDA_SUCCESS) return placed;
        std::lock_guard lock(recorded.mutex);
        recorded.record = std::move(record);
        return CUDA_SUCCESS;
      }
      record->point.stream = found.shared_from_this();
      record->point.number = found.enqueue_short(
          Task::interruptible([record] { record->time = std::chrono::steady_clock::now(); }));
      std::lock_guard lock(recorded.mutex);
      recorded.record = std::move(record);
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuEventQuery(CUevent event) {
  return event_call(event, [](Event& found) -> CUresult {
    const std::shared_ptr<Record> record = found.latest();
    const CUresult unsafe = forbid_query(record);
    if (unsafe != CUDA_SUCCESS) return unsafe;
    if (record == nullptr || record->point.reached()) return CUDA_SUCCESS;
    record->point.stream->nudge();
    return CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent event) {
  return event_call(event, [](Event& found) -> CUresult {
    if (in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
    const std::shared_ptr<Record> record = found.latest();
    const CUresult unsafe = forbid_query(record);
    if (unsafe != CUDA_SUCCESS) return unsafe;
    if (record != nullptr) record->point.wait();
    return CUDA_SUCCESS;
  });
}

// As cuEventQuery, but first the calling thread runs tasks that precede the event, as long as they are interruptible
// and for at most `seconds`. Not a call of CUDA.
extern "C" __attribute__((visibility("default"))) CUresult ncclpyHostEventHelp(CUevent event, double seconds) {
  return event_call(event, [&](Event& found) -> CUresult {
    if (in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
    const std::shared_ptr<Record> record = found.latest();
    const CUresult unsafe = forbid_query(record);
    if (unsafe != CUDA_SUCCESS) return unsafe;
    const WaitControl control(seconds);
    const bool done = record == nullptr || record->point.reached() || record->point.stream->help(record->point.number);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

// As cuEventQuery; if the event is not ready, `tell` is called once it is, from a thread of the engine or from a
// helping caller. `tell` must not call the engine. A caller that is told need not poll; polling would use the cores
// that run the work. Not a call of CUDA.
extern "C" __attribute__((visibility("default"))) CUresult ncclpyHostEventTell(CUevent event, void (*tell)(void*), void* argument) {
  return event_call(event, [&](Event& found) -> CUresult {
    const std::shared_ptr<Record> record = found.latest();
    const CUresult unsafe = forbid_query(record);
    if (unsafe != CUDA_SUCCESS) return unsafe;
    if (record == nullptr || record->point.reached()) return CUDA_SUCCESS;
    const bool done = record->point.stream->notify_when_done(record->point.number, tell, argument);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

// As cuEventQuery, but sleeps until the event is ready, for at most `seconds`. Not a call of CUDA.
extern "C" __attribute__((visibility("default"))) CUresult ncclpyHostEventAwait(CUevent event, double seconds) {
  return event_call(event, [&](Event& found) -> CUresult {
    if (in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
    const std::shared_ptr<Record> record = found.latest();
    const CUresult unsafe = forbid_query(record);
    if (unsafe != CUDA_SUCCESS) return unsafe;
    if (record == nullptr || record->point.reached()) return CUDA_SUCCESS;
    return record->point.stream->sleep_until(record->point.number, seconds) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return event_call(start, [&](Event& first) {
    return event_call(end, [&](Event& second) {
      if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
      const std::shared_ptr<Record> from = first.latest(), to = second.latest();
      if (!first.timing || !second.timing || from == nullptr || to == nullptr || first.device != second.device)
        return CUDA_ERROR_INVALID_HANDLE;
      if (from->capture != nullptr || to->capture != nullptr) return CUDA_ERROR_CAPTURED_EVENT;
      if (!from->point.reached() || !to->point.reached()) return CUDA_ERROR_NOT_READY;
      *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return driver_call([&] {
    const bool known = events().remove(reinterpret_cast<std::uint64_t>(event)) != nullptr;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}
