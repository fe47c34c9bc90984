// The ways in which the data of a collective move. Whichever it is, all ranks have arrived and agree on the operation.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "comm.hpp"
#include "operation.hpp"

namespace ncclpy::host {

// NCCL's name of an operation, without "nccl".
const char* name_of(const Operation& operation);

const char* type_name(ncclDataType_t dtype);

// Runs a collective, in whichever thread the stream has. False if that has left it: then it is to run again.
bool run_collective(Comm& comm, const Operation& operation);
// Whether it can be left, which is where run_collective takes it for small: once all ranks have come none waits again.
bool can_be_left(const Comm& comm, const Operation& operation);

// Contributions so small that every rank leaves its own in the segment before it arrives: no second rendezvous.
bool is_small(Collective kind, ncclDataType_t dtype, size_t count, int nranks);
void contribute_small(Comm& comm, const Record& record, int parity);
void run_small(Comm& comm, int parity);

// All ranks are threads of one process: everyone reads and writes the others' buffers.
void run_direct(Comm& comm, int parity);

// Ranks are spread over processes: the data pass through the segment in steps.
void run_staged(Comm& comm, int parity);

// As that, without reductions and where each rank may read the memory of all others: one copy instead of two.
bool is_pulled(Comm& comm, int parity);
void run_pulled(Comm& comm, int parity);
// Whether the environment lets a process read the others': NCCLPY_HOST_READ_PEERS, true unless 0.
bool may_read_peers();
// Whether this rank's process is able to read the others' as well, which need not be mutual.
bool can_read_peers(Segment& segment, int rank);

// The bytes of so many that rank `r` reduces: whole cache lines, so also whole elements.
inline std::pair<size_t, size_t> part_of(size_t bytes, int r, int nranks) {
  const size_t lines = size_t(nranks) * 64, each = (bytes + lines - 1) / lines * 64;
  return {std::min(bytes, size_t(r) * each), std::min(bytes, size_t(r + 1) * each)};
}

// Reduces one piece of everybody's input, in rank order. `input(r)` is rank r's piece.
template <class Input>
void reduce_pieces(Comm& comm, int parity, Input input, size_t count, std::vector<void*> outputs) {
  if (count == 0) return;
  std::vector<const void*> inputs;
  std::vector<uint64_t> scalars;
  for (int r = 0; r < comm.nranks; r++) {
    inputs.push_back(input(r));
    scalars.push_back(comm.segment->slot(r).record[parity].scalar);
  }
  const Record& mine = comm.segment->slot(comm.rank).record[parity];
  reduce({mine.dtype, mine.op, comm.nranks, inputs.data(), int(outputs.size()), outputs.data(), count, scalars.data()});
}

}  // namespace ncclpy::host
