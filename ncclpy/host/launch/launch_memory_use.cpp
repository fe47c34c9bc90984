// The memory that operations read and write.
#include "launch_memory_use.hpp"

#include <string>

#include "transports/collective.hpp"

namespace ncclpy::host {
namespace {

std::string rank_text(const Comm& comm) { return "rank " + std::to_string(comm.rank) + " of " + comm.title(); }

// The number of blocks of `count` elements in the operation's send buffer, and in its receive buffer.
size_t blocks_sent(const Operation& operation, int nranks) {
  return operation.kind == Operation::collective ? blocks_sent(operation.collective_kind, nranks) : 1;
}

size_t blocks_received(const Operation& operation, int nranks) {
  return operation.kind == Operation::collective ? blocks_received(operation.collective_kind, nranks) : 1;
}

std::string description_of(const Comm& comm, const Operation& operation) {
  std::string description = std::string(name_of(operation)) + " of " + std::to_string(operation.count) + " " +
                      type_name(operation.dtype);
  if (operation.kind != Operation::collective) description += ", with rank " + std::to_string(operation.root);
  return description + ", of " + rank_text(comm);
}

}  // namespace

std::shared_ptr<LaunchMemoryUse> memory_use_of(const std::shared_ptr<Comm>& comm, const Operation* operations,
                                               size_t count) {
  const auto ended = [comm] { return comm->health.stopped(); };
  auto memory_use = std::make_shared<LaunchMemoryUse>();
  memory_use->targets.resize(count);
  std::vector<Range> ranges;
  std::string description;
  for (size_t i = 0; i < count; i++) {
    const Operation& one = operations[i];
    if (one.kind == Operation::signal || one.kind == Operation::wait_signal) continue;
    const size_t bytes = one.count * size_of(one.dtype);
    if (one.sends(comm->rank)) ranges.push_back({one.sendbuff, bytes * blocks_sent(one, comm->nranks)});
    if (one.receives(comm->rank)) ranges.push_back({one.recvbuff, bytes * blocks_received(one, comm->nranks)});
    if (one.scalar_memory != nullptr) ranges.push_back({one.scalar_memory, size_of(one.dtype)});
    if (description.empty()) description = description_of(*comm, one);
    if (one.kind == Operation::put) {
      memory_use->targets[i] = std::make_shared<const MemoryUse>(MemoryUse::operations,
                                                                 std::vector<Range>{{one.recvbuff, bytes}},
                                                         description_of(*comm, one) + ", writes", ended);
    }
  }
  if (count > 1) description += ", or one of the " + std::to_string(count - 1) + " launched with it";
  memory_use->memory =
      std::make_shared<const MemoryUse>(MemoryUse::operations, std::move(ranges), description + ", uses", ended);
  return memory_use;
}

std::shared_ptr<const MemoryUse> registered_memory_use(const Comm& comm, const void* memory, size_t bytes,
                                                       const char* what) {
  return std::make_shared<const MemoryUse>(MemoryUse::registered, std::vector<Range>{{memory, bytes}},
                                       std::string(what) + " of " + rank_text(comm) + " has registered",
                                       [&comm] { return comm.health.aborted(); });
}

}  // namespace ncclpy::host
