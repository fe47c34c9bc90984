// One-sided operations: a rank writes into a peer's window and notifies the peer by a signal.
#pragma once

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

// Waits for the signals of operations[0], a wait_signal, or for an abort or a revoke. Meanwhile the report of
// stragglers also names the ranks that owe signals to the later operations.
void wait_for_signal(Comm& comm, const Operation* operations, size_t count);

// Copies the data, if any. Returns false if the peer has deregistered its part or was aborted: then no signal may be
// given.
bool run_put(Comm& comm, const Operation& operation);
// Signals the peer. After run_put() the signal means that the data have arrived.
void give_signal(Comm& comm, const Operation& operation);

// Runs the waits among the operations: returns when each peer has given as many signals as were waited for in total.
// If the communicator stops before, returns after an abort or a revoke. Before each wait `publish_call` is called with
// the wait's call word (call_kind.hpp).
template <class PublishCall>
void wait_for_signals(Comm& comm, const Operation* operations, size_t count, PublishCall publish_call) {
  for (size_t i = 0; i < count; i++) {
    if (operations[i].kind != Operation::wait_signal) continue;
    publish_call(operations[i].call);
    wait_for_signal(comm, operations + i, count - i);
  }
}

}  // namespace ncclpy::host
