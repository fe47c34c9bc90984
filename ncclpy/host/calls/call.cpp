// Handles and faults.
#include "call.hpp"

#include "faults/fault.hpp"

namespace ncclpy::host {

ncclResult_t find_comm(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm) {
  NCCLPY_TRY(look_up(handle, function, comm));
  return fault_at_call(comm->get(), (*comm)->rank, function);
}

}  // namespace ncclpy::host
