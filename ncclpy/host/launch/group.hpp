// Group calls: what is asked for between ncclGroupStart and ncclGroupEnd happens together at the outermost end.
//
// An operation outside a group is a group of one. A group consists of jobs (initialise, split, finalise, destroy), each
// of which may wait for other ranks, and of operations, which are only put on streams. Jobs of different communicators
// run at the same time, so that one thread can initialise all ranks; then the operations are issued. With nonblocking
// communicators all of that happens in the background.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <new>

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

struct Job {
  std::shared_ptr<Comm> comm;           // in progress until the job is done, if it is nonblocking
  std::function<ncclResult_t()> run;    // may block; its last_error() is kept
  std::function<void()> drop;           // the group failed before the job ran; may be empty
  bool destroys = false;                // a communicator's end is always waited for
};

void group_start();
// With `simulation`, the outermost end of a group launches nothing and says how long that would have taken.
ncclResult_t group_end(ncclSimInfo_t* simulation = nullptr);
// An error of a call inside a group spoils the group; returns `result`.
ncclResult_t note_group_error(ncclResult_t result);

ncclResult_t submit(const std::shared_ptr<Comm>& comm, Operation operation);
ncclResult_t submit(Job job);

// The body of an exported function: what C++ throws becomes a result code.
template <class Body>
ncclResult_t guarded(const char* function, Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return note_group_error(fail(ncclSystemError, "%s : out of memory", function));
  } catch (const std::exception& error) {
    return note_group_error(fail(ncclSystemError, "%s : %s", function, error.what()));
  }
}

}  // namespace ncclpy::host
