// Collectives of little data: every rank's contribution lies in the segment when all have arrived, and every rank makes
// its own result out of them. One rendezvous in all, among threads and among processes.
#include <cstring>

#include "collective.hpp"

namespace ncclpy::host {
namespace {

// Whether a rank's contribution holds a block for each rank.
bool has_blocks(Collective kind) {
  return kind == Collective::reduce_scatter || kind == Collective::all_to_all || kind == Collective::scatter;
}

bool contributes(const Record& record, int rank) {
  const bool one_root = record.kind == Collective::broadcast || record.kind == Collective::scatter;
  return !one_root || rank == record.root;
}

// Bytes of a contribution; as a count of blocks so that a huge count does not overflow.
size_t blocks_of(Collective kind, int nranks) { return has_blocks(kind) ? size_t(nranks) : 1; }

size_t contributed_bytes(const Record& record, int nranks) {
  return record.count * size_of(record.dtype) * blocks_of(record.kind, nranks);
}

}  // namespace

bool is_small(Collective kind, ncclDataType_t dtype, size_t count, int nranks) {
  return count <= most_inline(nranks) / size_of(dtype) / blocks_of(kind, nranks);
}

void contribute_small(Comm& comm, const Record& record, int parity) {
  if (!contributes(record, comm.rank)) return;
  const size_t bytes = contributed_bytes(record, comm.nranks);
  char* const here = comm.segment->small(comm.rank, parity, bytes);
  const char* const send = static_cast<const char*>(record.send);
  if (record.kind != Collective::all_to_all && record.kind != Collective::scatter) {
    std::memcpy(here, send, bytes);
    return;
  }
  const size_t block = bytes / size_t(comm.nranks), mine = size_t(comm.rank) * block;  // which nobody else reads
  std::memcpy(here, send, mine);
  std::memcpy(here + mine + block, send + mine + block, bytes - mine - block);
}

void run_small(Comm& comm, int parity) {
  Segment& segment = *comm.segment;
  const Record& mine = segment.slot(comm.rank).record[parity];
  const size_t bytes = mine.count * size_of(mine.dtype);
  const size_t my_block = has_blocks(mine.kind) ? size_t(comm.rank) * bytes : 0;
  const size_t contributed = contributed_bytes(mine, comm.nranks);
  auto input = [&](int r) { return segment.small(r, parity, contributed) + my_block; };
  char* recv = static_cast<char*>(mine.recv);
  // What this rank gives itself it has nearer, and in place there already.
  const auto take = [&](int r, char* target) {
    const char* source = r == comm.rank ? static_cast<const char*>(mine.send) + my_block : input(r);
    if (source != target) std::memmove(target, source, bytes);
  };
  switch (mine.kind) {
    case Collective::reduce:
      if (comm.rank != mine.root) return;
      [[fallthrough]];
    case Collective::all_reduce:
    case Collective::reduce_scatter: return reduce_pieces(comm, parity, input, mine.count, {recv});
    case Collective::broadcast:
    case Collective::scatter: take(mine.root, recv); return;
    case Collective::gather:
      if (comm.rank != mine.root) return;
      [[fallthrough]];
    case Collective::all_gather:
    case Collective::all_to_all:
      for (int r = 0; r < comm.nranks; r++) take(r, recv + size_t(r) * bytes);
      return;
  }
}

}  // namespace ncclpy::host
