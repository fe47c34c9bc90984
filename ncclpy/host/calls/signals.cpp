// NCCL's one-sided calls: put and signal, signal, and wait.
#include <vector>

#include "call.hpp"
#include "launch/group.hpp"
#include "window.hpp"

namespace ncclpy::host {
namespace {

// Finds the counter of a context and a signal index.
ncclResult_t find_counter(const Comm& comm, const char* function, int index, int context, int* counter) {
  const int contexts = comm.config.numRmaCtx, indices = comm.config.numRmaSig;
  if (context < 0 || context >= contexts)
    return fail(ncclInvalidArgument, "%s : context %d is invalid (numRmaCtx is %d)", function, context, contexts);
  if (index < 0 || index >= indices)
    return fail(ncclInvalidArgument, "%s : signal index %d is invalid (numRmaSig is %d)", function, index, indices);
  *counter = context * indices + index;
  if (*counter < signal_counters) return ncclSuccess;
  return fail(ncclInvalidArgument, "%s : the host engine has %d signals in all from a rank to another", function,
              signal_counters);
}

ncclResult_t check_peer(const Comm& comm, const char* function, int peer) {
  if (peer >= 0 && peer < comm.nranks) return ncclSuccess;
  return fail(ncclInvalidArgument, "%s : invalid peer %d (peer should be in the 0..%d range)", function, peer,
              comm.nranks - 1);
}

ncclResult_t begin(const char* function, ncclComm_t handle, std::shared_ptr<Comm>* comm) {
  NCCLPY_TRY(find_comm(handle, function, comm));
  return (*comm)->health.ensure_open(function);
}

ncclResult_t put(const void* source, size_t count, ncclDataType_t dtype, int peer, ncclWindow_t handle, size_t offset,
                 int index, int context, unsigned flags, ncclComm_t comm_handle, cudaStream_t stream) {
  const char* const function = "ncclPutSignal";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(begin(function, comm_handle, &comm));
  NCCLPY_TRY(check_peer(*comm, function, peer));
  if (size_of(dtype) == 0) return fail(ncclInvalidArgument, "%s : invalid type %d", function, dtype);
  Operation operation = {};
  operation.kind = Operation::put;
  operation.stream = stream;
  NCCLPY_TRY(find_counter(*comm, function, index, context, &operation.counter));
  if (flags != 0) return fail(ncclInvalidArgument, "%s : flags %u is invalid (must be 0)", function, flags);
  std::shared_ptr<Window> window;
  NCCLPY_TRY(find_window(*comm, handle, function, &window));
  NCCLPY_TRY(check_pointer(source, function, "localbuff"));
  const Window::Part& target = window->parts[size_t(peer)];
  if (offset > target.bytes || count > (target.bytes - offset) / size_of(dtype)) {
    return fail(ncclInvalidArgument, "%s : %zu elements of %zu bytes at offset %zu reach beyond the %zu bytes of rank %d",
                function, count, size_of(dtype), offset, target.bytes, peer);
  }
  if (!in_symmetric_window(*comm, source, count * size_of(dtype)))
    return fail(ncclInvalidArgument, "%s : localbuff %p is not in a symmetric window", function, source);
  operation.dtype = dtype;
  operation.root = peer;
  operation.count = count;
  operation.sendbuff = source;
  operation.recvbuff = target.base + offset;
  operation.gate = std::shared_ptr<PutGate>(window, target.gate.get());
  return submit(comm, operation);
}

ncclResult_t signal(int peer, int index, int context, unsigned flags, ncclComm_t handle, cudaStream_t stream) {
  const char* const function = "ncclSignal";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(begin(function, handle, &comm));
  NCCLPY_TRY(check_peer(*comm, function, peer));
  Operation operation = {};
  operation.kind = Operation::signal;
  operation.stream = stream;
  operation.root = peer;
  NCCLPY_TRY(find_counter(*comm, function, index, context, &operation.counter));
  if (flags != 0) return fail(ncclInvalidArgument, "%s : flags %u is invalid (must be 0)", function, flags);
  return submit(comm, operation);
}

ncclResult_t wait(int number, const ncclWaitSignalDesc_t* wanted, ncclComm_t handle, cudaStream_t stream) {
  const char* const function = "ncclWaitSignal";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(begin(function, handle, &comm));
  if (number <= 0 || wanted == nullptr)
    return fail(ncclInvalidArgument, "%s : %d descriptors at %p, expected one or more", function, number,
                static_cast<const void*>(wanted));
  std::vector<Operation> operations;
  for (int i = 0; i < number; i++) {
    if (wanted[i].opCnt <= 0)
      return fail(ncclInvalidArgument, "%s : descriptor %d has invalid opCnt %d", function, i, wanted[i].opCnt);
    NCCLPY_TRY(check_peer(*comm, function, wanted[i].peer));
    Operation operation = {};
    operation.kind = Operation::wait_signal;
    operation.stream = stream;
    operation.root = wanted[i].peer;
    operation.count = size_t(wanted[i].opCnt);
    NCCLPY_TRY(find_counter(*comm, function, wanted[i].sigIdx, wanted[i].ctx, &operation.counter));
    operations.push_back(operation);
  }
  // One launch for all descriptors.
  group_start();
  for (const Operation& operation : operations) note_group_error(submit(comm, operation));
  return group_end();
}

// As for collectives, a nonblocking communicator returns its state.
template <class Body>
ncclResult_t call(const char* function, ncclComm_t handle, Body body) {
  return guarded(function, [&] {
    const ncclResult_t result = note_group_error(body());
    std::shared_ptr<Comm> comm;
    if (result != ncclSuccess || look_up(handle, function, &comm) != ncclSuccess || comm->blocking()) return result;
    return comm->health.async();
  });
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclPutSignal(const void* source, size_t count, ncclDataType_t dtype, int peer, ncclWindow_t window,
                           size_t offset, int index, int context, unsigned int flags, ncclComm_t comm,
                           cudaStream_t stream) {
  return call("ncclPutSignal", comm, [&] {
    return put(source, count, dtype, peer, window, offset, index, context, flags, comm, stream);
  });
}

ncclResult_t ncclSignal(int peer, int index, int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclSignal", comm, [&] { return signal(peer, index, context, flags, comm, stream); });
}

ncclResult_t ncclWaitSignal(int number, ncclWaitSignalDesc_t* wanted, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclWaitSignal", comm, [&] { return wait(number, wanted, comm, stream); });
}
