// Reading the memory of another rank's process: the kernel copies, from where the peer has it to where this rank wants it.
#pragma once

#include <errno.h>
#include <sys/types.h>

#include <algorithm>
#include <cstddef>

#include "comm/comm.hpp"

namespace ncclpy::host {

// Whether the environment lets a process read the others': NCCLPY_HOST_READ_PEERS, true unless 0.
bool may_read_peers();
// Whether this rank's process is able to read those of all others as well, which need not be mutual. The stream tasks' own.
bool reads_peers(Comm& comm);

// As process_vm_readv.
ssize_t read_peer(const RankSlot& peer, void* to, const void* source, size_t bytes);
// Whether `peer`, which could not be read for the reason `error`, has died, or has ended the communicator. Its death is known
// then.
bool has_gone(Comm& comm, int peer, int error);

// Between two looks at whether the communicator was aborted.
constexpr size_t read_bytes = 4 << 20;

// Copies from a peer's memory. False when there is no use in going on: the communicator has stopped, it is no longer
// `wanted()`, or the peer cannot be read, of which `fail(at, error)` is told.
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
