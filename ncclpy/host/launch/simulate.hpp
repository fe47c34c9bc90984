// The estimated duration of a group, for ncclGroupSimulateEnd.
#pragma once

#include <vector>

#include "comm/operation.hpp"

namespace ncclpy::host {

// Microseconds that one communicator's operations of a group would take. A simple model for comparing groups: 3 us for
// a launch, 1 us for each operation and each rank in it, and the operation's traffic (nccl-tests' bus bandwidth
// formulas) at 4 GB/s.
double estimate(const std::vector<Operation>& operations, int nranks);

// The caller's struct may be that of another release. check_sim_info returns an error if it was not initialised;
// set_estimated_time writes the duration, if the struct has the field.
ncclResult_t check_sim_info(const ncclSimInfo_t* info);
void set_estimated_time(ncclSimInfo_t* info, double microseconds);

}  // namespace ncclpy::host
