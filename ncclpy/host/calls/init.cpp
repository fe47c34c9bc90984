// Communicators from a unique id or of several devices at once; and how any communicator joins its segment and
// departs.
#include "init.hpp"

#include <utility>

#include "config.hpp"
#include "driver/device.hpp"
#include "faults/fault.hpp"
#include "faults/strict_ends.hpp"
#include "launch/group.hpp"
#include "segment/watch.hpp"

namespace ncclpy::host {
namespace {

// As in NCCL, no two ranks may share a device. Device numbers are compared only between ranks of one machine.
ncclResult_t check_duplicates(Segment& segment) {
  for (int a = 0; a < segment.nranks(); a++) {
    for (int b = a + 1; b < segment.nranks(); b++) {
      if (segment.slot(a).device == segment.slot(b).device && segment.slot(a).machine == segment.slot(b).machine) {
        return fail(ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on device %d", a, b,
                    segment.slot(a).device);
      }
    }
  }
  return ncclSuccess;
}

void enter_segment(const std::shared_ptr<Comm>& comm) {
  Segment& segment = *comm->segment;
  std::lock_guard lock(segment.mutex);
  segment.local.push_back(comm);
  comm->in_local_list = true;
}

}  // namespace

void depart(const std::shared_ptr<Comm>& comm, bool wait) {
  const auto segment = comm->shared_segment();
  if (segment == nullptr) return;
  std::vector<std::shared_ptr<Comm>> all;
  {
    std::lock_guard lock(segment->mutex);
    // A communicator that was never complete is not counted, and one that is destroyed twice in a group only once.
    // Otherwise local_departed would reach the number of communicators while one of them is still in use.
    if (!std::exchange(comm->in_local_list, false)) return;
    if (++segment->local_departed < segment->local.size()) return;
    all.swap(segment->local);
    segment->local_departed = 0;
  }
  if (all.size() == 1) check_destroy(*comm);
  if (!wait) return;
  for (const auto& one : all) one->queue.drain();
}

ncclResult_t join_communicator(const std::shared_ptr<Comm>& comm, int nranks, int rank, const ncclUniqueId& id) {
  comm->nranks = nranks;
  // The rank of a communicator that has a handle is already set, and other threads may be reading it.
  if (comm->rank != rank) comm->rank = rank;
  std::shared_ptr<Segment> segment;
  NCCLPY_TRY(join_segment(id, nranks, rank, comm->device, &segment));
  comm->set_segment(segment);
  try {
    wait_until(segment->header().changed, [&] {
      watch_others(segment, mark_comms_lost);
      return segment->complete() || comm->health.stopped() || segment->first_dead() >= 0;
    });
  } catch (...) {  // no thread can watch the other processes: the others must not count on this rank
    segment->mark_dead(rank);
    segment->end_id_rendezvous();
    throw;
  }
  const int joined = int(segment->header().attached.load());
  segment->end_id_rendezvous();
  if (!segment->complete()) {
    const std::string others =
        "the other ranks: " + std::to_string(joined) + " of " + std::to_string(nranks) + " had joined";
    return comm->stop_reason(others.c_str());
  }
  segment->find_cores();
  const ncclResult_t different = check_duplicates(*segment);
  if (different != ncclSuccess) {
    segment->slot(rank).closed.store(1);
    return different;
  }
  enter_segment(comm);
  if (comm->health.aborted()) depart(comm, false);  // the depart() of an abort before enter_segment() had no effect
  if (segment->first_dead() >= 0) comm->mark_lost(segment->first_dead());
  comm->health.set_initialised();
  return ncclSuccess;
}

void drop_handle(const std::shared_ptr<Comm>& comm, ncclComm_t* newcomm) {
  remove_handle(comm->handle);
  *newcomm = nullptr;
}

namespace {

ncclResult_t init_rank(const char* function, ncclComm_t* newcomm, int nranks, int nids, const ncclUniqueId* ids,
                       int rank, int device, const ncclConfig_t* config) {
  if (nids <= 0 || nids > nranks)
    return fail(ncclInvalidArgument, "improper usage of %s: nId = %d, nranks=%d", function, nids, nranks);
  NCCLPY_TRY(check_pointer(newcomm, function, "newcomm"));
  *newcomm = nullptr;
  NCCLPY_TRY(check_pointer(ids, function, "commId"));
  if (nranks < 1 || rank < 0 || rank >= nranks)
    return fail(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, nranks);
  auto comm = std::make_shared<Comm>();
  comm->device = device;
  if (config == nullptr) comm->config = default_config();
  else NCCLPY_TRY(parse_config(config, &comm->config, &comm->name));
  comm->rank = rank;
  *newcomm = add_handle(comm);
  const ncclResult_t fault = fault_at_call(comm.get(), rank, function);
  if (fault != ncclSuccess) {
    drop_handle(comm, newcomm);
    return fault;
  }
  Job job;
  job.comm = comm;
  // One id is enough for all ranks of a machine; NCCL spreads the ranks over as many ids as it is given. The ranks
  // agree on the order of the ids, so they meet at the first; the others are withdrawn.
  job.run = [comm, newcomm, nranks, rank, given = std::vector<ncclUniqueId>(ids, ids + nids)] {
    const ncclResult_t result = join_communicator(comm, nranks, rank, given[0]);
    for (size_t i = 1; result == ncclSuccess && i < given.size(); i++) withdraw_unique_id(given[i]);
    if (result != ncclSuccess && comm->blocking()) drop_handle(comm, newcomm);
    return result;
  };
  job.drop = [comm, newcomm] { drop_handle(comm, newcomm); };
  return submit(std::move(job));
}

ncclResult_t init_rank_noted(const char* function, ncclComm_t* newcomm, int nranks, int nids, const ncclUniqueId* ids,
                             int rank, const ncclConfig_t* config) {
  return guarded(function, [&] {
    return note_group_error(init_rank(function, newcomm, nranks, nids, ids, rank, current_device(), config));
  });
}

ncclResult_t init_all(ncclComm_t* comms, int ndev, const int* devices) {
  NCCLPY_TRY(check_pointer(comms, "CommInitAll", "comms"));
  if (ndev < 0) return fail(ncclInvalidArgument, "Invalid device count requested : %d", ndev);
  const int total = device_count();
  std::vector<bool> used(size_t(total), false);
  for (int i = 0; i < ndev; i++) {
    const int device = devices != nullptr ? devices[i] : i;
    if (device < 0 || device >= total)
      return fail(ncclInvalidArgument, "Invalid device %d (totalnDev=%d)", device, total);
    if (used[size_t(device)])
      return fail(ncclInvalidUsage, "Duplicate GPU detected : device %d stands in the list twice", device);
    used[size_t(device)] = true;
  }
  if (ndev == 0) return ncclSuccess;
  ncclUniqueId id;
  NCCLPY_TRY(create_unique_id(&id));
  group_start();
  for (int i = 0; i < ndev; i++) {
    const int device = devices != nullptr ? devices[i] : i;
    note_group_error(init_rank("ncclCommInitAll", comms + i, ndev, 1, &id, i, device, nullptr));
  }
  const ncclResult_t result = group_end();
  if (result != ncclSuccess) withdraw_unique_id(id);
  return result;
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclGetVersion(int* version) {
  NCCLPY_TRY(check_pointer(version, "GetVersion", "version"));
  *version = NCCLPY_ABI_VERSION;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded("ncclGetUniqueId", [&] {
    NCCLPY_TRY(check_pointer(id, "GetUniqueId", "out"));
    NCCLPY_TRY(fault_at_call(nullptr, -1, "ncclGetUniqueId"));
    return create_unique_id(id);
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return init_rank_noted("ncclCommInitRank", comm, nranks, 1, &id, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return init_rank_noted("ncclCommInitRankConfig", comm, nranks, 1, &id, rank, config);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int nids, ncclUniqueId* ids,
                                      ncclConfig_t* config) {
  return init_rank_noted("ncclCommInitRankScalable", comm, nranks, nids, ids, rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ndev, const int* devices) {
  return guarded("ncclCommInitAll", [&] { return note_group_error(init_all(comms, ndev, devices)); });
}
