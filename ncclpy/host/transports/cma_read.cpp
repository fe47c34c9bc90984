// Collectives of large blocks among processes that can read each other's memory. The kernel copies a block once, from
// the sender's buffer to the receiver's (process_vm_readv), instead of twice, through the segment. Data to be reduced
// are read in pieces that stay in the receiver's cache.
//
// Each rank begins to read when all have arrived, and leaves when all have read. So no rank returns as its result data
// that it has read from a rank that aborts: the aborting rank does not arrive at the last barrier, or withdraws its
// arrival, or arrives last, when all have read. A rank that dies may have arrived while others still read: their reads
// of its memory then fail, and they report the death themselves (has_gone()).
#include <string.h>

#include <algorithm>

#include "base/wait.hpp"
#include "collective.hpp"
#include "peer_memory.hpp"

namespace ncclpy::host {
namespace {

// Smaller blocks never gain: the kernel has to pin pages.
constexpr size_t min_block = 64 << 10;
// From likely_block on, one copy by the kernel mostly takes less time than two copies through the cache, from
// sure_block on always.
constexpr size_t likely_block = 128 << 10, sure_block = 1 << 20;
// The likely_block of reductions: their data pass through the cache either way. It applies in three cases only: with
// two ranks; to a reduce-scatter, in which each rank reads all that it needs at once; and with more ranks than cores,
// where it matters most that ranks wait for each other less often.
constexpr size_t likely_reduced = 1 << 20;
// The piece that a rank reduces at a time in the result's memory, with two ranks that both reduce. If only one of two
// ranks reduces, its piece has read_bytes. In place, and with more ranks, pieces are read into the step buffer
// instead.
constexpr size_t piece_of_both = 512 << 10;

// The rank that measures and decides. It must be a receiver: a rank that only sends may finish long before the others.
int decider_of(const Comm& comm, const Record& record) {
  switch (record.kind) {
    case Collective::reduce:
    case Collective::gather: return record.root;
    case Collective::broadcast:
    case Collective::scatter: return (record.root + 1) % comm.nranks;
    default: return 0;
  }
}

// The bytes that a rank handles at once, by which the transport is chosen.
size_t block_of(const Comm& comm, const Record& record) {
  const size_t bytes = record.count * size_of(record.dtype);
  return record.kind == Collective::all_reduce ? bytes / size_t(comm.nranks) : bytes;
}

bool always_uses_cma(Collective kind, size_t block) { return !reduces(kind) && block >= sure_block; }

bool can_use_cma(const Comm& comm, const Record& record) { return block_of(comm, record) >= min_block; }

// The next stage, stored in CollectiveProgress::step.
enum : size_t { data, middle_barrier, last_barrier, unfinished };

class CmaRead {
 public:
  CmaRead(Comm& comm, int place)
      : comm_(comm), place_(place), nranks_(comm.nranks), rank_(comm.rank), mine_(record(comm.rank)),
        bytes_(mine_.count * size_of(mine_.dtype)) {}

  // Runs the stage before the next barrier and returns that barrier; or `unfinished` if this rank could not reduce its
  // range of an all-reduce, for which the other ranks then wait in vain.
  size_t run() {
    const size_t me = size_t(rank_);
    switch (mine_.kind) {
      case Collective::broadcast: read_block(mine_.root, 0, 0); break;
      case Collective::scatter: read_block(mine_.root, me, 0); break;
      case Collective::all_to_all: from_all([&](int r) { return read_block(r, me, size_t(r)); }); break;
      case Collective::all_gather: from_all([&](int r) { return read_block(r, 0, size_t(r)); }); break;
      case Collective::gather:
        if (rank_ == mine_.root) from_all([&](int r) { return read_block(r, 0, size_t(r)); });
        break;
      case Collective::reduce_scatter: reduce(me * bytes_, bytes_, static_cast<char*>(mine_.recv)); break;
      case Collective::all_reduce: {
        const auto [first, last] = part_of(bytes_, rank_, nranks_);
        return reduce(first, last - first, static_cast<char*>(mine_.recv) + first) ? middle_barrier : unfinished;
      }
      case Collective::reduce:
        if (rank_ == mine_.root) reduce(0, bytes_, static_cast<char*>(mine_.recv));
        break;
    }
    return last_barrier;
  }

  // The second stage of an all-reduce: each rank has reduced its range, and reads the other ranges from their ranks.
  // Buffers may be in place: in the first stage a rank writes its own range while others read the rest of its buffer;
  // in this stage it writes the rest while others read its own range.
  void collect() {
    char* const recv = static_cast<char*>(mine_.recv);
    for (int i = 1; i < nranks_; i++) {
      const int peer = (rank_ + i) % nranks_;
      const auto [begin, end] = part_of(bytes_, peer, nranks_);
      if (!copy_from(peer, static_cast<const char*>(record(peer).recv) + begin, recv + begin, end - begin)) break;
    }
  }

 private:
  const Record& record(int rank) { return comm_.segment->slot(rank).record(place_); }

  // Each rank begins with a different peer, so that not all read the same one.
  template <class ReadBlock>
  void from_all(ReadBlock read_block) {
    for (int i = 0; i < nranks_; i++) {
      if (!read_block((rank_ + i) % nranks_)) return;
    }
  }

  // Reduces `bytes` of all ranks' inputs, from offset `at`, in pieces that stay in the cache. Returns false as
  // copy_from does.
  bool reduce(size_t at, size_t bytes, char* to) {
    char* const pieces = comm_.segment->step_input(rank_, 0);
    // With two ranks the peer's input is read into the result's memory and reduced there: no other data are evicted
    // from the caches, and each call of the kernel may read a large piece.
    const bool in_result = nranks_ == 2 && to != static_cast<const char*>(mine_.send) + at;
    const size_t in_pieces = std::max<size_t>(64, step_bytes / size_t(nranks_ - 1) / 64 * 64);
    const size_t most = !in_result ? in_pieces : mine_.kind == Collective::reduce ? read_bytes : piece_of_both;
    // 0, for ordinary stores, if the inputs have just been read into the result's memory, or if other ranks read the
    // result next: it should stay in the caches.
    const size_t whole = in_result || mine_.kind == Collective::all_reduce ? 0 : bytes;
    for (size_t done = 0; done < bytes; done += most) {
      const size_t n = std::min(most, bytes - done);
      const auto source = [&](int r) { return static_cast<const char*>(record(r).send) + at + done; };
      const auto here = [&](int r) { return in_result ? to + done : pieces + size_t(r - (r > rank_ ? 1 : 0)) * most; };
      for (int i = 1; i < nranks_; i++) {
        const int peer = (rank_ + i) % nranks_;
        if (!copy_from(peer, source(peer), here(peer), n)) return false;
      }
      reduce_pieces(comm_, place_, [&](int r) -> const char* { return r == rank_ ? source(r) : here(r); },
                    n / size_of(mine_.dtype), {to + done}, whole);
    }
    return true;
  }

  // Copies a block of `peer`'s input to a block of this rank's result. Returns false as copy_from does.
  bool read_block(int peer, size_t from, size_t to) {
    const char* source = static_cast<const char*>(record(peer).send) + from * bytes_;
    char* target = static_cast<char*>(mine_.recv) + to * bytes_;
    if (peer != rank_) return copy_from(peer, source, target, bytes_);
    if (target == source) return true;
    const bool nontemporal = uses_nontemporal(mine_, nranks_);
    copy_out(target, source, bytes_, nontemporal);
    if (nontemporal) nontemporal_fence();
    return true;
  }

  // Returns false if the collective cannot be completed.
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

bool wants_cma(Comm& comm, const Record& record) {
  if (comm.rank != decider_of(comm, record) || comm.segment->one_process() || !can_use_cma(comm, record)) return false;
  const size_t block = block_of(comm, record);
  if (always_uses_cma(record.kind, block)) return true;
  const bool suits = comm.nranks == 2 || record.kind == Collective::reduce_scatter || comm.segment->spin().is_crowded();
  const bool likely = reduces(record.kind) ? suits && block >= likely_reduced : block >= likely_block;
  return comm.tuner.choose_cma(record.kind, block, likely);
}

bool uses_cma(Comm& comm, int place) {
  // the ranks have agreed on the root
  const int decider = decider_of(comm, comm.segment->slot(comm.rank).record(place));
  if (!comm.segment->slot(decider).record(place).cma_read) return false;
  for (int r = 0; r < comm.nranks; r++) {
    if (!comm.segment->slot(r).record(place).reads_peers) return false;
  }
  return true;
}

void record_duration(Comm& comm, int place, bool cma, double seconds) {
  const Record& mine = comm.segment->slot(comm.rank).record(place);
  if (comm.rank != decider_of(comm, mine) || !can_use_cma(comm, mine)) return;
  if (always_uses_cma(mine.kind, block_of(comm, mine))) return;
  comm.tuner.record(mine.kind, block_of(comm, mine), cma, seconds);
}

// A thread can suspend the collective only at barriers and in await_end().
WaitResult run_cma_read(Comm& comm, CollectiveProgress& progress) {
  CmaRead reader(comm, progress.place);
  if (progress.step == data) progress.step = reader.run();
  if (progress.step == middle_barrier) {
    const WaitResult result = comm.rendezvous.data_barrier();
    if (result != WaitResult::ok) return result;
    reader.collect();
    progress.step = last_barrier;
  }
  if (progress.step == last_barrier) return comm.rendezvous.data_barrier();
  // Other ranks wait at a barrier for this rank's range and will not get it. This rank does not arrive, and waits for
  // a death, an abort or a revoke, as does a rank that has lost a peer.
  return comm.rendezvous.await_end();
}

}  // namespace ncclpy::host
