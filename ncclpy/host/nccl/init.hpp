// What all ways to a communicator share: the ranks meet.
#pragma once

#include "comm.hpp"

namespace ncclpy::host {

// Takes part in making the communicator and fills `comm`; returns when all ranks are there.
ncclResult_t meet(const std::shared_ptr<Comm>& comm, int nranks, int rank, const ncclUniqueId& id);

// A failed blocking call leaves no communicator behind; a nonblocking one keeps the handle, for its async error.
void give_up(const std::shared_ptr<Comm>& comm, ncclComm_t* newcomm);

}  // namespace ncclpy::host
