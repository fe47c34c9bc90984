// Collectives of little data: each rank's contribution lies in the segment when all have arrived, and each rank
// computes its own result from the contributions. One rendezvous in all, among threads and among processes, and none
// for a rank that only sends.
#include <cstring>

#include "collective.hpp"

namespace ncclpy::host {
namespace {

// Up to this size the cache lines of the next contribution are fetched one collective ahead.
constexpr size_t max_prefetched = 1024;

size_t contributed_bytes(Collective kind, ncclDataType_t dtype, size_t count, int nranks) {
  return count * size_of(dtype) * blocks_sent(kind, nranks);
}

}  // namespace

bool is_inline(Collective kind, ncclDataType_t dtype, size_t count, int nranks) {
  // A division, so that a huge count does not overflow.
  return count <= max_inline_bytes(nranks) / size_of(dtype) / blocks_sent(kind, nranks);
}

size_t inline_contribution_bytes(const Comm& comm, const Operation& operation) {
  if (!operation.sends(comm.rank)) return 0;
  return contributed_bytes(operation.collective_kind, operation.dtype, operation.count, comm.nranks);
}

void write_inline(Comm& comm, const Record& record, int place, size_t bytes) {
  if (bytes == 0) return;
  char* const here = comm.segment->inline_buffer(comm.rank, place, bytes);
  const char* const send = static_cast<const char*>(record.send);
  if (record.kind != Collective::all_to_all && record.kind != Collective::scatter) {
    std::memcpy(here, send, bytes);
    return;
  }
  const size_t block = bytes / size_t(comm.nranks), mine = size_t(comm.rank) * block;
  // This rank's own block is not copied: no other rank reads it.
  std::memcpy(here, send, mine);
  std::memcpy(here + mine + block, send + mine + block, bytes - mine - block);
}

void prefetch_inline(Comm& comm, int place, size_t bytes) {
  if (bytes <= record_inline_bytes || bytes > max_prefetched) return;
  const char* const next = comm.segment->inline_buffer(comm.rank, place, bytes);
  for (size_t at = 0; at < bytes; at += 64) prefetch_for_write(next + at);
}

void run_inline(Comm& comm, int place) {
  Segment& segment = *comm.segment;
  const Record& mine = segment.slot(comm.rank).record(place);
  const size_t bytes = mine.count * size_of(mine.dtype);
  const size_t my_block = blocks_sent(mine.kind, comm.nranks) > 1 ? size_t(comm.rank) * bytes : 0;
  const size_t contributed = contributed_bytes(mine.kind, mine.dtype, mine.count, comm.nranks);
  auto input = [&](int r) { return segment.inline_buffer(r, place, contributed) + my_block; };
  char* recv = static_cast<char*>(mine.recv);
  // A rank takes its own part from its send buffer, which is nearer; in place it is already there.
  const auto take = [&](int r, char* target) {
    const char* source = r == comm.rank ? static_cast<const char*>(mine.send) + my_block : input(r);
    if (source != target) std::memmove(target, source, bytes);
  };
  switch (mine.kind) {
    case Collective::reduce:
      if (comm.rank != mine.root) return;
      [[fallthrough]];
    case Collective::all_reduce:
    case Collective::reduce_scatter: return reduce_pieces(comm, place, input, mine.count, {recv}, 0);
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
