// ncclCollConfig_t: the configuration of one collective call.
#pragma once

#include "base/errors.hpp"

namespace ncclpy::host {

// Checks `given` (NULL is all defaults) against the communicator's configuration and takes out what has an effect on
// the host: the event. CTAs and clusters are a GPU's, and the one way in which data move here stands for any algorithm.
ncclResult_t parse_coll_config(const ncclCollConfig_t* given, const ncclConfig_t& comm, cudaEvent_t* launch_event);

}  // namespace ncclpy::host
