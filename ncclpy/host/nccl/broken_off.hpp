// Operations that this rank ends, or does not begin, since its communicator was aborted or revoked: the other ranks' parts
// of them may complete (corruption.hpp). These functions do nothing where it stops for another reason.
#pragma once

#include "comm.hpp"
#include "operation.hpp"

namespace ncclpy::host {

void break_off(Comm& comm, const Operation* operations, size_t count);
void break_off_messages(Comm& comm, int peer, bool sends, size_t count);

}  // namespace ncclpy::host
