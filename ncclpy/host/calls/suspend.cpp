// Suspending a communicator: its data buffers are returned to the system until it is resumed.
#include "call.hpp"
#include "comm/stragglers.hpp"
#include "launch/group.hpp"
#include "transports/collective.hpp"

namespace ncclpy::host {
namespace {

// Waits for all ranks: after this no rank reads a buffer that another rank releases.
ncclResult_t meet_all(Comm& comm, uint64_t call) {
  std::lock_guard one_at_a_time(comm.control);
  const ControlCallScope scope(comm, call);
  // After a revoke no rank reads the buffers any more.
  if (!comm.health.revoked()) {
    // Checked first, since a launch of a stopped communicator may still use the state that await_all_passed() uses.
    if (comm.health.stopped() || await_all_passed(comm) != WaitResult::ok) return comm.stop_reason("the other ranks");
  }
  const char nothing = 0;
  std::vector<char> all(size_t(comm.nranks));
  return exchange(comm, &nothing, 1, all.data());
}

ncclResult_t change(ncclComm_t handle, const char* function, bool suspends, int flags) {
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  NCCLPY_TRY(comm->health.ensure_ready());
  if ((flags & NCCL_SUSPEND_MEM) == 0) return ncclSuccess;
  Job job;
  job.comm = comm;
  job.run = [comm, function, suspends, call = comm->note_call(suspends ? CallKind::suspend : CallKind::resume)] {
    if (comm->health.suspended() == suspends) {
      return fail(ncclInvalidUsage, "%s : communicator is %s suspended", function, suspends ? "already" : "not");
    }
    comm->queue.drain();
    NCCLPY_TRY(meet_all(*comm, call));
    if (suspends) comm->segment->release_buffers(comm->rank);
    comm->health.set_suspended(suspends);
    return ncclSuccess;
  };
  return submit(std::move(job));
}

ncclResult_t statistics(ncclComm_t handle, ncclCommMemStat_t stat, uint64_t* value) {
  const char* const function = "ncclCommMemStats";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  NCCLPY_TRY(comm->health.ensure_ready());
  NCCLPY_TRY(check_pointer(value, function, "value"));
  const uint64_t kept = comm->segment->fixed_bytes(), released = comm->segment->buffer_bytes(comm->rank);
  switch (stat) {
    case ncclStatGpuMemSuspend: *value = released; return ncclSuccess;
    case ncclStatGpuMemSuspended: *value = comm->health.suspended(); return ncclSuccess;
    case ncclStatGpuMemPersist: *value = kept; return ncclSuccess;
    case ncclStatGpuMemTotal: *value = kept + released; return ncclSuccess;
  }
  return fail(ncclInvalidArgument, "%s : unknown statistic %d", function, int(stat));
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  return guarded("ncclCommSuspend", [&] { return note_group_error(change(comm, "ncclCommSuspend", true, flags)); });
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
  return guarded("ncclCommResume",
                 [&] { return note_group_error(change(comm, "ncclCommResume", false, NCCL_SUSPEND_MEM)); });
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  return guarded("ncclCommMemStats", [&] { return statistics(comm, stat, value); });
}
