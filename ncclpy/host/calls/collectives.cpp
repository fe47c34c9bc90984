// The exported operations: their arguments are checked as NCCL checks them, then they join the thread's group.
#include <cstdint>

#include "call.hpp"
#include "coll_config.hpp"
#include "driver/memory_use.hpp"
#include "launch/group.hpp"

namespace ncclpy::host {
namespace {

struct Request {
  const char* name;
  Operation::Kind kind;
  Collective collective;
  const void* sendbuff;
  void* recvbuff;
  size_t count;
  ncclDataType_t dtype;
  ncclRedOp_t op;
  int root;
  const ncclCollConfig_t* config;
};

ncclResult_t check_values(const Request& request, Comm& comm) {
  if (request.root < 0 || request.root >= comm.nranks) {
    return fail(ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)", request.name,
                request.root, comm.nranks - 1);
  }
  if (size_of(request.dtype) == 0) return fail(ncclInvalidArgument, "%s : invalid type %d", request.name, request.dtype);
  // The largest buffer has a block for each rank.
  if (request.count > SIZE_MAX / size_of(request.dtype) / size_t(comm.nranks)) {
    return fail(ncclInvalidArgument, "%s : count %zu is more than memory can hold for the blocks of %d ranks",
                request.name, request.count, comm.nranks);
  }
  if (int(request.op) < 0)
    return fail(ncclInvalidArgument, "%s : invalid reduction operation %d", request.name, request.op);
  return ncclSuccess;
}

// Sets the operator. Its scalar, or the scalar's address, is copied now, since the operator may be destroyed before
// the group ends.
ncclResult_t resolve_operator(const Request& request, Comm& comm, Operation* operation) {
  if (request.op < ncclNumOps) {
    operation->op = Operator(request.op);
    return ncclSuccess;
  }
  std::lock_guard lock(comm.mutex);
  const auto found = comm.operators.find(int(request.op));
  if (found == comm.operators.end()) {
    return fail(ncclInvalidArgument, "%s : reduction operation %d unknown to this communicator", request.name,
                request.op);
  }
  if (found->second.dtype != request.dtype && request.count > 0) {
    return fail(ncclInvalidArgument,
                "Data type supplied to user-created ncclRedOp_t does not match type given to reduction operation");
  }
  operation->op = Operator::premulsum;
  operation->scalar = found->second.scalar;
  operation->scalar_memory = found->second.memory;
  return ncclSuccess;
}

// NULL is accepted where this rank reads or writes nothing; elsewhere it would crash the stream's thread.
ncclResult_t check_buffers(const char* name, const Operation& operation, int rank) {
  if (operation.sends(rank)) NCCLPY_TRY(check_pointer(operation.sendbuff, name, "sendbuff"));
  if (operation.receives(rank)) NCCLPY_TRY(check_pointer(operation.recvbuff, name, "recvbuff"));
  return ncclSuccess;
}

// NCCL accepts any two buffers, and gives wrong data if they overlap in another way than the collective's in-place
// layout.
ncclResult_t check_layout(const char* name, const Operation& operation, const Comm& comm) {
  if (operation.kind != Operation::collective || !operation.sends(comm.rank) || !operation.receives(comm.rank))
    return ncclSuccess;
  const Collective kind = operation.collective_kind;
  const bool sends_all =
      kind == Collective::all_to_all || kind == Collective::reduce_scatter || kind == Collective::scatter;
  const bool receives_all =
      kind == Collective::all_to_all || kind == Collective::all_gather || kind == Collective::gather;
  const size_t part = operation.count * size_of(operation.dtype), own = size_t(comm.rank) * part;
  const Range sent = {operation.sendbuff, sends_all ? part * size_t(comm.nranks) : part};
  const Range received = {operation.recvbuff, receives_all ? part * size_t(comm.nranks) : part};
  if (!sent.overlaps(received.base, received.bytes)) return ncclSuccess;
  const auto begin = [own](const Range& range, bool all) {
    return reinterpret_cast<uintptr_t>(range.base) + (all ? own : 0);
  };
  if (kind != Collective::all_to_all && begin(sent, sends_all) == begin(received, receives_all)) return ncclSuccess;
  return fail(ncclInvalidArgument, "%s : sendbuff (%s) and recvbuff (%s) overlap %s", name, sent.text().c_str(),
              received.text().c_str(),
              kind == Collective::all_to_all ? "and it cannot work in place" : "otherwise than in place");
}

ncclResult_t enqueue(const Request& request, const std::shared_ptr<Comm>& shared, cudaStream_t stream) {
  Comm& comm = *shared;
  NCCLPY_TRY(comm.health.ensure_open(request.name));
  NCCLPY_TRY(check_values(request, comm));
  Operation operation = {};
  operation.kind = request.kind;
  operation.collective_kind = request.collective;
  operation.dtype = request.dtype;
  operation.root = request.root;
  operation.count = request.count;
  operation.sendbuff = request.sendbuff;
  operation.recvbuff = request.recvbuff;
  operation.stream = stream;
  NCCLPY_TRY(resolve_operator(request, comm, &operation));
  NCCLPY_TRY(parse_coll_config(request.config, comm.config, &operation.launch_event));
  if (request.count == 0 && request.kind == Operation::collective) return ncclSuccess;
  if (request.count != 0) NCCLPY_TRY(check_buffers(request.name, operation, comm.rank));
  if (request.count != 0 && checks) NCCLPY_TRY(check_layout(request.name, operation, comm));
  return submit(shared, operation);
}

ncclResult_t call(const Request& request, ncclComm_t handle, cudaStream_t stream) {
  return guarded(request.name, [&] {
    std::shared_ptr<Comm> comm;
    const ncclResult_t found = find_comm(handle, request.name, &comm);
    if (found != ncclSuccess) return note_group_error(found);
    ncclResult_t result = enqueue(request, comm, stream);
    if (result != ncclSuccess && result != ncclInProgress && !comm->blocking())
      comm->health.set_async(result, last_error());
    note_group_error(result);
    if (comm->blocking()) return result;
    const ncclResult_t now = comm->health.async();
    if (now != ncclSuccess && now != ncclInProgress) set_last_error(comm->health.async_text());
    return now;
  });
}

Request collective(const char* name, Collective kind, const void* send, void* recv, size_t count, ncclDataType_t dtype,
                   ncclRedOp_t op, int root, const ncclCollConfig_t* config) {
  return {name, Operation::collective, kind, send, recv, count, dtype, op, root, config};
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclAllReduceConfig(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                 ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return call(collective("AllReduce", Collective::all_reduce, send, recv, count, dtype, op, 0, config), comm, stream);
}

ncclResult_t ncclReduceConfig(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                              int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return call(collective("Reduce", Collective::reduce, send, recv, count, dtype, op, root, config), comm, stream);
}

ncclResult_t ncclBroadcastConfig(const void* send, void* recv, size_t count, ncclDataType_t dtype, int root,
                                 ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return call(collective("Broadcast", Collective::broadcast, send, recv, count, dtype, ncclSum, root, config), comm,
              stream);
}

ncclResult_t ncclAllGatherConfig(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                                 cudaStream_t stream, const ncclCollConfig_t* config) {
  return call(collective("AllGather", Collective::all_gather, send, recv, count, dtype, ncclSum, 0, config), comm,
              stream);
}

ncclResult_t ncclReduceScatterConfig(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                     ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return call(collective("ReduceScatter", Collective::reduce_scatter, send, recv, count, dtype, op, 0, config), comm,
              stream);
}

ncclResult_t ncclAlltoAllConfig(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                                cudaStream_t stream, const ncclCollConfig_t* config) {
  return call(collective("AlltoAll", Collective::all_to_all, send, recv, count, dtype, ncclSum, 0, config), comm,
              stream);
}

ncclResult_t ncclGatherConfig(const void* send, void* recv, size_t count, ncclDataType_t dtype, int root,
                              ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return call(collective("Gather", Collective::gather, send, recv, count, dtype, ncclSum, root, config), comm, stream);
}

ncclResult_t ncclScatterConfig(const void* send, void* recv, size_t count, ncclDataType_t dtype, int root,
                               ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return call(collective("Scatter", Collective::scatter, send, recv, count, dtype, ncclSum, root, config), comm,
              stream);
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return ncclAllReduceConfig(send, recv, count, dtype, op, comm, stream, nullptr);
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return ncclReduceConfig(send, recv, count, dtype, op, root, comm, stream, nullptr);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return ncclBroadcastConfig(send, recv, count, dtype, root, comm, stream, nullptr);
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcastConfig(buffer, buffer, count, dtype, root, comm, stream, nullptr);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream) {
  return ncclAllGatherConfig(send, recv, count, dtype, comm, stream, nullptr);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return ncclReduceScatterConfig(send, recv, count, dtype, op, comm, stream, nullptr);
}

ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                          cudaStream_t stream) {
  return ncclAlltoAllConfig(send, recv, count, dtype, comm, stream, nullptr);
}

ncclResult_t ncclGather(const void* send, void* recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return ncclGatherConfig(send, recv, count, dtype, root, comm, stream, nullptr);
}

ncclResult_t ncclScatter(const void* send, void* recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  return ncclScatterConfig(send, recv, count, dtype, root, comm, stream, nullptr);
}

ncclResult_t ncclSend(const void* buffer, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call({"Send", Operation::send, {}, buffer, nullptr, count, dtype, ncclSum, peer, nullptr}, comm, stream);
}

ncclResult_t ncclRecv(void* buffer, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call({"Recv", Operation::recv, {}, nullptr, buffer, count, dtype, ncclSum, peer, nullptr}, comm, stream);
}
