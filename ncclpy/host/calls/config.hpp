// ncclConfig_t: older and newer layouts, allowed values, defaults, and what the environment overrides.
#pragma once

#include <string>

#include "base/errors.hpp"

namespace ncclpy::host {

ncclConfig_t default_config();

// Checks a field that may be undefined; `kind` is the struct's name in NCCL's messages.
ncclResult_t check_range(const char* kind, const char* name, int value, int low, int high);

// Checks the caller's configuration and fills in the defaults. A smaller struct is an older one; of a larger one only
// the part known here is read. The strings belong to the caller: the communicator's name is copied to `name`, and
// netName and commName are returned as NULL.
ncclResult_t parse_config(const ncclConfig_t* given, ncclConfig_t* config, std::string* name);

}  // namespace ncclpy::host
