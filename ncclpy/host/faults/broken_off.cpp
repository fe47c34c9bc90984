// What an aborted rank leaves for the others.
#include "broken_off.hpp"

#include "base/wait.hpp"
#include "segment/corruption.hpp"

namespace ncclpy::host {
namespace {

bool breaks_off(const Comm& comm) {
  return abort_corrupts && comm.nranks > 1 && (comm.health.aborted() || comm.health.revoked());
}

}  // namespace

bool stand_still(Comm& comm) {
  if (!comm.health.stands_still()) return true;
  wait_until(comm.queue.bell, [&] { return !comm.health.stands_still() || Interruption::wants_out(); });
  return !comm.health.stands_still();
}

void break_off(Comm& comm, const Operation* operations, size_t count) {
  if (!breaks_off(comm)) return;
  uint64_t collectives = 0;
  for (size_t i = 0; i < count; i++) {
    const Operation& one = operations[i];
    if (one.kind == Operation::collective) collectives++;
    if (one.message() && one.count > 0) break_off_messages(comm, one.root, one.kind == Operation::send, 1);
  }
  count_broken_off(*comm.segment, comm.rank, collectives);
  comm.segment->ring_all();
}

void break_off_messages(Comm& comm, int peer, bool sends, size_t count) {
  if (!breaks_off(comm)) return;
  Channel& way = sends ? comm.segment->channel(comm.rank, peer) : comm.segment->channel(peer, comm.rank);
  (sends ? way.broken_sends : way.broken_receives).fetch_add(uint32_t(count), std::memory_order_release);
  comm.segment->slot(peer).bell.ring();
}

}  // namespace ncclpy::host
