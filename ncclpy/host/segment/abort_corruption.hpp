// What an abort does to the other ranks, with NCCLPY_HOST_ABORT_CORRUPTS=1. A kernel of NCCL that sees its abort flag breaks
// off its wait and stores to the next rank all the same, with a valid flag (prims_ll.h, readLL). So the next rank's kernel
// completes, with wrong data and no error, and so does the kernel behind that, up to the rank that never called.
//
// Here, as in a ring, the next rank of rank r is r + 1. Which collectives a rank has broken off follows from
// RankSlot::passed, the last one that it has completed, and RankSlot::broken_off, how many behind that it has not.
#pragma once

#include "segment.hpp"

namespace ncclpy::host {

extern const bool abort_corrupts;

// Counts collectives of a rank that end without the others' data, for the next rank.
void count_abandoned(Segment& segment, int rank, uint64_t collectives);
// Whether the collective `number` of this rank completes without the previous rank's data.
bool is_corrupted(Segment& segment, int rank, uint64_t number);
// Takes one message that the peer has broken off, if there is one: it is over on this side as well.
bool take_abandoned_message(std::atomic<uint32_t>& abandoned);
// What is received instead of data.
void overwrite_with_garbage(void* memory, size_t bytes);

}  // namespace ncclpy::host
