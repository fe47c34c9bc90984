// ncclCollConfig_t: the configuration of one collective call.
#pragma once

#include "base/errors.hpp"

namespace ncclpy::host {

// Checks `given` (NULL: all defaults) against the communicator's configuration and extracts what has an effect on the
// host: the event. CTAs and clusters concern GPUs, and the algorithm that a call selects is not used here.
ncclResult_t parse_coll_config(const ncclCollConfig_t* given, const ncclConfig_t& comm, cudaEvent_t* launch_event);

}  // namespace ncclpy::host
