// Joining a communicator, which initialisation, split, shrink and grow share.
#pragma once

#include "comm/comm.hpp"

namespace ncclpy::host {

// Joins the communicator of `id` and fills in `comm`; returns when all ranks have joined.
ncclResult_t join_communicator(const std::shared_ptr<Comm>& comm, int nranks, int rank, const ncclUniqueId& id);

// As in NCCL, the communicators of one process end together: destroying the last one waits for the work that was
// issued on any of them, so that one thread can destroy its ranks one after the other.
void depart(const std::shared_ptr<Comm>& comm, bool wait);

// After a failed blocking call no communicator is left; a nonblocking one keeps its handle, for its async error.
void drop_handle(const std::shared_ptr<Comm>& comm, ncclComm_t* newcomm);

}  // namespace ncclpy::host
