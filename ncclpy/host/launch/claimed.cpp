// Which memory operations read and write.
#include "claimed.hpp"

#include <string>

#include "transports/collective.hpp"

namespace ncclpy::host {
namespace {

std::string who(const Comm& comm) { return "rank " + std::to_string(comm.rank) + " of " + comm.title(); }

// How many blocks of `count` elements the operation has on its side.
size_t blocks_sent(const Operation& operation, int nranks) {
  return operation.kind == Operation::collective ? blocks_sent(operation.collective_kind, nranks) : 1;
}

size_t blocks_received(const Operation& operation, int nranks) {
  return operation.kind == Operation::collective ? blocks_received(operation.collective_kind, nranks) : 1;
}

std::string words_of(const Comm& comm, const Operation& operation) {
  std::string words = std::string(name_of(operation)) + " of " + std::to_string(operation.count) + " " +
                      type_name(operation.dtype);
  if (operation.kind != Operation::collective) words += ", with rank " + std::to_string(operation.root);
  return words + ", of " + who(comm);
}

}  // namespace

std::shared_ptr<Claims> claims_of(const std::shared_ptr<Comm>& comm, const Operation* operations, size_t count) {
  const auto ended = [comm] { return comm->health.stopped(); };
  auto claims = std::make_shared<Claims>();
  claims->targets.resize(count);
  std::vector<Range> ranges;
  std::string words;
  for (size_t i = 0; i < count; i++) {
    const Operation& one = operations[i];
    if (one.kind == Operation::signal || one.kind == Operation::wait_signal) continue;
    const size_t bytes = one.count * size_of(one.dtype);
    if (one.sends(comm->rank)) ranges.push_back({one.sendbuff, bytes * blocks_sent(one, comm->nranks)});
    if (one.receives(comm->rank)) ranges.push_back({one.recvbuff, bytes * blocks_received(one, comm->nranks)});
    if (one.scalar_memory != nullptr) ranges.push_back({one.scalar_memory, size_of(one.dtype)});
    if (words.empty()) words = words_of(*comm, one);
    if (one.kind == Operation::put) {
      claims->targets[i] = std::make_shared<const Claim>(Claim::operations, std::vector<Range>{{one.recvbuff, bytes}},
                                                         words_of(*comm, one) + ", writes", ended);
    }
  }
  if (count > 1) words += ", or one of the " + std::to_string(count - 1) + " launched with it";
  claims->memory = std::make_shared<const Claim>(Claim::operations, std::move(ranges), words + ", uses", ended);
  return claims;
}

std::shared_ptr<const Claim> claim_registered(const Comm& comm, const void* memory, size_t bytes, const char* what) {
  return std::make_shared<const Claim>(Claim::registered, std::vector<Range>{{memory, bytes}},
                                       std::string(what) + " of " + who(comm) + " has registered",
                                       [&comm] { return comm.health.aborted(); });
}

}  // namespace ncclpy::host
