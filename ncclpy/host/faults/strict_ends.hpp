// The end of communicators as NCCL's is, with NCCLPY_HOST_STRICT_ENDS=1: for programs, and for ncclpy, that are to run there.
// Where NCCL uses what it has freed, or has a peer do so, the process ends with a word why.
#pragma once

#include "comm/comm.hpp"

namespace ncclpy::host {

extern const bool strict_ends;

// It is destroyed or aborted, and its communicator's only rank in this process. Several are freed with the last of them,
// which is not looked at.
void check_destroy(Comm& comm);
// Something of it is deregistered.
void check_deregister(const Comm& comm);

}  // namespace ncclpy::host
