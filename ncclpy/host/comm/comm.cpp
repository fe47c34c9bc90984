// The handles of communicators, their children, and the end of a communicator.
#include "comm.hpp"

#include <algorithm>

#include "base/handles.hpp"

namespace ncclpy::host {

namespace {
HandleTable<Comm>& handles() {
  static auto* const table = new HandleTable<Comm>('N');
  return *table;
}
}  // namespace

ncclComm_t add_handle(const std::shared_ptr<Comm>& comm) {
  comm->handle = reinterpret_cast<ncclComm_t>(handles().add(comm));
  return comm->handle;
}

ncclResult_t look_up(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm) {
  NCCLPY_TRY(check_pointer(handle, function, "comm"));
  *comm = handles().find(reinterpret_cast<uint64_t>(handle));
  if (*comm == nullptr) {
    return fail(ncclInvalidArgument, "%s : comm %p is not a communicator, or was destroyed or aborted", function,
                static_cast<void*>(handle));
  }
  return ncclSuccess;
}

void remove_handle(ncclComm_t handle) { handles().remove(reinterpret_cast<uint64_t>(handle)); }

std::vector<std::shared_ptr<Comm>> all_comms() { return handles().objects(); }

ncclResult_t check_pointer(const void* pointer, const char* function, const char* name) {
  if (pointer == nullptr) return fail(ncclInvalidArgument, "%s : %s argument is NULL", function, name);
  return ncclSuccess;
}

std::shared_ptr<Comm> new_child(const std::shared_ptr<Comm>& parent) {
  auto child = std::make_shared<Comm>();
  child->parent = parent;
  child->device = parent->device;
  child->health.follow(&parent->health);
  std::lock_guard lock(parent->mutex);
  auto& children = parent->children_;
  for (size_t i = children.size(); i-- > 0;) {
    if (children[i].expired()) children.erase(children.begin() + long(i));
  }
  children.push_back(child);
  return child;
}

std::string Comm::title() const {
  return "communicator " + (name.empty() ? "" : "\"" + name + "\" ") + "of " + std::to_string(nranks) + " ranks";
}

void Comm::set_segment(std::shared_ptr<Segment> joined) {
  std::lock_guard lock(mutex);
  segment = std::move(joined);
  rendezvous.join(*segment, rank);
  health.observe(&segment->header().disagreement);
}

std::shared_ptr<Segment> Comm::shared_segment() {
  std::lock_guard lock(mutex);
  return segment;
}

void Comm::notify_waiters() {
  queue.changed.notify();
  std::vector<std::shared_ptr<Comm>> children;
  {
    std::lock_guard lock(mutex);
    if (segment != nullptr) {
      segment->header().changed.notify();
      segment->slot(rank).changed.notify();
    }
    for (const auto& child : children_) {
      if (auto alive = child.lock()) children.push_back(std::move(alive));
    }
  }
  for (const auto& child : children) child->notify_waiters();
}

void Comm::share_abort(const std::shared_ptr<Comm>& other) {
  health.share_abort(other->health);
  SharedAbort& shared_abort = health.shared_abort();
  std::lock_guard lock(shared_abort.mutex);
  auto& members = shared_abort.members;
  members.erase(std::remove_if(members.begin(), members.end(), [](const auto& one) { return one.expired(); }),
                members.end());
  members.push_back(weak_from_this());
  members.push_back(other);
}

uint64_t Comm::note_call(CallKind kind) {
  const uint64_t word = call_word(kind, calls_[size_t(kind)].fetch_add(1, std::memory_order_relaxed) + 1);
  segment->slot(rank).last_call.store(word, std::memory_order_relaxed);
  return word;
}

void Comm::set_awaited(Side side, std::vector<int> ranks) {
  std::lock_guard lock(awaited_mutex_);
  awaited_[side] = std::move(ranks);
}

std::vector<int> Comm::awaited(Side side) {
  std::lock_guard lock(awaited_mutex_);
  return awaited_[side];
}

std::vector<std::shared_ptr<Comm>> Comm::initialising_children() {
  std::vector<std::shared_ptr<Comm>> found;
  std::lock_guard lock(mutex);
  for (const auto& known : children_) {
    auto child = known.lock();
    if (child != nullptr && !child->health.initialised()) found.push_back(std::move(child));
  }
  return found;
}

void Comm::abort() {
  health.set_aborted();
  std::vector<std::weak_ptr<Comm>> members;
  {
    std::lock_guard lock(health.shared_abort().mutex);
    members = health.shared_abort().members;
  }
  for (const auto& member : members) {
    if (const auto alive = member.lock(); alive != nullptr && alive.get() != this) alive->notify_waiters();
  }
  if (const auto joined = shared_segment()) joined->slot(rank).aborted.store(1, std::memory_order_release);
  notify_waiters();
  queue.await_all();
  rendezvous.withdraw_record();
}

void Comm::revoke() {
  if (const auto joined = shared_segment()) joined->slot(rank).revoked.store(1, std::memory_order_release);
  health.set_revoked();
  notify_waiters();
  queue.await_launches();
  rendezvous.withdraw_record();
}

std::string death_notice(Segment& segment, int rank) {
  const RankSlot& slot = segment.slot(rank);
  return "rank " + std::to_string(rank) + " of " + std::to_string(segment.nranks()) + " is dead: process " +
         std::to_string(slot.pid) + ", on device " + std::to_string(slot.device) +
         ", has ended without destroying its communicator";
}

void Comm::mark_lost(int dead_rank) {
  if (health.set_lost(death_notice(*shared_segment(), dead_rank))) notify_waiters();
}

ncclResult_t Comm::stop_reason(const char* waited_for) {
  if (health.ends_with_parent()) return parent->stop_reason(waited_for);
  if (!health.ended() && health.async() == ncclInvalidUsage) {  // the ranks have not agreed
    set_last_error(health.async_text());
    return ncclInvalidUsage;
  }
  const auto joined = shared_segment();
  if (health.aborted() || joined == nullptr || joined->first_dead() < 0)
    return fail(ncclInternalError, "rank %d was aborted while it waited for %s", rank, waited_for);
  return fail(ncclRemoteError, "%s", death_notice(*joined, joined->first_dead()).c_str());
}

void mark_comms_lost(Segment& segment, int dead_rank) {
  std::vector<std::shared_ptr<Comm>> all;
  {
    std::lock_guard lock(segment.mutex);
    all = segment.local;
  }
  for (const auto& comm : all) comm->mark_lost(dead_rank);
}

}  // namespace ncclpy::host
