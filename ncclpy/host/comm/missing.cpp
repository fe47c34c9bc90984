// Reading from the shared memory what every rank has called, is doing, and has come to.
#include "missing.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "operation.hpp"

namespace ncclpy::host {

const char* name_of(Deed deed) {
  static const char* const names[] = {
      "nothing",   "AllReduce",  "Reduce",     "Broadcast", "AllGather",   "ReduceScatter", "AlltoAll",
      "Gather",    "Scatter",    "Send",       "Recv",      "PutSignal",   "Signal",        "WaitSignal",
      "CommSplit", "CommShrink", "CommGrow",   "CommSuspend", "CommResume", "CommWindowRegister",
  };
  static_assert(sizeof names / sizeof *names == size_t(Deed::deeds));
  return deed < Deed::deeds ? names[size_t(deed)] : "?";
}

Deed deed_of(const Operation& operation) {
  if (operation.kind == Operation::collective)
    return Deed(uint32_t(Deed::all_reduce) + uint32_t(operation.collective_kind));
  return Deed(uint32_t(Deed::send) + uint32_t(operation.kind) - uint32_t(Operation::send));
}

Making::Making(Comm& comm, uint64_t deed) : comm_(comm) {
  comm.segment->slot(comm.rank).doing[control_side].store(deed, std::memory_order_relaxed);
}

Making::~Making() { comm_.segment->slot(comm_.rank).doing[control_side].store(0, std::memory_order_relaxed); }

void Awaited::tell(std::vector<int> ranks) {
  told_ = true;
  comm_.await(side_, std::move(ranks));
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

std::string named(uint64_t deed) { return name_of(deed_in(deed)); }

// A call of a rank that is missing at another one: by how many of its kind they are apart.
std::string beside(uint64_t call, uint64_t awaited) {
  const int64_t apart = int64_t(number_in(call)) - int64_t(number_in(awaited));
  if (deed_in(call) != deed_in(awaited)) return named(call);
  if (apart == 0) return "this " + named(call);
  return named(call) + ", " + std::to_string(std::abs(apart)) + (apart < 0 ? " before" : " after") + " this one";
}

// What a rank of this process does that is in nothing of a communicator: what its device is in on another one.
std::string elsewhere(Segment& segment, int rank) {
  if (!segment.is_local(rank)) return {};
  for (const auto& comm : all_comms()) {
    const auto other = comm->shared_segment();
    if (other == nullptr || other.get() == &segment || comm->device != segment.slot(rank).device) continue;
    const RankSlot& slot = other->slot(comm->rank);
    for (const auto& doing : slot.doing) {
      const uint64_t deed = doing.load(std::memory_order_relaxed);
      if (deed != 0) return "blocked in " + named(deed) + " of another " + comm->title();
    }
  }
  return {};
}

// What a rank that has not come does instead.
std::string state_of(Segment& segment, int rank, uint64_t awaited) {
  const RankSlot& slot = segment.slot(rank);
  const uint64_t called = slot.called.load(std::memory_order_relaxed);
  const uint64_t running = slot.doing[data_side].load(std::memory_order_relaxed);
  const uint64_t making = slot.doing[control_side].load(std::memory_order_relaxed);
  if (slot.dead.load(std::memory_order_acquire)) return "dead";
  if (slot.aborted.load(std::memory_order_acquire)) return "aborted";
  if (slot.left.load(std::memory_order_acquire)) return "closed";
  if (running != 0) return "in " + beside(running, awaited);
  if (making != 0) return "in " + beside(making, awaited);
  // The last call may be one that runs on a stream, or one that was over when it returned.
  const bool runs = deed_in(called) != Deed::none && deed_in(called) < Deed::split;
  if (runs && slot.done.load(std::memory_order_relaxed) != called) return "which its stream has not begun";
  const std::string blocked = elsewhere(segment, rank);
  return blocked.empty() ? "in no operation of this communicator" : blocked;
}

std::string described(Segment& segment, int rank, uint64_t awaited) {
  const RankSlot& slot = segment.slot(rank);
  const uint64_t called = slot.called.load(std::memory_order_relaxed);
  return std::to_string(rank) + " (process " + std::to_string(slot.pid) + ", " +
         (called == 0 ? "no call yet" : "last call " + beside(called, awaited)) + ", " +
         state_of(segment, rank, awaited) + ")";
}

// So many are described one by one.
constexpr size_t most = 8;

std::string absent(Comm& comm, const std::vector<int>& ranks, uint64_t deed) {
  Segment& segment = *comm.segment;
  std::string text;
  std::vector<int> neighbours;
  for (size_t i = 0; i < ranks.size(); i++) {
    if (i < most) text += (i > 0 ? ", " : "") + described(segment, ranks[i], deed);
    const RankSlot& slot = segment.slot(ranks[i]);
    const uint64_t called = slot.called.load(std::memory_order_relaxed);
    const bool not_made = deed_in(called) != deed_in(deed) || number_in(called) < number_in(deed);
    const bool here = segment.is_local(ranks[i]) && !slot.aborted.load() && !slot.left.load();
    if (not_made && here) neighbours.push_back(ranks[i]);
  }
  if (ranks.size() > most) text += " and " + std::to_string(ranks.size() - most) + " more";
  if (!neighbours.empty()) {
    text += "; of this process: " + listed(neighbours) + " (are the calls in one group()?)";
  }
  return text;
}

// Before all ranks are there: nothing is known of those that have not come.
std::string missing_in_init(Segment& segment, const char* what) {
  std::vector<int> came, others;
  for (int rank = 0; rank < segment.nranks(); rank++) {
    (segment.slot(rank).present.load(std::memory_order_acquire) ? came : others).push_back(rank);
  }
  return std::string(what) + ": came: " + listed(came) + "; missing: " + listed(others) +
         ", which have not come with this unique id";
}

std::string missing_at(Comm& comm, Side side) {
  Segment& segment = *comm.segment;
  const RankSlot& mine = segment.slot(comm.rank);
  const uint64_t deed = mine.doing[side].load(std::memory_order_relaxed);
  if (deed == 0) return {};
  const std::vector<int> awaited = comm.awaited(side);
  if (!awaited.empty()) return named(deed) + ": missing: " + absent(comm, awaited, deed);
  const bool meets = side == control_side ? deed_in(deed) != Deed::grow : deed_in(deed) < Deed::send;
  if (!meets) {
    if (deed_in(deed) == Deed::grow)
      return named(deed) + ": missing: the id, which one rank makes with ncclCommGetUniqueId (Communicator.grow_id)";
    return named(deed) + " is under way";
  }
  const uint64_t target = mine.arrived[side].load(std::memory_order_relaxed);
  std::vector<int> came, others;
  for (int rank = 0; rank < comm.nranks; rank++) {
    (segment.slot(rank).arrived[side].load(std::memory_order_relaxed) >= target ? came : others).push_back(rank);
  }
  if (others.empty()) return named(deed) + ": all ranks have come, it is under way";
  return named(deed) + ": came: " + listed(came) + "; missing: " + absent(comm, others, deed);
}

}  // namespace

std::string who_is_missing(Comm& comm) {
  const auto segment = comm.shared_segment();
  if (segment == nullptr) return {};
  if (!segment->complete()) return missing_in_init(*segment, "initialisation");
  for (const auto& child : comm.unborn()) {
    const auto joined = child->shared_segment();
    if (joined != nullptr && !joined->complete()) return missing_in_init(*joined, "initialisation of a child");
  }
  std::string text = missing_at(comm, data_side);
  const std::string control = missing_at(comm, control_side);
  if (!control.empty()) text += (text.empty() ? "" : "; ") + control;
  if (!text.empty()) return text;
  const uint64_t called = segment->slot(comm.rank).called.load(std::memory_order_relaxed);
  const bool runs = called != 0 && deed_in(called) < Deed::split;
  if (runs && segment->slot(comm.rank).done.load(std::memory_order_relaxed) != called)
    return named(called) + " has not begun: its stream still has other work to do";
  return {};
}

}  // namespace ncclpy::host
