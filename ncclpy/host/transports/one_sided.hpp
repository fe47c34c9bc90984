// One-sided operations: a rank writes into another one's window and tells it by a signal.
#pragma once

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

// Waits for the first operation's signals; those that have not come to the others behind it are told of as well.
void wait_for_signal(Comm& comm, const Operation* operations, size_t count);

// Copies, if there is anything to copy. False if the peer's part is not there any more: then it is told nothing.
bool run_put(Comm& comm, const Operation& operation);
// Tells the peer, of a put that its data are there.
void give_signal(Comm& comm, const Operation& operation);

// The waits among operations: returns when each peer has given that many signals more than were waited for before, or when
// the communicator stops. `tell` is told of each wait's deed.
template <class Tell>
void wait_for_signals(Comm& comm, const Operation* operations, size_t count, Tell tell) {
  for (size_t i = 0; i < count; i++) {
    if (operations[i].kind != Operation::wait_signal) continue;
    tell(operations[i].call);
    wait_for_signal(comm, operations + i, count - i);
  }
}

}  // namespace ncclpy::host
