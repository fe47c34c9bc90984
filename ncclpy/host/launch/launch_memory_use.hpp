// The memory that operations and registrations of a communicator use, see driver/memory_use.hpp.
#pragma once

#include <memory>
#include <vector>

#include "comm/comm.hpp"
#include "comm/operation.hpp"
#include "driver/memory_use.hpp"

namespace ncclpy::host {

// The memory that the operations of one launch read and write.
struct LaunchMemoryUse {
  std::shared_ptr<const MemoryUse> memory;  // until the launch has run
  // of puts, by operation: until the peer gets its signal and may free the memory
  std::vector<std::shared_ptr<const MemoryUse>> targets;
};

std::shared_ptr<LaunchMemoryUse> memory_use_of(const std::shared_ptr<Comm>& comm, const Operation* operations,
                                               size_t count);

// nullptr without NCCLPY_HOST_CHECKS=1.
inline std::shared_ptr<LaunchMemoryUse> find_memory_use(const std::shared_ptr<Comm>& comm, const Operation* operations,
                                                        size_t count) {
  return checks ? memory_use_of(comm, operations, count) : nullptr;
}

// The use of registered memory: until the object is destroyed, at the deregistration or the end of the communicator,
// or the communicator is aborted. `what` is the name of the registering function.
std::shared_ptr<const MemoryUse> registered_memory_use(const Comm& comm, const void* memory, size_t bytes,
                                                       const char* what);

}  // namespace ncclpy::host
