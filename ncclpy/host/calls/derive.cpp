// Communicators made from others: split, shrink, grow.
#include <algorithm>
#include <cstring>

#include "call.hpp"
#include "comm/stragglers.hpp"
#include "config.hpp"
#include "driver/device.hpp"
#include "faults/fault.hpp"
#include "init.hpp"
#include "launch/group.hpp"
#include "transports/collective.hpp"

namespace ncclpy::host {
namespace {

// A child with the given configuration, or its parent's.
ncclResult_t make_child(const std::shared_ptr<Comm>& parent, const ncclConfig_t* config, std::shared_ptr<Comm>* child) {
  *child = new_child(parent);
  if (config != nullptr) return parse_config(config, &(*child)->config, &(*child)->name);
  (*child)->config = parent->config;
  (*child)->name = parent->name;
  return ncclSuccess;
}

// Submits a job that runs `meet_others`, which makes `child` a communicator, and then sets `*newcomm`. `child` may be
// null: the rank then takes part and gets no communicator.
template <class Meet>
ncclResult_t submit_child(const std::shared_ptr<Comm>& parent, const std::shared_ptr<Comm>& child, ncclComm_t* newcomm,
                          Meet meet_others) {
  Job job;
  job.comm = parent;
  job.run = [parent, child, newcomm, meet_others] {
    NCCLPY_TRY(meet_others());
    if (child == nullptr) return ncclSuccess;
    child->health.follow(nullptr);
    child->parent.reset();
    *newcomm = add_handle(child);
    // A thread that aborts the parent either finds the child's handle in `*newcomm` after its abort, or its abort is
    // seen here: the child never outlives the abort.
    if (!parent->health.aborted()) return ncclSuccess;
    ncclCommAbort(*newcomm);
    *newcomm = nullptr;
    return parent->stop_reason("its own work");
  };
  return submit(std::move(job));
}

struct Membership {
  int color;
  int key;
};

// Finds this rank and the size in the new communicator, and the parent's rank of its first member (`leader`). Members
// are ordered by key, and with equal keys by their rank in the parent.
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

// The parent's ranks exchange their colours and keys; the first rank of each new communicator makes its id.
ncclResult_t meet_in_split(const std::shared_ptr<Comm>& parent, const std::shared_ptr<Comm>& child, int color, int key,
                           uint64_t call) {
  std::lock_guard one_at_a_time(parent->control);
  const ControlCallScope scope(*parent, call);
  const Membership mine = {color, key};
  std::vector<Membership> all(size_t(parent->nranks));
  NCCLPY_TRY(exchange(*parent, &mine, sizeof mine, all.data()));
  int rank = 0, nranks = 0, leader = -1;
  ncclUniqueId id = {};
  ncclResult_t made = ncclSuccess;
  if (child != nullptr) {
    find_place(all, parent->rank, &rank, &nranks, &leader);
    if (leader == parent->rank) made = create_unique_id(&id);
  }
  std::vector<ncclUniqueId> ids(size_t(parent->nranks));
  ncclResult_t result = exchange(*parent, &id, sizeof id, ids.data());
  if (result == ncclSuccess) result = made;
  if (result == ncclSuccess && child != nullptr) result = join_communicator(child, nranks, rank, ids[size_t(leader)]);
  if (result == ncclSuccess) return result;
  if (leader == parent->rank) withdraw_unique_id(id);
  // The failure may be the consequence of a death, which is then reported on the parent.
  const int dead = parent->segment->find_dead_ranks();
  if (dead < 0) return result;
  parent->mark_lost(dead);
  return parent->stop_reason("a split");
}

ncclResult_t split(ncclComm_t handle, int color, int key, ncclComm_t* newcomm, const ncclConfig_t* config) {
  std::shared_ptr<Comm> parent;
  NCCLPY_TRY(find_comm(handle, "ncclCommSplit", &parent));
  NCCLPY_TRY(check_pointer(newcomm, "ncclCommSplit", "newcomm"));
  NCCLPY_TRY(parent->health.ensure_ready());
  *newcomm = nullptr;
  std::shared_ptr<Comm> child;
  if (color != NCCL_SPLIT_NOCOLOR) {
    NCCLPY_TRY(make_child(parent, config, &child));
    if (parent->config.splitShare == 1) child->share_abort(parent);
  }
  const uint64_t call = parent->note_call(CallKind::split);
  return submit_child(parent, child, newcomm, [=] { return meet_in_split(parent, child, color, key, call); });
}

// The survivors in the order of their ranks, as the new communicator numbers them.
ncclResult_t survivors_of(const Comm& parent, const int* excluded, int count, std::vector<int>* survivors) {
  std::vector<bool> out(size_t(parent.nranks), false);
  for (int i = 0; i < count; i++) {
    if (excluded[i] < 0 || excluded[i] >= parent.nranks)
      return fail(ncclInvalidArgument, "ncclCommShrink : no rank %d to exclude among %d ranks", excluded[i], parent.nranks);
    if (excluded[i] == parent.rank)
      return fail(ncclInvalidArgument, "ncclCommShrink : rank %d is excluded and must not call", parent.rank);
    if (out[size_t(excluded[i])])
      return fail(ncclInvalidArgument, "ncclCommShrink : rank %d is excluded twice", excluded[i]);
    out[size_t(excluded[i])] = true;
  }
  for (int r = 0; r < parent.nranks; r++) {
    if (!out[size_t(r)]) survivors->push_back(r);
  }
  return ncclSuccess;
}

// The key by which survivors recognise each other: a hash of their ranks and of how many times they have shrunk to the
// same set.
uint64_t shrink_key(Comm& parent, const std::vector<int>& survivors) {
  uint64_t key = 0xcbf29ce484222325;  // FNV-1a
  auto add = [&key](uint64_t value) { key = (key ^ value) * 0x100000001b3; };
  for (int r : survivors) add(uint64_t(r));
  std::lock_guard lock(parent.mutex);
  add(uint64_t(++parent.shrunk_to[survivors]));
  return key | 1;  // 0 means an empty board
}

// The first survivor makes the id and publishes it on the board of its slot; excluded ranks take no part.
ncclResult_t meet_in_shrink(const std::shared_ptr<Comm>& parent, const std::shared_ptr<Comm>& child,
                            const std::vector<int>& survivors, uint64_t call) {
  std::lock_guard one_at_a_time(parent->control);
  const ControlCallScope scope(*parent, call);
  const uint64_t key = shrink_key(*parent, survivors);  // in the job, so that a call whose group fails is not counted
  Segment& segment = *parent->segment;
  ShrinkBoard& board = segment.slot(survivors[0]).shrink;
  const bool leads = survivors[0] == parent->rank;
  if (leads) {
    const ncclResult_t made = create_unique_id(&board.id);
    // an unusable id ends the other survivors' attempt
    if (made != ncclSuccess) memset(&board.id, 0, sizeof board.id);
    board.key.store(key, std::memory_order_release);
    segment.header().changed.notify();
    NCCLPY_TRY(made);
  }
  int dead = -1;
  auto a_survivor_died = [&] {
    for (int r : survivors) dead = segment.slot(r).dead.load(std::memory_order_acquire) ? r : dead;
    return dead >= 0;
  };
  auto posted = [&] { return board.key.load(std::memory_order_acquire) == key; };
  {
    AwaitedRanks awaited(*parent, control_side);
    if (!leads) awaited.set({survivors[0]});
    wait_until(segment.header().changed, [&] { return posted() || child->health.stopped() || a_survivor_died(); });
  }
  if (dead >= 0) return fail(ncclRemoteError, "%s", death_notice(segment, dead).c_str());
  if (!posted()) return child->stop_reason("the other survivors of a shrink");
  const ncclUniqueId id = board.id;
  // The first survivor may have failed meanwhile, and be writing the id of its next attempt: what was read may then be
  // a mixture of both ids.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!posted()) return fail(ncclRemoteError, "rank %d, the first survivor of a shrink, has given up", survivors[0]);
  const int rank = int(std::find(survivors.begin(), survivors.end(), parent->rank) - survivors.begin());
  const ncclResult_t result = join_communicator(child, int(survivors.size()), rank, id);
  if (leads) {
    // After a failure the board keeps the withdrawn id: a survivor that arrives later gets an error and need not wait.
    if (result != ncclSuccess) withdraw_unique_id(id);
    else board.key.store(0, std::memory_order_release);
  }
  return result;
}

ncclResult_t shrink(ncclComm_t handle, const int* excluded, int count, ncclComm_t* newcomm, const ncclConfig_t* config,
                    int flags) {
  const char* const function = "ncclCommShrink";
  std::shared_ptr<Comm> parent;
  NCCLPY_TRY(find_comm(handle, function, &parent));
  NCCLPY_TRY(check_pointer(newcomm, function, "newcomm"));
  NCCLPY_TRY(check_pointer(excluded, function, "excludeRanksList"));
  if (count <= 0) return fail(ncclInvalidArgument, "%s : excludeRanksCount is %d", function, count);
  if ((flags & ~NCCL_SHRINK_ABORT) != 0) return fail(ncclInvalidArgument, "%s : invalid flags %#x", function, flags);
  std::vector<int> survivors;
  NCCLPY_TRY(survivors_of(*parent, excluded, count, &survivors));
  if ((flags & NCCL_SHRINK_ABORT) != 0) {
    parent->revoke();
    parent->health.clear_remote_error();
  }
  NCCLPY_TRY(parent->health.ensure_ready());
  *newcomm = nullptr;
  std::shared_ptr<Comm> child;
  NCCLPY_TRY(make_child(parent, config, &child));
  if (parent->config.shrinkShare == 1 && (flags & NCCL_SHRINK_ABORT) == 0) child->share_abort(parent);
  child->health.ignores_dead_ranks = true;
  const uint64_t call = parent->note_call(CallKind::shrink);
  return submit_child(parent, child, newcomm, [=] { return meet_in_shrink(parent, child, survivors, call); });
}

// One rank of the parent makes the id; all of the parent's ranks find it in the segment, and the program passes it to
// the new ranks.
ncclResult_t publish_grow_id(ncclComm_t handle, ncclUniqueId* id) {
  const char* const function = "ncclCommGetUniqueId";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  NCCLPY_TRY(comm->health.ensure_ready());
  NCCLPY_TRY(check_pointer(id, function, "uniqueId"));
  GrowBoard& board = comm->segment->header().grow;
  // The board is free once every rank of the parent has taken every id so far.
  uint64_t published = board.published.load(std::memory_order_acquire);
  if (published % 2 != 0 || board.taken.load(std::memory_order_acquire) != published / 2 * uint64_t(comm->nranks) ||
      !board.published.compare_exchange_strong(published, published + 1)) {
    return fail(ncclInvalidUsage, "%s : the last id has not been used by all ranks' ncclCommGrow yet", function);
  }
  const ncclResult_t made = create_unique_id(&board.id);
  board.published.store(made == ncclSuccess ? published + 2 : published, std::memory_order_release);
  NCCLPY_TRY(made);
  *id = board.id;
  comm->segment->header().changed.notify();
  return ncclSuccess;
}

ncclResult_t take_grow_id(Comm& parent, uint64_t call, ncclUniqueId* id) {
  std::lock_guard one_at_a_time(parent.control);
  const ControlCallScope scope(parent, call);
  Segment& segment = *parent.segment;
  GrowBoard& board = segment.header().grow;
  const uint64_t mine = 2 * ++parent.grown;
  auto published = [&] { return board.published.load(std::memory_order_acquire) >= mine; };
  wait_until(segment.header().changed, [&] { return published() || parent.health.stopped(); });
  if (!published()) {
    parent.grown--;
    return parent.stop_reason("the id of ncclCommGrow, which one rank makes with ncclCommGetUniqueId");
  }
  *id = board.id;
  board.taken.fetch_add(1, std::memory_order_acq_rel);
  return ncclSuccess;
}

ncclResult_t check_grow(const Comm* parent, int nranks, const ncclUniqueId* id, int rank) {
  const char* const function = "ncclCommGrow";
  if (nranks <= 0) return fail(ncclInvalidArgument, "%s: total ranks must be positive, got %d", function, nranks);
  if (parent != nullptr) {
    if (nranks <= parent->nranks) {
      return fail(ncclInvalidArgument, "%s: total ranks %d is not more than current ranks %d", function, nranks,
                  parent->nranks);
    }
    if (rank != -1) return fail(ncclInvalidArgument, "%s: existing ranks must pass rank=-1, got %d", function, rank);
    return ncclSuccess;
  }
  if (rank < 0) return fail(ncclInvalidArgument, "%s: new ranks must pass valid rank >= 0, got %d", function, rank);
  if (id == nullptr) return fail(ncclInvalidArgument, "%s: new ranks must pass non-NULL uniqueId", function);
  if (rank >= nranks) return fail(ncclInvalidArgument, "%s: new rank %d exceeds total ranks %d", function, rank, nranks);
  return ncclSuccess;
}

ncclResult_t grow(ncclComm_t handle, int nranks, const ncclUniqueId* id, int rank, ncclComm_t* newcomm,
                  const ncclConfig_t* config) {
  std::shared_ptr<Comm> parent;
  if (handle != nullptr) NCCLPY_TRY(find_comm(handle, "ncclCommGrow", &parent));
  NCCLPY_TRY(check_pointer(newcomm, "ncclCommGrow", "newcomm"));
  if (parent != nullptr) NCCLPY_TRY(parent->health.ensure_ready());
  NCCLPY_TRY(check_grow(parent.get(), nranks, id, rank));
  *newcomm = nullptr;
  std::shared_ptr<Comm> grown;
  if (parent != nullptr) {
    NCCLPY_TRY(make_child(parent, config, &grown));
  } else {
    grown = std::make_shared<Comm>();
    grown->device = current_device();
    if (config == nullptr) grown->config = default_config();
    else NCCLPY_TRY(parse_config(config, &grown->config, &grown->name));
  }
  grown->rank = parent != nullptr ? parent->rank : rank;
  *newcomm = add_handle(grown);
  const ncclResult_t fault = parent != nullptr ? ncclSuccess : fault_at_call(grown.get(), rank, "ncclCommGrow");
  if (fault != ncclSuccess) {
    drop_handle(grown, newcomm);
    return fault;
  }
  const uint64_t call = parent != nullptr ? parent->note_call(CallKind::grow) : 0;
  Job job;
  job.comm = grown;
  job.run = [=, given = id == nullptr ? ncclUniqueId() : *id] {
    ncclUniqueId shared_id = given;
    ncclResult_t result = parent == nullptr ? ncclSuccess : take_grow_id(*parent, call, &shared_id);
    if (result == ncclSuccess) result = join_communicator(grown, nranks, grown->rank, shared_id);
    if (result == ncclSuccess) {
      grown->health.follow(nullptr);
      grown->parent.reset();
    }
    else if (grown->blocking()) drop_handle(grown, newcomm);
    return result;
  };
  job.drop = [grown, newcomm] { drop_handle(grown, newcomm); };
  return submit(std::move(job));
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  return guarded("ncclCommSplit", [&] { return note_group_error(split(comm, color, key, newcomm, config)); });
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* newcomm, ncclConfig_t* config,
                            int flags) {
  return guarded("ncclCommShrink",
                 [&] { return note_group_error(shrink(comm, excluded, count, newcomm, config, flags)); });
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  return guarded("ncclCommGetUniqueId", [&] { return publish_grow_id(comm, id); });
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int nranks, const ncclUniqueId* id, int rank, ncclComm_t* newcomm,
                          ncclConfig_t* config) {
  return guarded("ncclCommGrow", [&] { return note_group_error(grow(comm, nranks, id, rank, newcomm, config)); });
}
