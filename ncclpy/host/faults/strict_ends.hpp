// Ends communicators as strictly as NCCL, with NCCLPY_HOST_STRICT_ENDS=1: for testing programs, and ncclpy, that will
// run on NCCL. Where NCCL would use freed memory, or have a peer do so, the process is aborted with a message.
#pragma once

#include "comm/comm.hpp"

namespace ncclpy::host {

extern const bool strict_ends;

// Called when a rank that is the only one of its communicator in this process is destroyed or aborted. If a process
// has several ranks, NCCL frees resources with the last one; that case is not checked.
void check_destroy(Comm& comm);
// Called when a registration of the communicator is removed.
void check_deregister(const Comm& comm);

}  // namespace ncclpy::host
