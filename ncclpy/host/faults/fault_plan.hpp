// The language of fault plans.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/abi.hpp"

namespace ncclpy::host {

struct Fault {
  enum Action { error, busy, delay, hang, kill, corrupt, actions };
  Action action = error;
  ncclResult_t result = ncclSystemError;  // of error
  double seconds = -1;                    // of delay, hang, busy; below 0: no end
  uint64_t polls = 0;                     // of busy, if it has no time
};

// One part of a plan: where, when, what.
struct Rule {
  std::string text;
  bool random = false;
  int rank = -1;                   // -1: any
  std::string call;                // as site_of gives it; empty: any
  std::string comm;                // the configuration's commName; empty: any
  bool at_run = false;             // when the operation runs, instead of in the call
  uint64_t first = 1, last = 1;    // occurrences
  uint64_t seed = 0;               // random
  double probability = 0;          // random
  std::vector<Fault> faults;       // random chooses; otherwise there is one
};

// Reads a plan. An error says which part of it is not understood, and what would be.
ncclResult_t parse_plan(const std::string& text, std::vector<Rule>* rules);

// The name, without "nccl", under which rules know a call: those that do the same for a user are one.
std::string site_of(const std::string& call);

const char* name_of(Fault::Action action);
const char* name_of_result(ncclResult_t result);

}  // namespace ncclpy::host
