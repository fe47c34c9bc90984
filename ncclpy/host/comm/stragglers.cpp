// Reads from the shared memory what every rank has called, is running, and has arrived at.
#include "stragglers.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "operation.hpp"

namespace ncclpy::host {

const char* name_of(CallKind kind) {
  static const char* const names[] = {
      "nothing",   "AllReduce",  "Reduce",     "Broadcast", "AllGather",   "ReduceScatter", "AlltoAll",
      "Gather",    "Scatter",    "Send",       "Recv",      "PutSignal",   "Signal",        "WaitSignal",
      "CommSplit", "CommShrink", "CommGrow",   "CommSuspend", "CommResume", "CommWindowRegister",
  };
  static_assert(sizeof names / sizeof *names == size_t(CallKind::kinds));
  return kind < CallKind::kinds ? names[size_t(kind)] : "?";
}

CallKind kind_of(const Operation& operation) {
  if (operation.kind == Operation::collective)
    return CallKind(uint32_t(CallKind::all_reduce) + uint32_t(operation.collective_kind));
  return CallKind(uint32_t(CallKind::send) + uint32_t(operation.kind) - uint32_t(Operation::send));
}

ControlCallScope::ControlCallScope(Comm& comm, uint64_t call) : comm_(comm) {
  comm.segment->slot(comm.rank).current_call[control_side].store(call, std::memory_order_relaxed);
}

ControlCallScope::~ControlCallScope() {
  comm_.segment->slot(comm_.rank).current_call[control_side].store(0, std::memory_order_relaxed);
}

void AwaitedRanks::set(std::vector<int> ranks) {
  set_ = true;
  comm_.set_awaited(side_, std::move(ranks));
}

namespace {

// "0-2, 5"
std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) last++;
    if (last == i + 1) last = i;  // "0, 1" rather than "0-1"
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string kind_name(uint64_t call) { return name_of(kind_in(call)); }

// The call of a straggler relative to the awaited call: by how many calls of the kind they differ.
std::string relative_to(uint64_t call, uint64_t awaited) {
  const int64_t apart = int64_t(number_in(call)) - int64_t(number_in(awaited));
  if (kind_in(call) != kind_in(awaited)) return kind_name(call);
  if (apart == 0) return "this " + kind_name(call);
  return kind_name(call) + ", " + std::to_string(std::abs(apart)) + (apart < 0 ? " before" : " after") + " this one";
}

// For a rank of this process that is in no call of this communicator: the call of another communicator in which its
// device is blocked.
std::string blocked_elsewhere(Segment& segment, int rank) {
  if (!segment.is_local(rank)) return {};
  for (const auto& comm : all_comms()) {
    const auto other = comm->shared_segment();
    if (other == nullptr || other.get() == &segment || comm->device != segment.slot(rank).device) continue;
    const RankSlot& slot = other->slot(comm->rank);
    for (const auto& doing : slot.current_call) {
      const uint64_t call = doing.load(std::memory_order_relaxed);
      if (call != 0) return "blocked in " + kind_name(call) + " of another " + comm->title();
    }
  }
  return {};
}

// The state of a rank that has not arrived.
std::string state_of(Segment& segment, int rank, uint64_t awaited) {
  const RankSlot& slot = segment.slot(rank);
  const uint64_t called = slot.last_call.load(std::memory_order_relaxed);
  const uint64_t running = slot.current_call[data_side].load(std::memory_order_relaxed);
  const uint64_t control_call = slot.current_call[control_side].load(std::memory_order_relaxed);
  if (slot.dead.load(std::memory_order_acquire)) return "dead";
  if (slot.aborted.load(std::memory_order_acquire)) return "aborted";
  if (slot.closed.load(std::memory_order_acquire)) return "closed";
  if (running != 0) return "in " + relative_to(running, awaited);
  if (control_call != 0) return "in " + relative_to(control_call, awaited);
  // A control call was over when it returned; an operation may still be waiting in its stream.
  const bool is_operation = kind_in(called) != CallKind::none && kind_in(called) < CallKind::split;
  if (is_operation && slot.last_done.load(std::memory_order_relaxed) != called)
    return "still queued on its stream";
  const std::string blocked = blocked_elsewhere(segment, rank);
  return blocked.empty() ? "in no operation of this communicator" : blocked;
}

std::string described(Segment& segment, int rank, uint64_t awaited) {
  const RankSlot& slot = segment.slot(rank);
  const uint64_t called = slot.last_call.load(std::memory_order_relaxed);
  return std::to_string(rank) + " (process " + std::to_string(slot.pid) + ", " +
         (called == 0 ? "no call yet" : "last call " + relative_to(called, awaited)) + ", " +
         state_of(segment, rank, awaited) + ")";
}

// At most so many absent ranks are described one by one.
constexpr size_t max_described = 8;

std::string describe_absent(Comm& comm, const std::vector<int>& ranks, uint64_t call) {
  Segment& segment = *comm.segment;
  std::string text;
  std::vector<int> local_absent;
  for (size_t i = 0; i < ranks.size(); i++) {
    if (i < max_described) text += (i > 0 ? ", " : "") + described(segment, ranks[i], call);
    const RankSlot& slot = segment.slot(ranks[i]);
    const uint64_t called = slot.last_call.load(std::memory_order_relaxed);
    const bool not_made = kind_in(called) != kind_in(call) || number_in(called) < number_in(call);
    const bool here = segment.is_local(ranks[i]) && !slot.aborted.load() && !slot.closed.load();
    if (not_made && here) local_absent.push_back(ranks[i]);
  }
  if (ranks.size() > max_described) text += " and " + std::to_string(ranks.size() - max_described) + " more";
  if (!local_absent.empty()) {
    text += "; of this process: " + listed(local_absent) + " (are the calls in one group()?)";
  }
  return text;
}

// The report while ranks are still joining, when nothing but their presence is known.
std::string stragglers_in_init(Segment& segment, const char* what) {
  std::vector<int> arrived, absent;
  for (int rank = 0; rank < segment.nranks(); rank++) {
    (segment.slot(rank).present.load(std::memory_order_acquire) ? arrived : absent).push_back(rank);
  }
  return std::string(what) + ": arrived: " + listed(arrived) + "; missing: " + listed(absent) +
         ", which have not joined with this unique id";
}

std::string stragglers_at(Comm& comm, Side side) {
  Segment& segment = *comm.segment;
  const RankSlot& mine = segment.slot(comm.rank);
  const uint64_t call = mine.current_call[side].load(std::memory_order_relaxed);
  if (call == 0) return {};
  const std::vector<int> awaited = comm.awaited(side);
  if (!awaited.empty()) return kind_name(call) + ": missing: " + describe_absent(comm, awaited, call);
  const bool all_ranks_meet = side == control_side ? kind_in(call) != CallKind::grow : kind_in(call) < CallKind::send;
  if (!all_ranks_meet) {
    if (kind_in(call) == CallKind::grow)
      return kind_name(call) +
             ": missing: the id, which one rank makes with ncclCommGetUniqueId (Communicator.grow_id)";
    return kind_name(call) + " is under way";
  }
  const uint64_t target = mine.arrived[side].load(std::memory_order_relaxed);
  std::vector<int> arrived, absent;
  for (int rank = 0; rank < comm.nranks; rank++) {
    (segment.slot(rank).arrived[side].load(std::memory_order_relaxed) >= target ? arrived : absent).push_back(rank);
  }
  if (absent.empty()) return kind_name(call) + ": all ranks have arrived, the call is under way";
  return kind_name(call) + ": arrived: " + listed(arrived) + "; missing: " + describe_absent(comm, absent, call);
}

}  // namespace

std::string straggler_report(Comm& comm) {
  const auto segment = comm.shared_segment();
  if (segment == nullptr) return {};
  if (!segment->complete()) return stragglers_in_init(*segment, "initialisation");
  for (const auto& child : comm.initialising_children()) {
    const auto joined = child->shared_segment();
    if (joined != nullptr && !joined->complete()) return stragglers_in_init(*joined, "initialisation of a child");
  }
  std::string text = stragglers_at(comm, data_side);
  const std::string control = stragglers_at(comm, control_side);
  if (!control.empty()) text += (text.empty() ? "" : "; ") + control;
  if (!text.empty()) return text;
  const uint64_t called = segment->slot(comm.rank).last_call.load(std::memory_order_relaxed);
  const bool is_operation = called != 0 && kind_in(called) < CallKind::split;
  if (is_operation && segment->slot(comm.rank).last_done.load(std::memory_order_relaxed) != called)
    return kind_name(called) + " is still queued on its stream, behind other work";
  return {};
}

}  // namespace ncclpy::host
