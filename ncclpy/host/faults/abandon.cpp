// What an aborted rank leaves for its peers.
#include "abandon.hpp"

#include "base/wait.hpp"
#include "segment/abort_corruption.hpp"

namespace ncclpy::host {
namespace {

bool corrupts_peers(const Comm& comm) {
  return abort_corrupts && comm.nranks > 1 && (comm.health.aborted() || comm.health.revoked());
}

}  // namespace

bool hang_until_released(Comm& comm) {
  if (comm.health.is_released()) return true;
  comm.queue.note_hang();
  wait_until(comm.queue.changed, [&] { return comm.health.is_released() || WaitControl::must_leave(); });
  return comm.health.is_released();
}

void abandon_operations(Comm& comm, const Operation* operations, size_t count) {
  if (!corrupts_peers(comm)) return;
  uint64_t collectives = 0;
  for (size_t i = 0; i < count; i++) {
    const Operation& one = operations[i];
    if (one.kind == Operation::collective) collectives++;
    if (one.message() && one.count > 0) abandon_messages(comm, one.root, one.kind == Operation::send, 1);
  }
  count_abandoned(*comm.segment, comm.rank, collectives);
  comm.segment->notify_all();
}

void abandon_messages(Comm& comm, int peer, bool sends, size_t count) {
  if (!corrupts_peers(comm)) return;
  Channel& link = sends ? comm.segment->channel(comm.rank, peer) : comm.segment->channel(peer, comm.rank);
  (sends ? link.abandoned_sends : link.abandoned_receives).fetch_add(uint32_t(count), std::memory_order_release);
  comm.segment->slot(peer).changed.notify();
}

}  // namespace ncclpy::host
