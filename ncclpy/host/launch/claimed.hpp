// What operations and registrations of a communicator claim, see driver/claims.hpp.
#pragma once

#include <memory>
#include <vector>

#include "comm/comm.hpp"
#include "comm/operation.hpp"
#include "driver/claims.hpp"

namespace ncclpy::host {

// What the operations of one launch read and write.
struct Claims {
  std::shared_ptr<const Claim> memory;                // until the launch has run
  std::vector<std::shared_ptr<const Claim>> targets;  // of puts, by operation: until the peer is told, who may free it
};

std::shared_ptr<Claims> claims_of(const std::shared_ptr<Comm>& comm, const Operation* operations, size_t count);

// nullptr without checks.
inline std::shared_ptr<Claims> claim(const std::shared_ptr<Comm>& comm, const Operation* operations, size_t count) {
  return checks ? claims_of(comm, operations, count) : nullptr;
}

// Of memory that is registered, for as long as the communicator is there; `what` is a function's name.
std::shared_ptr<const Claim> claim_registered(const Comm& comm, const void* memory, size_t bytes, const char* what);

}  // namespace ncclpy::host
