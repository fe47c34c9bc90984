// The effect of an abort on the other ranks, simulated with NCCLPY_HOST_ABORT_CORRUPTS=1. A kernel of NCCL that sees
// its abort flag stops waiting but still stores to the next rank, with a valid flag (prims_ll.h, readLL). So the next
// rank's kernel completes with wrong data and no error, as do the kernels of the ranks after it, up to the rank that
// never made the call.
//
// Here, as in a ring, the next rank after rank r is r + 1. The collectives that a rank has abandoned follow from
// RankSlot::passed, the last one that it has completed, and RankSlot::abandoned, the number of later ones that it has
// called and will not complete.
#pragma once

#include "segment.hpp"

namespace ncclpy::host {

extern const bool abort_corrupts;

// Counts collectives that `rank` ends without the other ranks' data. The next rank reads the count.
void count_abandoned(Segment& segment, int rank, uint64_t collectives);
// Whether the collective `number` of this rank completes without the previous rank's data. False unless
// abort_corrupts.
bool is_corrupted(Segment& segment, int rank, uint64_t number);
// Subtracts one from the peer's count of abandoned messages and returns true: this rank's part of the message then
// ends as well. Returns false if the count is 0, and unless abort_corrupts.
bool take_abandoned_message(std::atomic<uint32_t>& abandoned);
// Fills memory with the bytes that a corrupted operation delivers instead of data.
void overwrite_with_garbage(void* memory, size_t bytes);

}  // namespace ncclpy::host
