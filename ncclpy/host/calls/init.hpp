// Joining a communicator, which initialisation, split, shrink and grow share.
#pragma once

#include "comm/comm.hpp"

namespace ncclpy::host {

// Joins the communicator of `id` and fills in `comm`. Returns when all ranks have joined, or an error if the
// communicator ends or a rank dies before.
ncclResult_t join_communicator(const std::shared_ptr<Comm>& comm, int nranks, int rank, const ncclUniqueId& id);

// Called at the end of a communicator. As in NCCL, the communicators of one process end together: the last one that
// departs frees them all and, with `wait`, first waits for the work that was issued on any of them. So one thread can
// destroy its ranks one after the other.
void depart(const std::shared_ptr<Comm>& comm, bool wait);

// Removes the handle of a communicator that could not be made, and sets `*newcomm` to NULL. If the initialisation of a
// nonblocking communicator has begun and then fails, the handle stays: it is needed to read the async error.
void drop_handle(const std::shared_ptr<Comm>& comm, ncclComm_t* newcomm);

}  // namespace ncclpy::host
