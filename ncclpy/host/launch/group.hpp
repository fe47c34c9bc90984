// Group calls: what is called between ncclGroupStart and ncclGroupEnd is executed together at the outermost end.
//
// An operation outside a group is a group of one. A group consists of jobs (initialise, split, finalise, destroy),
// each of which may wait for other ranks, and of operations, which are only put on streams. Jobs of different
// communicators run concurrently, so that one thread can initialise all ranks; then the operations are issued. With
// nonblocking communicators all of this runs in the background.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <new>

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

struct Job {
  std::shared_ptr<Comm> comm;         // if nonblocking, in progress until the job is done
  std::function<ncclResult_t()> run;  // may block; the text that it leaves in last_error() is kept with its result
  std::function<void()> drop;         // called if the group fails before the job runs; may be empty
  bool destroys = false;              // of ncclCommDestroy: the group's end waits for it even if nonblocking
};

void group_start();
// With `simulation`, the outermost end runs the jobs, launches no operations, and writes the operations' estimated
// duration.
ncclResult_t group_end(ncclSimInfo_t* simulation = nullptr);
// If a group is open and `result` is an error, the group fails with it. Returns `result`.
ncclResult_t note_group_error(ncclResult_t result);

// Adds an operation or a job to the thread's group. Without a group it is executed as a group of one.
ncclResult_t submit(const std::shared_ptr<Comm>& comm, Operation operation);
ncclResult_t submit(Job job);

// Runs the body of an exported function; an exception becomes a result code.
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
