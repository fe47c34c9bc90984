// Launches: operations of one communicator that are put on streams together and run in the communicator's order.
#pragma once

#include <memory>
#include <vector>

#include "comm/comm.hpp"
#include "comm/operation.hpp"

namespace ncclpy::host {

// Puts the operations on their streams as one launch, or, while a stream is captured, adds them to its graph. Does not
// block.
ncclResult_t issue(const std::shared_ptr<Comm>& comm, std::vector<Operation> operations);
ncclResult_t issue(const std::shared_ptr<Comm>& comm, const Operation& operation);

}  // namespace ncclpy::host
