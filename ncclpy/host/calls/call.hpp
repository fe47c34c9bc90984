// How a call on a communicator begins.
#pragma once

#include <memory>

#include "comm/comm.hpp"

namespace ncclpy::host {

// The communicator behind a handle, as look_up; then a fault plan may have its say.
ncclResult_t find_comm(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm);

}  // namespace ncclpy::host
