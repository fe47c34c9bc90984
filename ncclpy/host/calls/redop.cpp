// PreMulSum: operators that multiply each rank's input by the rank's scalar before the sum.
#include <cstring>

#include "call.hpp"
#include "launch/group.hpp"

namespace ncclpy::host {
namespace {

// Operators of different communicators have different values, so that they cannot be mixed up.
std::atomic<int> next_operator{ncclNumOps};

ncclResult_t create(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype, ncclScalarResidence_t residence,
                    ncclComm_t handle) {
  const char* const function = "ncclRedOpCreatePreMulSum";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  NCCLPY_TRY(comm->health.ensure_ready());
  NCCLPY_TRY(check_pointer(op, function, "op"));
  NCCLPY_TRY(check_pointer(scalar, function, "scalar"));
  if (size_of(dtype) == 0) return fail(ncclInvalidArgument, "%s : invalid type %d", function, dtype);
  if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate)
    return fail(ncclInvalidArgument, "%s : invalid residence %d", function, residence);
  UserOperator made = {dtype, 0, nullptr};
  if (residence == ncclScalarHostImmediate) std::memcpy(&made.scalar, scalar, size_of(dtype));
  else made.memory = scalar;
  const int value = next_operator.fetch_add(1);
  std::lock_guard lock(comm->mutex);
  comm->operators[value] = made;
  *op = ncclRedOp_t(value);
  return ncclSuccess;
}

ncclResult_t destroy(ncclRedOp_t op, ncclComm_t handle) {
  if (0 <= int(op) && int(op) < int(ncclNumOps))
    return fail(ncclInvalidArgument, "ncclRedOpDestroy : operator is a NCCL builtin.");
  if (int(op) < 0) return fail(ncclInvalidArgument, "ncclRedOpDestroy :  operator is garbage.");
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, "ncclRedOpDestroy", &comm));
  std::lock_guard lock(comm->mutex);
  if (comm->operators.erase(int(op)) == 0)
    return fail(ncclInvalidArgument, "ncclRedOpDestroy : operator %d unknown to this communicator.", op);
  return ncclSuccess;
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  return guarded("ncclRedOpCreatePreMulSum", [&] { return create(op, scalar, dtype, residence, comm); });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return guarded("ncclRedOpDestroy", [&] { return destroy(op, comm); });
}
