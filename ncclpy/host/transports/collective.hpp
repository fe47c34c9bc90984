// The ways in which the data of a collective move. Whichever it is, all ranks have come and agree on the operation, unless this
// one needs nothing of them.
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

// With more in a launch, counting each rank's larger buffers, the time in which nobody can leave counts for more than a thread
// that comes for it.
constexpr size_t interruptible_max_bytes = 1 << 20;

inline bool reduces(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce || kind == Collective::reduce_scatter;
}

// Blocks of `count` elements in a buffer of who sends, and of who receives.
inline size_t blocks_sent(Collective kind, int nranks) {
  const bool many = kind == Collective::reduce_scatter || kind == Collective::all_to_all || kind == Collective::scatter;
  return many ? size_t(nranks) : 1;
}
inline size_t blocks_received(Collective kind, int nranks) {
  const bool many = kind == Collective::all_gather || kind == Collective::all_to_all || kind == Collective::gather;
  return many ? size_t(nranks) : 1;
}

// Whether what a rank receives is so much that nobody finds it in a cache.
inline bool uses_nontemporal(const Record& record, int nranks) {
  return record.count * size_of(record.dtype) * blocks_received(record.kind, nranks) >= nontemporal_min_bytes;
}

// How far a collective has come that a thread has left.
struct CollectiveProgress {
  bool arrived = false;  // all that is needed is there: mostly all ranks have come, and agree
  int place = 0;     // of the records
  size_t step = 0;   // steps over, as the way of its data counts them
  bool suspended = false;  // while its data moved
};

// Runs a collective, in whichever thread the stream has. False if that has left it: then it is to run again, from where
// `course` says.
bool run_collective(Comm& comm, const Operation& operation, CollectiveProgress& progress);
// Whether who is to leave it soon may run it, as it needs no more than so many bytes, which are taken off. What lies between two
// gates, or a message that is being copied, is not left.
bool fits_interruptible(const Comm& comm, const Operation& operation, size_t* bytes);

// Gives `bytes` to every rank and collects everyone's, in rank order. At most exchange_bytes; blocks.
ncclResult_t exchange(Comm& comm, const void* mine, size_t bytes, void* all);
// Whether a rank finds, or has found, that they have not agreed on one from which it went on: others do not come to anything then.
// The stream tasks' own.
bool finds_disagreement(Comm& comm);
// Waits until the others have read what this rank has left for them in the segment. Ended if they do not agree on it.
WaitResult await_all_passed(Comm& comm);

// Contributions so small that every rank leaves its own in the segment with its description: no second rendezvous. The bytes of
// a rank's own.
bool is_inline(Collective kind, ncclDataType_t dtype, size_t count, int nranks);
size_t inline_contribution_bytes(const Comm& comm, const Operation& operation);
void write_inline(Comm& comm, const Record& record, int place, size_t bytes);
void prefetch_inline(Comm& comm, int place, size_t bytes);
void run_inline(Comm& comm, int place);

// All ranks are threads of one process: everyone reads and writes the others' buffers.
void run_in_process(Comm& comm, int place);

// Ranks are spread over processes: the data pass through the segment in steps.
WaitResult run_shm_staged(Comm& comm, CollectiveProgress& progress);

// As that, of large blocks, and where each rank may read the memory of all others: one copy instead of two. Whether this
// rank wants it, if it decides for all; whether it is so; and what it took, for who has decided.
bool wants_cma(Comm& comm, const Record& record);
bool uses_cma(Comm& comm, int place);
void record_duration(Comm& comm, int place, bool cma, double seconds);
WaitResult run_cma_read(Comm& comm, CollectiveProgress& progress);

// The bytes of so many that rank `r` reduces: whole cache lines, so also whole elements.
inline std::pair<size_t, size_t> part_of(size_t bytes, int r, int nranks) {
  const size_t lines = size_t(nranks) * 64, each = (bytes + lines - 1) / lines * 64;
  return {std::min(bytes, size_t(r) * each), std::min(bytes, size_t(r + 1) * each)};
}

// Reduces one piece of everybody's input, in rank order. `input(r)` is rank r's piece; `whole` are the bytes of a result of which
// the outputs are a part, 0 if somebody is to find it in a cache.
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
