// What all ways to a communicator share: the ranks meet.
#pragma once

#include "comm/comm.hpp"

namespace ncclpy::host {

// Takes part in making the communicator and fills `comm`; returns when all ranks are there.
ncclResult_t join_communicator(const std::shared_ptr<Comm>& comm, int nranks, int rank, const ncclUniqueId& id);

// As NCCL: the communicators of one process end together. Whoever destroys the last of them waits for the work that
// was issued on any of them, so that one thread can destroy its ranks one after the other.
void depart(const std::shared_ptr<Comm>& comm, bool wait);

// A failed blocking call leaves no communicator behind; a nonblocking one keeps the handle, for its async error.
void drop_handle(const std::shared_ptr<Comm>& comm, ncclComm_t* newcomm);

}  // namespace ncclpy::host
