// Parsing fault plans: rules separated by ";", words by blanks, each word key=value.
#include "fault_plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "base/errors.hpp"

namespace ncclpy::host {
namespace {

const char* const action_names[] = {"error", "busy", "delay", "hang", "kill", "corrupt"};
static_assert(sizeof action_names / sizeof *action_names == Fault::actions);

struct ResultName {
  const char* name;
  ncclResult_t result;
};
const ResultName result_names[] = {
    {"ncclUnhandledCudaError", ncclUnhandledCudaError},
    {"ncclSystemError", ncclSystemError},
    {"ncclInternalError", ncclInternalError},
    {"ncclInvalidArgument", ncclInvalidArgument},
    {"ncclInvalidUsage", ncclInvalidUsage},
    {"ncclRemoteError", ncclRemoteError},
    {"ncclTimeout", ncclTimeout},
};

bool parse_number(const std::string& text, uint64_t* value) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos || text.size() > 19) return false;
  *value = std::strtoull(text.c_str(), nullptr, 10);
  return true;
}

// "20ms", "1.5s", "300us".
bool parse_duration(const std::string& text, double* seconds) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  if (end == text.c_str() || !(value >= 0) || std::isinf(value)) return false;
  if (unit == "s") *seconds = value;
  else if (unit == "ms") *seconds = value * 1e-3;
  else if (unit == "us") *seconds = value * 1e-6;
  else return false;
  return true;
}

ncclResult_t wrong(const std::string& word, const char* allowed) {
  return fail(ncclInvalidArgument, "fault plan: \"%s\" is not understood; %s", word.c_str(), allowed);
}

ncclResult_t parse_fault(const std::string& word, const std::string& text, Fault* fault) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const bool has_argument = colon != std::string::npos;
  const std::string argument = has_argument ? text.substr(colon + 1) : "";
  int action = 0;
  while (action < Fault::actions && name != action_names[action]) action++;
  fault->action = Fault::Action(action);
  switch (action) {
    case Fault::error:
      if (!has_argument) return ncclSuccess;
      for (const ResultName& known : result_names) {
        if (argument != known.name) continue;
        fault->result = known.result;
        return ncclSuccess;
      }
      return wrong(word,
                   "an error is ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, "
                   "ncclInvalidUsage, ncclRemoteError or ncclTimeout");
    case Fault::busy:
      if (parse_number(argument, &fault->polls) && fault->polls > 0) return ncclSuccess;
      if (parse_duration(argument, &fault->seconds)) return ncclSuccess;
      return wrong(word, "busy takes a number of polls or a time, as in busy:3 or busy:20ms");
    case Fault::delay:
      if (parse_duration(argument, &fault->seconds)) return ncclSuccess;
      return wrong(word, "delay takes a time, as in delay:20ms (units s, ms, us)");
    case Fault::hang:
      if (!has_argument || parse_duration(argument, &fault->seconds)) return ncclSuccess;
      return wrong(word, "hang takes nothing or a time, as in hang:2s");
    case Fault::kill:
    case Fault::corrupt:
      if (!has_argument) return ncclSuccess;
      return wrong(word, "this fault takes no argument");
    default: return wrong(word, "a fault is error, busy, delay, hang, kill or corrupt");
  }
}

ncclResult_t parse_occurrence(const std::string& word, const std::string& text, Rule* rule) {
  const bool onwards = !text.empty() && text.back() == '+';
  if (text == "*") {
    rule->first = 1;
  } else if (!parse_number(onwards ? text.substr(0, text.size() - 1) : text, &rule->first) || rule->first == 0) {
    return wrong(word, "nth is 1, 2, ..., or 3+ for the third and all after it, or * for all");
  }
  rule->last = onwards || text == "*" ? UINT64_MAX : rule->first;
  return ncclSuccess;
}

// Parses the value of call=: the name of a function of NCCL, with or without "nccl", or "*".
ncclResult_t parse_call(const std::string& word, const std::string& text, Rule* rule) {
  rule->call = text == "*" ? "" : text.rfind("nccl", 0) == 0 ? text.substr(4) : text;
  if (rule->call.empty()) return ncclSuccess;
  static const char* const known[] = {
#define NCCLPY_NAME(version, ret, name, params) #name,
      NCCLPY_NCCL_FUNCTIONS(NCCLPY_NAME)
#undef NCCLPY_NAME
  };
  for (const char* name : known) {
    if (name + 4 != rule->call) continue;
    rule->call = site_of(rule->call);
    return ncclSuccess;
  }
  return wrong(word, "call is the name of a function of nccl.h, with or without \"nccl\", or *");
}

ncclResult_t parse_word(const std::string& word, Rule* rule) {
  if (word == "random") {
    rule->random = true;
    return ncclSuccess;
  }
  const size_t equals = word.find('=');
  const std::string key = word.substr(0, equals);
  const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
  uint64_t number = 0;
  if (key == "rank") {
    if (value == "*") return ncclSuccess;
    if (!parse_number(value, &number) || number > 1 << 20) return wrong(word, "rank is a number or *");
    rule->rank = int(number);
  } else if (key == "call") {
    return parse_call(word, value, rule);
  } else if (key == "nth") {
    return parse_occurrence(word, value, rule);
  } else if (key == "comm") {
    if (value.empty()) return wrong(word, "comm is the name that a communicator's configuration gives it");
    rule->comm = value;
  } else if (key == "at") {
    if (value != "call" && value != "run") return wrong(word, "at is call or run");
    rule->at_run = value == "run";
  } else if (key == "seed") {
    if (!parse_number(value, &rule->seed)) return wrong(word, "seed is a number");
  } else if (key == "p") {
    char* end = nullptr;
    rule->probability = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != 0 || !(rule->probability >= 0 && rule->probability <= 1))
      return wrong(word, "p is a probability from 0 to 1");
  } else if (key == "do") {
    std::stringstream list(value);
    for (std::string one; std::getline(list, one, ',');) {
      Fault fault;
      NCCLPY_TRY(parse_fault(word, one, &fault));
      rule->faults.push_back(fault);
    }
  } else {
    return wrong(word, "the words are rank=, call=, nth=, comm=, at=, do=, and random, seed=, p=");
  }
  return ncclSuccess;
}

ncclResult_t check(Rule* rule) {
  if (rule->faults.empty()) return wrong(rule->text, "a rule needs do=, which names the fault");
  if (rule->random) {
    rule->last = UINT64_MAX;
    if (rule->probability <= 0) return wrong(rule->text, "random needs p=, the probability of each site");
    return ncclSuccess;
  }
  if (rule->faults.size() != 1) return wrong(rule->text, "only random takes several faults");
  if (rule->faults[0].action == Fault::corrupt) rule->at_run = true;
  if (rule->faults[0].action == Fault::busy && rule->at_run) return wrong(rule->text, "busy happens in a call");
  return ncclSuccess;
}

}  // namespace

ncclResult_t parse_plan(const std::string& text, std::vector<Rule>* rules) {
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ';');) {
    Rule rule;
    std::stringstream words(part);
    for (std::string word; words >> word;) {
      rule.text += (rule.text.empty() ? "" : " ") + word;
      NCCLPY_TRY(parse_word(word, &rule));
    }
    if (rule.text.empty()) continue;
    NCCLPY_TRY(check(&rule));
    rules->push_back(rule);
  }
  return ncclSuccess;
}

std::string site_of(const std::string& call) {
  // Several functions initialise a rank, and which of them a user's call uses depends on the loaded NCCL.
  if (call.rfind("CommInit", 0) == 0) return "CommInitRank";
  if (call == "Bcast") return "Broadcast";
  if (call == "GroupSimulateEnd") return "GroupEnd";
  const size_t plain = call.size() - std::min<size_t>(call.size(), 6);
  return call.substr(plain) == "Config" ? call.substr(0, plain) : call;
}

const char* name_of(Fault::Action action) { return action_names[action]; }

const char* name_of_result(ncclResult_t result) {
  for (const ResultName& known : result_names) {
    if (known.result == result) return known.name;
  }
  return "?";
}

}  // namespace ncclpy::host
