// One-sided operations: a rank writes into another one's window and tells it by a signal.
#pragma once

#include "comm.hpp"
#include "operation.hpp"

namespace ncclpy::host {

// Copies, if there is anything to copy.
void run_put(const Operation& operation);
// Tells the peer, of a put that its data are there.
void give_signal(Comm& comm, const Operation& operation);

// Returns when the peer has given that many signals more than were waited for before, or when the communicator stops.
void wait_for_signals(Comm& comm, const Operation& operation);

}  // namespace ncclpy::host
