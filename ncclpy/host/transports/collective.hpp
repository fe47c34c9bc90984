// The transports of collectives. A transport runs when the ranks that this rank needs have arrived and agree on the
// operation: none, the root or all ranks in an inline collective, otherwise all ranks.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/comm.hpp"
#include "comm/operation.hpp"
#include "reduction/nontemporal.hpp"

namespace ncclpy::host {

// NCCL's name of an operation, without "nccl".
const char* name_of(const Operation& operation);

const char* type_name(ncclDataType_t dtype);

// A launch of more bytes, counting the larger buffer of each operation, is not interruptible: the time without a
// suspension point matters more than the cost of waking a worker.
constexpr size_t interruptible_max_bytes = 1 << 20;

inline bool reduces(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce || kind == Collective::reduce_scatter;
}

// Blocks of `count` elements in the send buffer and in the receive buffer.
inline size_t blocks_sent(Collective kind, int nranks) {
  const bool many = kind == Collective::reduce_scatter || kind == Collective::all_to_all || kind == Collective::scatter;
  return many ? size_t(nranks) : 1;
}
inline size_t blocks_received(Collective kind, int nranks) {
  const bool many = kind == Collective::all_gather || kind == Collective::all_to_all || kind == Collective::gather;
  return many ? size_t(nranks) : 1;
}

// Whether a rank's result is so large that no cache holds it.
inline bool uses_nontemporal(const Record& record, int nranks) {
  return record.count * size_of(record.dtype) * blocks_received(record.kind, nranks) >= nontemporal_min_bytes;
}

// The progress of a collective that a thread has suspended.
struct CollectiveProgress {
  bool arrived = false;    // all ranks that this one needs have arrived, and agree
  int place = 0;           // of the records, see below
  size_t step = 0;         // where the transport resumes: completed steps (shm_staged.cpp) or the stage (cma_read.cpp)
  bool suspended = false;  // a thread suspended it while its data moved
};

// Runs a collective. Returns false if the thread suspended it: it must be called again, with the same `progress`.
bool run_collective(Comm& comm, const Operation& operation, CollectiveProgress& progress);
// Whether a thread with a time limit may run the operation: only a collective or a message of at most `*bytes` bytes,
// which are then subtracted from `*bytes`. The limit exists because the work between two barriers and the copy of a
// message cannot be suspended.
bool fits_interruptible(const Comm& comm, const Operation& operation, size_t* bytes);

// An all-gather of `bytes` of every rank, in rank order; at most exchange_bytes. Blocks.
ncclResult_t exchange(Comm& comm, const void* mine, size_t bytes, void* all);
// Whether a mismatch is known, or is found now, on a collective from which this rank continued without waiting: other
// ranks then do not reach later operations. For stream tasks only.
bool finds_disagreement(Comm& comm);
// Waits until the other ranks have read what this rank has left for them in the segment. The result is `ended` if the
// ranks do not agree or the communicator has stopped.
WaitResult await_all_passed(Comm& comm);

// In the functions below, `place` is the index of the collective's records: each rank's record is record(place) of its
// slot (segment.hpp).

// Inline collectives: each rank leaves its contribution in the segment beside its record, so a second rendezvous is
// not needed. inline_contribution_bytes is the size of one rank's contribution. write_inline writes the contribution;
// prefetch_inline fetches the cache lines to which a contribution of `bytes` at `place` will be written.
bool is_inline(Collective kind, ncclDataType_t dtype, size_t count, int nranks);
size_t inline_contribution_bytes(const Comm& comm, const Operation& operation);
void write_inline(Comm& comm, const Record& record, int place, size_t bytes);
void prefetch_inline(Comm& comm, int place, size_t bytes);
void run_inline(Comm& comm, int place);

// All ranks are threads of one process: each rank reads and writes the others' buffers.
void run_in_process(Comm& comm, int place);

// Ranks of several processes: the data pass through the segment in steps.
WaitResult run_shm_staged(Comm& comm, CollectiveProgress& progress);

// Ranks of several processes that can read each other's memory, with large blocks: one copy instead of two. wants_cma:
// whether this rank decides for all and chooses this transport. uses_cma: whether the ranks use it. record_duration:
// records the deciding rank's measurement.
bool wants_cma(Comm& comm, const Record& record);
bool uses_cma(Comm& comm, int place);
void record_duration(Comm& comm, int place, bool cma, double seconds);
WaitResult run_cma_read(Comm& comm, CollectiveProgress& progress);

// The range of `bytes` that rank `r` reduces: whole cache lines, so also whole elements.
inline std::pair<size_t, size_t> part_of(size_t bytes, int r, int nranks) {
  const size_t lines = size_t(nranks) * 64, each = (bytes + lines - 1) / lines * 64;
  return {std::min(bytes, size_t(r) * each), std::min(bytes, size_t(r + 1) * each)};
}

// Reduces one piece of all ranks' inputs, in rank order. `input(r)` is rank r's piece; `whole` is the size of the
// result that contains the outputs, or 0 if the outputs should stay in a cache.
template <class Input>
void reduce_pieces(Comm& comm, int place, Input input, size_t count, std::vector<void*> outputs, size_t whole) {
  if (count == 0) return;
  std::vector<const void*> inputs;
  std::vector<uint64_t> scalars;
  for (int r = 0; r < comm.nranks; r++) {
    inputs.push_back(input(r));
    scalars.push_back(comm.segment->slot(r).record(place).scalar);
  }
  const Record& mine = comm.segment->slot(comm.rank).record(place);
  reduce({mine.dtype, mine.op, comm.nranks, inputs.data(), int(outputs.size()), outputs.data(), count, scalars.data(),
          whole >= nontemporal_min_bytes});
}

}  // namespace ncclpy::host
