// What operations and registrations of a communicator claim, see driver/memory_use.hpp.
#pragma once

#include <memory>
#include <vector>

#include "comm/comm.hpp"
#include "comm/operation.hpp"
#include "driver/memory_use.hpp"

namespace ncclpy::host {

// What the operations of one launch read and write.
struct LaunchMemoryUse {
  std::shared_ptr<const MemoryUse> memory;                // until the launch has run
  std::vector<std::shared_ptr<const MemoryUse>> targets;  // of puts, by operation: until the peer is told, who may free it
};

std::shared_ptr<LaunchMemoryUse> memory_use_of(const std::shared_ptr<Comm>& comm, const Operation* operations, size_t count);

// nullptr without checks.
inline std::shared_ptr<LaunchMemoryUse> find_memory_use(const std::shared_ptr<Comm>& comm, const Operation* operations, size_t count) {
  return checks ? memory_use_of(comm, operations, count) : nullptr;
}

// Of memory that is registered, for as long as the communicator is there; `what` is a function's name.
std::shared_ptr<const MemoryUse> registered_memory_use(const Comm& comm, const void* memory, size_t bytes, const char* what);

}  // namespace ncclpy::host
