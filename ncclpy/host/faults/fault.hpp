// Faults on command: what a plan says goes wrong, at which call or operation of which rank. docs/host-engine.md has the
// language. Without a plan a site costs one relaxed load.
#pragma once

#include <atomic>
#include <string>

#include "comm/operation.hpp"

namespace ncclpy::host {

class Comm;

extern std::atomic<bool> faults_planned;

// A call of `function` (NCCL's name, with or without "nccl") begins, on `comm`, which may be null where there is none
// yet. What the plan has for it happens here; success means that the call goes on.
ncclResult_t fault_in_call(Comm* comm, int rank, const char* function);

inline ncclResult_t fault_at_call(Comm* comm, int rank, const char* function) {
  return faults_planned.load(std::memory_order_relaxed) ? fault_in_call(comm, rank, function) : ncclSuccess;
}

// An operation begins to run. False: it does not run.
bool fault_in_run(Comm& comm, const char* name);
// An operation has run and left its result.
void fault_in_result(Comm& comm, const char* name, const Operation& operation);

// Replaces the plan and forgets what has happened; NULL or "" ends all faults. An error leaves the plan as it was.
ncclResult_t set_faults(const char* text);
// What has happened by the plan in force, a line each, in the order in which it happened.
std::string faults_fired();
// The rules of the plan in force of which nothing has happened, a line each, but for random ones, which may have nothing
// to do.
std::string faults_unfired();

}  // namespace ncclpy::host
