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
  ncclResult_t result = ncclSystemError;  // for error
  double seconds = -1;                    // for delay, hang, busy; negative: no end
  uint64_t polls = 0;                     // for busy without `seconds`
};

// One rule of a plan: where, when, what.
struct Rule {
  std::string text;
  bool random = false;
  int rank = -1;                 // -1: any
  std::string call;              // as returned by site_of; empty: any
  std::string comm;              // the configuration's commName; empty: any
  bool at_run = false;           // when the operation runs, instead of in the call
  uint64_t first = 1, last = 1;  // the occurrences of the call on a rank at which the fault is injected
  uint64_t seed = 0;             // of a random rule
  double probability = 0;        // of a random rule
  std::vector<Fault> faults;     // a random rule chooses one; others have exactly one
};

// Parses a plan. The error says which part is not understood, and what is allowed.
ncclResult_t parse_plan(const std::string& text, std::vector<Rule>* rules);

// The name of a call in rules, without "nccl". Calls that are equivalent for a user share one name.
std::string site_of(const std::string& call);

const char* name_of(Fault::Action action);
const char* name_of_result(ncclResult_t result);

}  // namespace ncclpy::host
