// NCCL's host functions as this library exports them. The prototypes come from the X-macro, so a definition with other
// parameters does not compile. A function that is declared here and not defined is not exported.
#pragma once

#include "nccl_abi.h"

extern "C" {
#define NCCLPY_DECLARE(version, ret, name, params) __attribute__((visibility("default"))) ret name params;
NCCLPY_NCCL_FUNCTIONS(NCCLPY_DECLARE)
#undef NCCLPY_DECLARE
}
