// Operations that this rank ends, or does not begin, because its communicator was aborted or revoked: the peers' parts
// of them may complete (abort_corruption.hpp). The functions do nothing if the communicator stopped for another
// reason.
#pragma once

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

// Waits until the communicator has ended: a stream hangs at an operation that waits for a dead rank until an abort.
// Returns false if the thread must leave the wait.
bool hang_until_ended(Comm& comm);
void abandon_operations(Comm& comm, const Operation* operations, size_t count);
void abandon_messages(Comm& comm, int peer, bool sends, size_t count);

}  // namespace ncclpy::host
