// The ways to a communicator: by unique id, all devices at once, and split from another one.
#include <cstring>

#include "../driver/device.hpp"
#include "config.hpp"
#include "group.hpp"

namespace ncclpy::host {
namespace {

// NCCL's devices are those of one machine, and no two ranks share one.
ncclResult_t check_duplicates(Segment& segment) {
  for (int a = 0; a < segment.nranks(); a++) {
    for (int b = a + 1; b < segment.nranks(); b++) {
      if (segment.slot(a).device == segment.slot(b).device) {
        return fail(ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on device %d", a, b,
                    segment.slot(a).device);
      }
    }
  }
  return ncclSuccess;
}

void enter_segment(const std::shared_ptr<Comm>& comm) {
  Segment& segment = *comm->segment;
  std::lock_guard<std::mutex> lock(segment.mutex);
  segment.local.push_back(comm);
}

// Takes part in making the communicator and fills `comm`; returns when all ranks are there.
ncclResult_t meet(const std::shared_ptr<Comm>& comm, int nranks, int rank, const ncclUniqueId& id) {
  comm->nranks = nranks;
  comm->rank = rank;
  std::shared_ptr<Segment> segment;
  NCCLPY_TRY(join_segment(id, nranks, rank, comm->device, &segment));
  comm->set_segment(segment);
  wait_until(segment->header().bell, 0, [&] {
    Segment::watch_others(segment);
    return segment->complete() || comm->stopped() || segment->first_dead() >= 0;
  });
  if (!segment->complete()) {
    const std::string others = "the other ranks: " + std::to_string(segment->header().attached.load()) + " of " +
                               std::to_string(nranks) + " had come";
    return comm->stop_reason(others.c_str());
  }
  retire_unique_ids();
  const ncclResult_t different = check_duplicates(*segment);
  if (different != ncclSuccess) {
    segment->slot(rank).left.store(1);
    return different;
  }
  enter_segment(comm);
  if (segment->first_dead() >= 0) comm->lose(segment->first_dead());
  comm->set_initialised();
  return ncclSuccess;
}

// A failed blocking call leaves no communicator behind; a nonblocking one keeps the handle, for its async error.
void give_up(const std::shared_ptr<Comm>& comm, ncclComm_t* newcomm) {
  remove_handle(comm->handle);
  *newcomm = nullptr;
}

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
  else NCCLPY_TRY(parse_config(config, &comm->config));
  *newcomm = add_handle(comm);
  Job job;
  job.comm = comm;
  job.run = [comm, newcomm, nranks, rank, id = ids[0]] {
    const ncclResult_t result = meet(comm, nranks, rank, id);
    if (result != ncclSuccess && comm->blocking()) give_up(comm, newcomm);
    return result;
  };
  job.drop = [comm, newcomm] { give_up(comm, newcomm); };
  return submit(std::move(job));
}

ncclResult_t init_rank_noted(const char* function, ncclComm_t* newcomm, int nranks, int nids, const ncclUniqueId* ids,
                             int rank, const ncclConfig_t* config) {
  return guarded(function, [&] {
    return note_group_error(init_rank(function, newcomm, nranks, nids, ids, rank, current_device(), config));
  });
}

struct Membership {
  int color;
  int key;
};

// Rank and size in the new communicator: members are ordered by key, equal keys by their rank in the parent.
void find_place(const std::vector<Membership>& all, int me, int* rank, int* nranks, int* leader) {
  *rank = *nranks = 0;
  *leader = -1;
  auto before = [&](int a, int b) {
    const int first = all[size_t(a)].key, second = all[size_t(b)].key;
    return first != second ? first < second : a < b;
  };
  for (int r = 0; r < int(all.size()); r++) {
    if (all[size_t(r)].color != all[size_t(me)].color) continue;
    ++*nranks;
    if (before(r, me)) ++*rank;
    if (*leader < 0 || before(r, *leader)) *leader = r;
  }
}

// The parent's ranks tell each other where they want to go; the first rank of each new communicator makes its id.
ncclResult_t meet_in_split(const std::shared_ptr<Comm>& parent, const std::shared_ptr<Comm>& child, int color, int key) {
  std::lock_guard<std::mutex> one_at_a_time(parent->control);
  const Membership mine = {color, key};
  std::vector<Membership> all(size_t(parent->nranks));
  NCCLPY_TRY(parent->exchange(&mine, sizeof mine, all.data()));
  int rank = 0, nranks = 0, leader = -1;
  ncclUniqueId id = {};
  ncclResult_t made = ncclSuccess;
  if (child != nullptr) {
    find_place(all, parent->rank, &rank, &nranks, &leader);
    if (leader == parent->rank) made = create_unique_id(&id);
  }
  std::vector<ncclUniqueId> ids(size_t(parent->nranks));
  ncclResult_t result = parent->exchange(&id, sizeof id, ids.data());
  if (result == ncclSuccess) result = made;
  if (result == ncclSuccess && child != nullptr) result = meet(child, nranks, rank, ids[size_t(leader)]);
  if (result == ncclSuccess) return result;
  if (leader == parent->rank) withdraw_unique_id(id);
  // What failed may be the consequence of a death: that is what to report, on the parent.
  const int dead = parent->segment->take_pulses();
  if (dead < 0) return result;
  parent->lose(dead);
  return parent->stop_reason("a split");
}

ncclResult_t split(ncclComm_t handle, int color, int key, ncclComm_t* newcomm, const ncclConfig_t* config) {
  std::shared_ptr<Comm> parent;
  NCCLPY_TRY(find_comm(handle, "ncclCommSplit", &parent));
  NCCLPY_TRY(check_pointer(newcomm, "ncclCommSplit", "newcomm"));
  NCCLPY_TRY(parent->ensure_ready());
  *newcomm = nullptr;
  std::shared_ptr<Comm> child;
  if (color != NCCL_SPLIT_NOCOLOR) {
    child = new_child(parent);
    if (config == nullptr) child->config = parent->config;
    else NCCLPY_TRY(parse_config(config, &child->config));
  }
  Job job;
  job.comm = parent;
  // The handle appears when the new communicator is complete, not before.
  job.run = [parent, child, color, key, newcomm] {
    NCCLPY_TRY(meet_in_split(parent, child, color, key));
    if (child == nullptr) return ncclSuccess;
    child->parent.reset();
    *newcomm = add_handle(child);
    return ncclSuccess;
  };
  return submit(std::move(job));
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
  ncclUniqueId id;
  NCCLPY_TRY(create_unique_id(&id));
  group_start();
  for (int i = 0; i < ndev; i++) {
    const int device = devices != nullptr ? devices[i] : i;
    note_group_error(init_rank("ncclCommInitAll", comms + i, ndev, 1, &id, i, device, nullptr));
  }
  return group_end();
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

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  return guarded("ncclCommSplit", [&] { return note_group_error(split(comm, color, key, newcomm, config)); });
}
