// One-sided operations: a rank writes into a peer's window and notifies the peer by a signal.
#pragma once

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

// Waits for the first operation's signals. Reports as awaited also the ranks of later operations that lack
// signals.
void wait_for_signal(Comm& comm, const Operation* operations, size_t count);

// Copies the data, if any. Returns false if the peer has deregistered its part: then no signal may be given.
bool run_put(Comm& comm, const Operation& operation);
// Signals the peer; after a put, that its data have arrived.
void give_signal(Comm& comm, const Operation& operation);

// Runs the waits among the operations: returns when each peer has given as many signals as were waited for in total,
// or when the communicator stops. `tell` is called with the call word of each wait.
template <class Tell>
void wait_for_signals(Comm& comm, const Operation* operations, size_t count, Tell tell) {
  for (size_t i = 0; i < count; i++) {
    if (operations[i].kind != Operation::wait_signal) continue;
    tell(operations[i].call);
    wait_for_signal(comm, operations + i, count - i);
  }
}

}  // namespace ncclpy::host
