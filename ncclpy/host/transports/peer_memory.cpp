// Which processes can be read, and what a failed read means.
#include "peer_memory.hpp"

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

namespace ncclpy::host {

bool may_read_peers() {
  const char* text = getenv("NCCLPY_HOST_READ_PEERS");
  return text == nullptr || strcmp(text, "0") != 0;
}

ssize_t read_peer(const RankSlot& peer, void* to, const void* source, size_t bytes) {
  const iovec here = {to, bytes}, there = {const_cast<void*>(source), bytes};
  return process_vm_readv(peer.pid, &here, 1, &there, 1, 0);
}

// A pid may denote another process here, for example in another PID namespace: the process is the peer's if it holds
// the peer's token.
static bool can_read(const RankSlot& peer) {
  uint64_t process = 0;
  const ssize_t n = read_peer(peer, &process, peer.token_address, sizeof process);
  return n == ssize_t(sizeof process) && process == peer.process_token;
}

bool reads_peers(Comm& comm) {
  if (comm.reads_peers) return *comm.reads_peers;
  bool able = may_read_peers();
  for (int r = 0; able && r < comm.nranks; r++) able = r == comm.rank || can_read(comm.segment->slot(r));
  comm.reads_peers = able;
  return able;
}

bool has_gone(Comm& comm, int peer, int error) {
  const RankSlot& slot = comm.segment->slot(peer);
  if (slot.closed.load(std::memory_order_acquire)) return true;  // the rank has ended the communicator
  if (error == ESRCH) {
    // The peer has died, perhaps after its arrival at the next barrier, which then opens: its death must be recorded
    // before this rank passes the barrier.
    comm.segment->mark_dead(peer);
    mark_comms_lost(*comm.segment, peer);
    return true;
  }
  // The buffers of an aborted rank may have been freed.
  return slot.aborted.load(std::memory_order_acquire) || slot.revoked.load(std::memory_order_acquire) ||
         slot.abandoned.load(std::memory_order_acquire) > 0;
}

}  // namespace ncclpy::host
