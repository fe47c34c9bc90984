// Collectives that only copy, among processes that may read each other's memory: the kernel copies once, from where
// the sender has it to where the receiver wants it (process_vm_readv), instead of twice through the segment.
//
// All ranks have arrived, each pulls what it needs, and none leaves before all have it. A rank that aborts does not
// arrive at the second gate, or takes that back, so nobody takes what was read from it for a result. Only one that dies
// there has arrived while others still read: its memory is gone, and they say so themselves.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include <algorithm>

#include "collective.hpp"

namespace ncclpy::host {
namespace {

// Between two looks at whether the communicator was aborted.
constexpr size_t pull_bytes = 4 << 20;

// From here on one copy by the kernel, which has to pin pages, takes less time than two copies through the cache.
constexpr size_t least_block = 128 << 10;

ssize_t read_from(int pid, void* to, const void* source, size_t bytes) {
  const iovec here = {to, bytes}, there = {const_cast<void*>(source), bytes};
  return process_vm_readv(pid, &here, 1, &there, 1, 0);
}

class Pulled {
 public:
  Pulled(Comm& comm, int parity)
      : comm_(comm), parity_(parity), nranks_(comm.nranks), rank_(comm.rank), mine_(record(comm.rank)),
        bytes_(mine_.count * size_of(mine_.dtype)) {}

  void run() {
    const size_t me = size_t(rank_);
    switch (mine_.kind) {
      case Collective::broadcast: pull(mine_.root, 0, 0); break;
      case Collective::scatter: pull(mine_.root, me, 0); break;
      case Collective::all_to_all: from_all([&](int r) { return pull(r, me, size_t(r)); }); break;
      case Collective::all_gather: from_all([&](int r) { return pull(r, 0, size_t(r)); }); break;
      case Collective::gather:
        if (rank_ == mine_.root) from_all([&](int r) { return pull(r, 0, size_t(r)); });
        break;
      default: break;
    }
  }

 private:
  const Record& record(int rank) { return comm_.segment->slot(rank).record[parity_]; }

  // Each rank begins with another peer, so that they do not all read the same one.
  template <class Pull>
  void from_all(Pull pull) {
    for (int i = 0; i < nranks_; i++) {
      if (!pull((rank_ + i) % nranks_)) return;
    }
  }

  // Copies a block of what `peer` sends to a block of what this rank receives. False when there is no use in going on.
  bool pull(int peer, size_t from, size_t to) {
    const char* source = static_cast<const char*>(record(peer).send) + from * bytes_;
    char* target = static_cast<char*>(mine_.recv) + to * bytes_;
    if (peer == rank_) {
      if (target != source) memcpy(target, source, bytes_);
      return true;
    }
    for (size_t done = 0; done < bytes_;) {
      if (comm_.health.stopped()) return false;
      const ssize_t n = read_from(comm_.segment->slot(peer).pid, target + done, source + done,
                                  std::min(pull_bytes, bytes_ - done));
      if (n <= 0) return complain(peer, source + done, errno);
      done += size_t(n);
    }
    return true;
  }

  bool complain(int peer, const char* source, int error) {
    if (error == ESRCH) {
      if (comm_.segment->slot(peer).left.load(std::memory_order_acquire)) return false;  // it aborted before it ended
      // It has died, perhaps after it arrived where all meet next: then that gate opens, and this must be known by then.
      comm_.segment->bury(peer);
      break_comms(*comm_.segment, peer);
      return false;
    }
    fail(ncclSystemError, "rank %d cannot read the buffer of rank %d at %p: %s", rank_, peer,
         static_cast<const void*>(source), strerror(error));
    comm_.health.set_async(ncclSystemError, last_error());
    return false;
  }

  Comm& comm_;
  const int parity_, nranks_, rank_;
  const Record& mine_;
  const size_t bytes_;
};

}  // namespace

bool may_read_peers() {
  const char* text = getenv("NCCLPY_HOST_READ_PEERS");
  return text == nullptr || strcmp(text, "0") != 0;
}

bool can_read_peers(Segment& segment, int rank) {
  if (!may_read_peers()) return false;
  for (int r = 0; r < segment.nranks(); r++) {
    const RankSlot& peer = segment.slot(r);
    uint64_t process = 0;
    if (r != rank && (read_from(peer.pid, &process, peer.beacon, sizeof process) != ssize_t(sizeof process) ||
                      process != peer.process))
      return false;
  }
  return true;
}

bool is_pulled(Comm& comm, int parity) {
  const Record& mine = comm.segment->slot(comm.rank).record[parity];
  if (mine.count * size_of(mine.dtype) < least_block || mine.kind == Collective::all_reduce ||
      mine.kind == Collective::reduce || mine.kind == Collective::reduce_scatter)
    return false;
  for (int r = 0; r < comm.nranks; r++) {
    if (!comm.segment->slot(r).record[parity].reads_peers) return false;
  }
  return true;
}

void run_pulled(Comm& comm, int parity) {
  Pulled(comm, parity).run();
  comm.rendezvous.pass_data();
}

}  // namespace ncclpy::host
