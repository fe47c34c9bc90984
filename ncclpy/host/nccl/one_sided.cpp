// Puts and signals as they run. A signal is a count in the channel between two ranks that only grows; a wait takes what it has
// waited for, so that every signal is waited for once.
#include "one_sided.hpp"

#include <cstring>

#include "missing.hpp"
#include "wait.hpp"

namespace ncclpy::host {

void run_put(const Operation& operation) {
  const size_t bytes = operation.count * size_of(operation.dtype);
  if (operation.kind == Operation::put && bytes > 0) std::memmove(operation.recvbuff, operation.sendbuff, bytes);
}

void give_signal(Comm& comm, const Operation& operation) {
  Segment& segment = *comm.segment;
  segment.channel(comm.rank, operation.root).signals[operation.counter].fetch_add(1, std::memory_order_acq_rel);
  segment.slot(operation.root).bell.ring();
}

void wait_for_signals(Comm& comm, const Operation& operation) {
  Segment& segment = *comm.segment;
  const std::atomic<uint64_t>& given = segment.channel(operation.root, comm.rank).signals[operation.counter];
  uint64_t& taken = comm.signals_taken[{operation.root, operation.counter}];
  const uint64_t target = taken + operation.count;
  auto there = [&] { return given.load(std::memory_order_acquire) >= target; };
  Awaited awaited(comm, data_side);
  if (!there()) awaited.tell({operation.root});
  wait_until(segment.slot(comm.rank).bell, segment.spin(), [&] { return there() || comm.health.stopped(); });
  if (there()) taken = target;
}

}  // namespace ncclpy::host
