// The end of communicators, and queries.
#include "call.hpp"
#include "driver/memory_use.hpp"
#include "faults/strict_ends.hpp"
#include "init.hpp"
#include "launch/group.hpp"
#include "window.hpp"

namespace ncclpy::host {
namespace {

// Called at the end of a communicator: from now on memory that is still registered with it may be freed.
void release_memory_use(Comm& comm) {
  if (!checks) return;
  std::lock_guard lock(comm.mutex);
  for (auto& [handle, registration] : comm.registrations) registration.memory_use.reset();
  for (auto& [handle, window] : comm.windows) window->memory_use.reset();
}

void disconnect(Comm& comm) {
  std::lock_guard lock(comm.mutex);
  comm.disconnected = true;
}

ncclResult_t finalize(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, "ncclCommFinalize", &comm));
  disconnect(*comm);
  NCCLPY_TRY(comm->health.ensure_ready());
  {
    std::lock_guard lock(comm->mutex);
    if (comm->finalized) return fail(ncclInvalidArgument, "ncclCommFinalize : comm was finalized or revoked before");
    comm->finalized = true;
  }
  Job job;
  job.comm = comm;
  job.run = [comm] {
    comm->queue.drain();
    if (comm->health.aborted()) return comm->stop_reason("its own work");
    if (const ncclResult_t error = comm->health.async(); error != ncclSuccess && error != ncclInProgress) {
      set_last_error(comm->health.async_text());
      return error;
    }
    if (const auto segment = comm->shared_segment()) segment->slot(comm->rank).closed.store(1);
    return ncclSuccess;
  };
  return submit(std::move(job));
}

ncclResult_t destroy(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, "ncclCommDestroy", &comm));
  NCCLPY_TRY(comm->health.ensure_ready());
  Job job;
  job.comm = comm;
  job.destroys = true;
  job.run = [comm] {
    remove_handle(comm->handle);
    depart(comm, true);
    release_memory_use(*comm);
    if (const auto segment = comm->shared_segment()) segment->slot(comm->rank).closed.store(1);
    return ncclSuccess;
  };
  return submit(std::move(job));
}

// Ends the operations; when none runs any more the communicator can be split, shrunk, destroyed or aborted.
ncclResult_t revoke(ncclComm_t handle, int flags) {
  const char* const function = "ncclCommRevoke";
  if (handle == nullptr) return ncclSuccess;
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  if (flags != NCCL_REVOKE_DEFAULT)
    return fail(ncclInvalidArgument, "%s : flags %d, only NCCL_REVOKE_DEFAULT (0) is supported", function, flags);
  {
    std::lock_guard lock(comm->mutex);
    if (comm->finalized)
      return fail(ncclInvalidArgument, "%s : comm was finalized or revoked before", function);
    comm->finalized = comm->disconnected = true;
  }
  Job job;
  job.comm = comm;
  job.run = [comm] {
    comm->revoke();
    return ncclSuccess;
  };
  return submit(std::move(job));
}

ncclResult_t abort(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, "ncclCommAbort", &comm));
  remove_handle(handle);
  comm->abort();
  close_parts(*comm);
  depart(comm, false);
  release_memory_use(*comm);
  // After another rank's death the end of this process must not be reported as another death.
  const auto segment = comm->shared_segment();
  if (segment != nullptr && segment->first_dead() >= 0) segment->slot(comm->rank).closed.store(1);
  return ncclSuccess;
}

template <class Value>
ncclResult_t query(ncclComm_t handle, const char* function, const char* name, int* out, Value value) {
  return guarded(function, [&] {
    std::shared_ptr<Comm> comm;
    NCCLPY_TRY(find_comm(handle, function, &comm));
    NCCLPY_TRY(check_pointer(out, function, name));
    NCCLPY_TRY(comm->health.ensure_ready());
    *out = value(*comm);
    return ncclSuccess;
  });
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return guarded("ncclCommFinalize", [&] { return note_group_error(finalize(comm)); });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return guarded("ncclCommDestroy", [&] { return note_group_error(destroy(comm)); });
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  return guarded("ncclCommRevoke", [&] { return note_group_error(revoke(comm, flags)); });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return guarded("ncclCommAbort", [&] { return note_group_error(abort(comm)); });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  return guarded("ncclCommGetAsyncError", [&] {
    std::shared_ptr<Comm> comm;
    NCCLPY_TRY(find_comm(handle, "ncclCommGetAsyncError", &comm));
    NCCLPY_TRY(check_pointer(error, "ncclCommGetAsyncError", "asyncError"));
    *error = comm->health.poll();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return query(comm, "CommCount", "count", count, [](const Comm& c) { return c.nranks; });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return query(comm, "CommCuDevice", "devid", device, [](const Comm& c) { return c.device; });
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return query(comm, "CommUserRank", "rank", rank, [](const Comm& c) { return c.rank; });
}

const char* ncclGetLastError(ncclComm_t handle) {
  // A copy for the thread: another thread may replace the communicator's text while the caller reads.
  thread_local std::string text;
  std::shared_ptr<Comm> comm;
  const std::string own = last_error();
  if (handle != nullptr && look_up(handle, "ncclGetLastError", &comm) == ncclSuccess) text = comm->health.async_text();
  else text.clear();
  set_last_error(own);
  if (text.empty()) text = own;
  return text.c_str();
}
