// Injected faults: a plan says what goes wrong, at which call or operation of which rank. docs/host-engine.md
// describes the language. Without a plan each check costs one relaxed load.
#pragma once

#include <atomic>
#include <string>

#include "comm/operation.hpp"

namespace ncclpy::host {

class Comm;

extern std::atomic<bool> faults_planned;

// Called where `function` (NCCL's name, with or without "nccl") begins; `comm` is null if there is no communicator
// yet. Executes the plan's fault; ncclSuccess means that the call continues.
ncclResult_t fault_in_call(Comm* comm, int rank, const char* function);

// What callers use: as fault_in_call(), at the cost of one load if there is no plan.
inline ncclResult_t fault_at_call(Comm* comm, int rank, const char* function) {
  return faults_planned.load(std::memory_order_relaxed) ? fault_in_call(comm, rank, function) : ncclSuccess;
}

// Called where an operation begins to run. Returns false if it must not run.
bool fault_in_run(Comm& comm, const char* name);
// Called after an operation has stored its result, in which the plan may invert a bit.
void fault_in_result(Comm& comm, const char* name, const Operation& operation);

// Replaces the plan and forgets past faults; NULL or "" removes the plan. Hangs in progress continue. After an error
// the old plan stays in force.
ncclResult_t set_faults(const char* text);
// The faults that the current plan has injected, one a line, in order.
std::string faults_fired();
// The rules of the current plan that have injected nothing, one a line. Random rules are left out, since they may
// inject nothing by chance.
std::string faults_unfired();

}  // namespace ncclpy::host
