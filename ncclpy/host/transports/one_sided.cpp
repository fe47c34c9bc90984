// How puts and signals run. Signals are counted in the channel between two ranks; the count only grows. A wait adds to
// the number of signals taken, so that each signal counts for one wait only.
#include "one_sided.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/wait.hpp"
#include "collective.hpp"
#include "comm/stragglers.hpp"
#include "faults/abandon.hpp"

namespace ncclpy::host {

bool run_put(Comm& comm, const Operation& operation) {
  if (operation.kind != Operation::put) return true;
  const size_t bytes = operation.count * size_of(operation.dtype);
  if (!operation.gate->enter()) {  // closed: the peer's memory may have been reused
    if (comm.segment->slot(operation.root).aborted.load() == 0) {
      comm.health.set_async(ncclInvalidUsage, "ncclPutSignal : rank " + std::to_string(operation.root) +
                                                  " has deregistered its part of the window meanwhile");
    }
    return false;
  }
  if (bytes > 0) std::memmove(operation.recvbuff, operation.sendbuff, bytes);
  operation.gate->leave();
  return true;
}

void give_signal(Comm& comm, const Operation& operation) {
  Segment& segment = *comm.segment;
  segment.channel(comm.rank, operation.root).signals[operation.counter].fetch_add(1, std::memory_order_acq_rel);
  segment.slot(operation.root).changed.notify();
}

namespace {

const std::atomic<uint64_t>& signals_of(Comm& comm, const Operation& wait) {
  return comm.segment->channel(wait.root, comm.rank).signals[wait.counter];
}

// The ranks that have not yet given all signals that the waits need.
std::vector<int> ranks_without_signals(Comm& comm, const Operation* operations, size_t count) {
  std::map<std::pair<int, int>, uint64_t> targets = comm.signals_taken;
  std::vector<int> ranks;
  for (size_t i = 0; i < count; i++) {
    const Operation& one = operations[i];
    if (one.kind != Operation::wait_signal) continue;
    const uint64_t target = targets[{one.root, one.counter}] += one.count;
    const bool there = signals_of(comm, one).load(std::memory_order_acquire) >= target;
    if (!there && std::find(ranks.begin(), ranks.end(), one.root) == ranks.end()) ranks.push_back(one.root);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace

void wait_for_signal(Comm& comm, const Operation* operations, size_t count) {
  Segment& segment = *comm.segment;
  const Operation& first = operations[0];
  const std::atomic<uint64_t>& given = signals_of(comm, first);
  uint64_t& taken = comm.signals_taken[{first.root, first.counter}];
  const uint64_t target = taken + first.count;
  const auto there = [&] { return given.load(std::memory_order_acquire) >= target; };
  AwaitedRanks awaited(comm, data_side);
  const Rendezvous::WaiterRegistration registration(comm.rendezvous);
  std::vector<int> published;
  const auto over = [&] {
    if (there() || comm.health.stopped() || finds_disagreement(comm)) return true;
    std::vector<int> missing = ranks_without_signals(comm, operations, count);
    if (missing != published) {
      published = missing;
      awaited.set(std::move(missing));
    }
    return false;
  };
  if (!segment.spin().until(there)) wait_until(segment.slot(comm.rank).changed, over);
  if (there())
    taken = target;
  else
    (void)hang_until_released(comm);
}

}  // namespace ncclpy::host
