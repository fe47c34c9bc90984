// How a call on a communicator begins.
#pragma once

#include <memory>

#include "comm/comm.hpp"

namespace ncclpy::host {

// Finds the communicator of a handle, as look_up does, then applies the fault plan.
ncclResult_t find_comm(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm);

}  // namespace ncclpy::host
