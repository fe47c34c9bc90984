// Operations that this rank ends, or does not begin, because its communicator was aborted or revoked: the peers' parts
// of them may complete (abort_corruption.hpp). The abandon functions do nothing without NCCLPY_HOST_ABORT_CORRUPTS=1,
// or if the communicator stopped for another reason.
#pragma once

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

// Waits for an abort or a revoke. A stream hangs here at an operation that cannot complete, because a rank is dead,
// the ranks do not agree or a fault was injected. Returns false if the thread's time limit passes first.
bool hang_until_released(Comm& comm);
// Records in the segment that this rank does not execute the collectives and messages among these operations.
void abandon_operations(Comm& comm, const Operation* operations, size_t count);
// Records in the segment that this rank does not send (`sends`) or receive `count` messages to or from `peer`.
void abandon_messages(Comm& comm, int peer, bool sends, size_t count);

}  // namespace ncclpy::host
