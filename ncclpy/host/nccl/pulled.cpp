// Collectives of large blocks among processes that may read each other's memory: the kernel copies once, from where the
// sender has it to where the receiver wants it (process_vm_readv), instead of twice through the segment; or to where the
// receiver reduces it, in pieces that stay in the cache.
//
// All ranks have arrived, each pulls what it needs, and none leaves before all have it. A rank that aborts does not
// arrive at the last gate, or takes that back, so nobody takes what was read from it for a result. Only one that dies
// there has arrived while others still read: its memory is gone, and they say so themselves.
#include <string.h>

#include <algorithm>

#include "collective.hpp"
#include "peer_memory.hpp"
#include "wait.hpp"

namespace ncclpy::host {
namespace {

// From here on one copy by the kernel, which has to pin pages, takes less time than two copies through the cache.
constexpr size_t least_block = 128 << 10;
// And of what is reduced, which passes through the cache either way, with more ranks than cores: what counts then is that
// ranks wait for each other three times, not at each step. With a core for each it would only be faster for memory that is
// in their caches, and half as fast again for gradients that come from memory one by one.
constexpr size_t least_reduced = 1 << 20;

class Pulled {
 public:
  Pulled(Comm& comm, int place)
      : comm_(comm), place_(place), nranks_(comm.nranks), rank_(comm.rank), mine_(record(comm.rank)),
        bytes_(mine_.count * size_of(mine_.dtype)) {}

  // Whether this rank has done its part, or what it has not done is no other's concern.
  bool run() {
    const size_t me = size_t(rank_);
    switch (mine_.kind) {
      case Collective::broadcast: pull(mine_.root, 0, 0); break;
      case Collective::scatter: pull(mine_.root, me, 0); break;
      case Collective::all_to_all: from_all([&](int r) { return pull(r, me, size_t(r)); }); break;
      case Collective::all_gather: from_all([&](int r) { return pull(r, 0, size_t(r)); }); break;
      case Collective::gather:
        if (rank_ == mine_.root) from_all([&](int r) { return pull(r, 0, size_t(r)); });
        break;
      case Collective::reduce_scatter: reduce(me * bytes_, bytes_, static_cast<char*>(mine_.recv)); break;
      case Collective::all_reduce: return all_reduce();
      case Collective::reduce: break;  // staged
    }
    return true;
  }

 private:
  const Record& record(int rank) { return comm_.segment->slot(rank).record(place_); }

  // Each rank begins with another peer, so that they do not all read the same one.
  template <class Pull>
  void from_all(Pull pull) {
    for (int i = 0; i < nranks_; i++) {
      if (!pull((rank_ + i) % nranks_)) return;
    }
  }

  // Each rank reduces its range and has the others' from them. It writes to its own range while they read its theirs, and
  // then the other way round; so buffers may be in place.
  bool all_reduce() {
    const auto [first, last] = part_of(bytes_, rank_, nranks_);
    char* const recv = static_cast<char*>(mine_.recv);
    if (!reduce(first, last - first, recv + first)) {
      stay_away();
      return false;
    }
    if (comm_.rendezvous.pass_data() != Passage::open) return false;
    for (int i = 1; i < nranks_; i++) {
      const int peer = (rank_ + i) % nranks_;
      const auto [begin, end] = part_of(bytes_, peer, nranks_);
      if (!copy_from(peer, static_cast<const char*>(record(peer).recv) + begin, recv + begin, end - begin)) break;
    }
    return true;
  }

  // Others wait at a gate for this rank's range, which they will not get. It comes to none, as one that waits at a gate
  // for a peer that has gone: until a death, an abort or a revoke ends it.
  void stay_away() {
    wait_until(comm_.segment->header().bell, [this] { return comm_.health.stopped(); });
  }

  // Reduces `bytes` of what all send, from `at` on, in pieces that stay in the cache. False as for `copy_from`.
  bool reduce(size_t at, size_t bytes, char* to) {
    char* const pieces = comm_.segment->step_input(rank_, 0);
    const size_t most = std::max<size_t>(64, step_bytes / size_t(nranks_ - 1) / 64 * 64);
    const auto piece = [&](int r) { return pieces + size_t(r - (r > rank_ ? 1 : 0)) * most; };
    for (size_t done = 0; done < bytes; done += most) {
      const size_t n = std::min(most, bytes - done);
      const auto source = [&](int r) { return static_cast<const char*>(record(r).send) + at + done; };
      for (int i = 1; i < nranks_; i++) {
        const int peer = (rank_ + i) % nranks_;
        if (!copy_from(peer, source(peer), piece(peer), n)) return false;
      }
      reduce_pieces(comm_, place_, [&](int r) { return r == rank_ ? source(r) : piece(r); },
                    n / size_of(mine_.dtype), {to + done});
    }
    return true;
  }

  // Copies a block of what `peer` sends to a block of what this rank receives. False as for `copy_from`.
  bool pull(int peer, size_t from, size_t to) {
    const char* source = static_cast<const char*>(record(peer).send) + from * bytes_;
    char* target = static_cast<char*>(mine_.recv) + to * bytes_;
    if (peer != rank_) return copy_from(peer, source, target, bytes_);
    if (target != source) memcpy(target, source, bytes_);
    return true;
  }

  // False when there is no use in going on.
  bool copy_from(int peer, const char* source, char* target, size_t bytes) {
    return copy_from_peer(comm_, peer, source, target, bytes, [] { return true; }, [&](const void* at, int error) {
      if (has_gone(comm_, peer, error)) return;
      fail(ncclSystemError, "rank %d cannot read the buffer of rank %d at %p: %s", rank_, peer, at, strerror(error));
      comm_.health.set_async(ncclSystemError, last_error());
    });
  }

  Comm& comm_;
  const int place_, nranks_, rank_;
  const Record& mine_;
  const size_t bytes_;
};

}  // namespace

bool is_pulled(Comm& comm, int place) {
  const Record& mine = comm.segment->slot(comm.rank).record(place);
  const size_t bytes = mine.count * size_of(mine.dtype);
  if (mine.kind == Collective::reduce) return false;
  const bool reduces = mine.kind == Collective::all_reduce || mine.kind == Collective::reduce_scatter;
  const size_t block = mine.kind == Collective::all_reduce ? bytes / size_t(comm.nranks) : bytes;
  if (block < (reduces ? least_reduced : least_block)) return false;
  bool crowded = false;  // to any of them: all are to choose alike
  for (int r = 0; r < comm.nranks; r++) {
    const Record& record = comm.segment->slot(r).record(place);
    if (!record.reads_peers) return false;
    crowded |= record.is_crowded;
  }
  return crowded || !reduces;
}

// It is left at the last gate alone: what can be left is too little for those that have another.
bool run_pulled(Comm& comm, Course& course) {
  static_assert(brief_bytes <= least_reduced, "a reduction is not run a second time");
  if (course.step == 0 && !Pulled(comm, course.place).run()) return true;
  course.step = 1;
  return comm.rendezvous.pass_data() != Passage::left;
}

}  // namespace ncclpy::host
