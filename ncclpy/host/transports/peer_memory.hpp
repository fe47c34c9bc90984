// Reading the memory of another rank's process (Cross-Memory Attach): the kernel copies from the peer's buffer to this
// rank's.
#pragma once

#include <errno.h>
#include <sys/types.h>

#include <algorithm>
#include <cstddef>

#include "comm/comm.hpp"

namespace ncclpy::host {

// Whether the environment permits reading other processes: NCCLPY_HOST_READ_PEERS, true unless 0.
bool may_read_peers();
// Whether this rank's process can also read the processes of all other ranks; this need not be mutual. For stream
// tasks only.
bool reads_peers(Comm& comm);

// As process_vm_readv.
ssize_t read_peer(const RankSlot& peer, void* to, const void* source, size_t bytes);
// Whether `peer`, which could not be read because of `error`, has died, or has ended, aborted or revoked the
// communicator or abandoned a collective. Records a death.
bool has_gone(Comm& comm, int peer, int error);

// Bytes between two checks of whether the communicator was aborted.
constexpr size_t read_bytes = 4 << 20;

// Copies from a peer's memory. Returns false if the communicator has stopped, if the data are no longer `wanted()`, or
// if the peer cannot be read; in the last case it calls `fail(at, error)`.
template <class Wanted, class Fail>
bool copy_from_peer(Comm& comm, int peer, const void* source, void* target, size_t bytes, Wanted wanted, Fail fail) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(target);
  for (size_t done = 0; done < bytes;) {
    if (comm.health.stopped() || !wanted()) return false;
    const ssize_t n =
        read_peer(comm.segment->slot(peer), to + done, from + done, std::min(read_bytes, bytes - done));
    if (n <= 0) {
      fail(from + done, errno);
      return false;
    }
    done += size_t(n);
  }
  return true;
}

}  // namespace ncclpy::host
