// Operations that this rank ends, or does not begin, since its communicator was aborted or revoked: the other ranks' parts
// of them may complete (abort_corruption.hpp). These functions do nothing where it stops for another reason.
#pragma once

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

// Waits until the communicator has an end: a stream does not go on behind an operation that waits for a rank that has
// died, before an abort. False if the thread has left that.
bool hang_until_ended(Comm& comm);
void abandon_operations(Comm& comm, const Operation* operations, size_t count);
void abandon_messages(Comm& comm, int peer, bool sends, size_t count);

}  // namespace ncclpy::host
