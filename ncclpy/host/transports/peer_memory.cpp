// Who may be read, and what it means that somebody cannot.
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

// A pid may be another process's here, in a container of its own, say: what it is told to hold says whether it is the one.
static bool can_read(const RankSlot& peer) {
  uint64_t process = 0;
  return read_peer(peer, &process, peer.token_address, sizeof process) == ssize_t(sizeof process) && process == peer.process_token;
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
  if (slot.closed.load(std::memory_order_acquire)) return true;  // it aborted before it ended
  if (error == ESRCH) {
    // It has died, perhaps after it arrived where all meet next: then that gate opens, and this must be known by then.
    comm.segment->mark_dead(peer);
    mark_comms_lost(*comm.segment, peer);
    return true;
  }
  // What it sends may have been freed since.
  return slot.aborted.load(std::memory_order_acquire) || slot.revoked.load(std::memory_order_acquire) ||
         slot.abandoned.load(std::memory_order_acquire) > 0;
}

}  // namespace ncclpy::host
