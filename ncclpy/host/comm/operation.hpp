// One operation of a caller, checked and ready to run on a stream.
#pragma once

#include <cstdint>
#include <memory>

#include "put_gate.hpp"
#include "segment/segment.hpp"

namespace ncclpy::host {

struct Operation {
  enum Kind : uint32_t { collective, send, recv, put, signal, wait_signal };
  Kind kind;
  bool message() const { return kind == send || kind == recv; }
  // Whether this rank reads `sendbuff`, and whether it writes `recvbuff`. Not for signal and wait_signal, which have
  // no buffers. The recvbuff of put is the peer's memory.
  bool sends(int rank) const {
    if (kind != collective) return kind != recv;
    return (collective_kind != Collective::broadcast && collective_kind != Collective::scatter) || rank == root;
  }
  bool receives(int rank) const {
    if (kind != collective) return kind == recv;
    return (collective_kind != Collective::reduce && collective_kind != Collective::gather) || rank == root;
  }
  Collective collective_kind;
  ncclDataType_t dtype;
  Operator op;
  int root;      // or the peer
  size_t count;  // elements; of wait_signal: signals
  const void* sendbuff;
  void* recvbuff;
  uint64_t scalar;                // of PreMulSum
  const void* scalar_memory;      // read when the operation runs, if not NULL
  int counter;                    // of one-sided calls: the signal
  uint64_t call;                  // the call's word, see call_kind.hpp
  std::shared_ptr<PutGate> gate;  // of put: guards the peer's part; keeps the window alive
  cudaEvent_t launch_event;       // recorded on `stream` just before the operation, if not NULL
  cudaStream_t stream;            // as the caller gave it; a default stream means the one of the communicator's device
};

}  // namespace ncclpy::host
