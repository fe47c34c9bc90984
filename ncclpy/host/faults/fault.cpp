// The current plan, its past faults, and how each fault is injected.
#include "fault.hpp"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "base/mutex.hpp"
#include "base/wait.hpp"
#include "comm/comm.hpp"
#include "fault_plan.hpp"

namespace ncclpy::host {

std::atomic<bool> faults_planned{false};

namespace {

enum Moment : uint64_t { in_call, in_run, in_result };

struct Plan {
  std::string broken;  // why the environment's plan could not be parsed
  std::vector<Rule> rules;
  Mutex<NCCLPY_LOCK_FAULTS> mutex;  // guards the fields below
  std::map<std::pair<size_t, int>, uint64_t> times_matched;  // by rule and rank
  // by call, moment and rank: how often this combination was reached; a random rule hashes the count into its decision
  std::map<std::pair<std::pair<std::string, uint64_t>, int>, uint64_t> times_reached;
  std::string fired;
  std::vector<bool> has_fired;  // by rule
  bool announced = false;
};

// Never destroyed: threads of the engine read the plan until the process has exited.
struct CurrentPlan {
  Mutex<NCCLPY_LOCK_FAULTS> mutex;
  std::shared_ptr<Plan> plan;
};

CurrentPlan& current_plan() {
  static auto* const the = new CurrentPlan;
  return *the;
}

std::shared_ptr<Plan> plan() {
  CurrentPlan& the = current_plan();
  std::lock_guard lock(the.mutex);
  return the.plan;
}

void replace_plan(std::shared_ptr<Plan> next) {
  CurrentPlan& the = current_plan();
  std::lock_guard lock(the.mutex);
  faults_planned.store(next != nullptr);
  the.plan.swap(next);
}

// The environment's plan applies from the start. If it cannot be parsed, every call fails with the parser's error.
__attribute__((constructor)) void read_environment() {
  const char* const text = std::getenv("NCCLPY_FAULTS");
  if (text == nullptr) return;
  auto next = std::make_shared<Plan>();
  if (parse_plan(text, &next->rules) != ncclSuccess) next->broken = "NCCLPY_FAULTS: " + last_error();
  set_last_error("");
  if (next->broken.empty() && next->rules.empty()) return;
  // Without the mutex: the library is being loaded, and the loading thread may hold a lock under which no other lock
  // may be taken.
  current_plan().plan = std::move(next);
  faults_planned.store(true);
}

// splitmix64. A random rule decides by such a hash of the site, so its decision does not depend on other sites or
// their order.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t hash(const std::string& text) {
  uint64_t value = 0;
  for (const char c : text) value = mix(value ^ uint64_t(static_cast<unsigned char>(c)));
  return value;
}

// Whether a fault of a random rule can be injected at this moment.
bool fits(Fault::Action action, Moment moment) {
  switch (action) {
    case Fault::busy: return moment == in_call;
    case Fault::corrupt: return moment == in_result;
    default: return moment != in_result;
  }
}

bool selects(const Rule& rule, const Comm* comm, int rank, const std::string& call) {
  if (rule.rank >= 0 && rule.rank != rank) return false;
  if (!rule.call.empty() && rule.call != site_of(call)) return false;
  if (rule.comm.empty()) return true;
  return comm != nullptr && rule.comm == comm->name;
}

std::string sentence(const Fault& fault, int rank, const std::string& call, uint64_t nth, Moment moment) {
  std::string text = "rank " + (rank < 0 ? "?" : std::to_string(rank)) + " " + call + " nth=" + std::to_string(nth) +
                     (moment == in_call ? " call: " : " run: ") + name_of(fault.action);
  if (fault.action == Fault::error) text += std::string(" ") + name_of_result(fault.result);
  return text;
}

// Chooses the fault, if any, of this site: of this occurrence of a call, at this moment, on this rank. The first
// matching rule counts.
bool decide(const Comm* comm, int rank, const char* function, Moment moment, Fault* fault, std::string* text) {
  const auto now = plan();
  if (now == nullptr) return false;
  const std::string call = std::string(function).rfind("nccl", 0) == 0 ? function + 4 : function;
  std::lock_guard lock(now->mutex);
  now->has_fired.resize(now->rules.size());
  const uint64_t at = ++now->times_reached[{{call, moment}, rank}];
  bool found = false;
  for (size_t i = 0; i < now->rules.size(); i++) {
    const Rule& rule = now->rules[i];
    if (!selects(rule, comm, rank, call)) continue;
    uint64_t nth = at;
    const Fault* chosen = nullptr;
    if (rule.random) {
      const uint64_t site = mix(rule.seed ^ mix(hash(call) + uint64_t(moment)) ^ mix(uint64_t(rank) << 32 | at));
      if (double(site >> 11) * 0x1p-53 >= rule.probability) continue;
      chosen = &rule.faults[mix(site) % rule.faults.size()];
      if (!fits(chosen->action, moment)) continue;
    } else {
      const Fault& only = rule.faults[0];
      const Moment wanted = only.action == Fault::corrupt ? in_result : rule.at_run ? in_run : in_call;
      if (wanted != moment) continue;
      nth = ++now->times_matched[{i, rank}];
      if (nth < rule.first || nth > rule.last) continue;
      chosen = &only;
    }
    if (found) continue;  // later rules still count their occurrences
    found = true;
    *fault = *chosen;
    *text = sentence(*chosen, rank, call, nth, moment);
    now->fired += *text + "\n";
    now->has_fired[i] = true;
    if (rule.random && !std::exchange(now->announced, true)) {
      std::fprintf(stderr, "ncclpy host engine: random faults begin; NCCLPY_FAULTS='%s' repeats them\n",
                   rule.text.c_str());
    }
  }
  return found;
}

double now_seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

// Pauses for `seconds`, without end if negative. Returns early when `over()`.
template <class Over>
void pause_for(double seconds, Over over) {
  const double end = now_seconds() + seconds;
  while (!over() && (seconds < 0 || now_seconds() < end)) {
    const timespec millisecond = {0, 1000000};
    nanosleep(&millisecond, nullptr);
    WaitControl::poll();  // the thread may be a caller that waits for its stream with a deadline
  }
}

ncclResult_t as_error(const Fault& fault, const std::string& text) {
  return fail(fault.result, "injected fault: %s", text.c_str());
}

}  // namespace

ncclResult_t fault_in_call(Comm* comm, int rank, const char* function) {
  const auto now = plan();
  if (now != nullptr && !now->broken.empty()) return fail(ncclInvalidArgument, "%s", now->broken.c_str());
  Fault fault;
  std::string text;
  if (!decide(comm, rank, function, in_call, &fault, &text)) return ncclSuccess;
  // A hang also ends when the communicator ends: by an abort or by the death of a rank. A hang of ncclCommAbort itself
  // ends only by its own duration.
  const bool ends_with_comm = std::string(function).find("Abort") == std::string::npos;
  auto over = [&] { return ends_with_comm && comm != nullptr && comm->health.ended(); };
  switch (fault.action) {
    case Fault::error: return as_error(fault, text);
    case Fault::busy:
      if (comm != nullptr && !comm->blocking()) comm->health.pretend_busy(fault.polls, fault.seconds);
      return ncclSuccess;
    case Fault::delay: pause_for(fault.seconds, [] { return false; }); return ncclSuccess;
    case Fault::hang:
      pause_for(fault.seconds, over);
      return over() ? comm->stop_reason("the end of an injected hang") : ncclSuccess;
    case Fault::kill: ::kill(getpid(), SIGKILL); return ncclSuccess;
    case Fault::corrupt:
    case Fault::actions: break;
  }
  return ncclSuccess;
}

bool fault_in_run(Comm& comm, const char* name) {
  Fault fault;
  std::string text;
  if (!decide(&comm, comm.rank, name, in_run, &fault, &text)) return true;
  auto over = [&] { return comm.health.stopped(); };
  switch (fault.action) {
    case Fault::error: comm.health.set_async(fault.result, "injected fault: " + text); return false;
    case Fault::delay:
    case Fault::hang: pause_for(fault.seconds, over); return !over();
    case Fault::kill: ::kill(getpid(), SIGKILL); return true;
    default: return true;
  }
}

void fault_in_result(Comm& comm, const char* name, const Operation& operation) {
  if (!operation.receives(comm.rank) || operation.count == 0 || comm.health.stopped()) return;
  Fault fault;
  std::string text;
  if (!decide(&comm, comm.rank, name, in_result, &fault, &text)) return;
  static_cast<char*>(operation.recvbuff)[operation.count / 2 * size_of(operation.dtype)] ^= 1;
}

ncclResult_t set_faults(const char* text) {
  auto next = std::make_shared<Plan>();
  if (text != nullptr) NCCLPY_TRY(parse_plan(text, &next->rules));
  replace_plan(next->rules.empty() ? nullptr : std::move(next));
  return ncclSuccess;
}

std::string faults_fired() {
  const auto now = plan();
  if (now == nullptr) return {};
  std::lock_guard lock(now->mutex);
  return now->fired;
}

std::string faults_unfired() {
  const auto now = plan();
  if (now == nullptr) return {};
  std::string text;
  std::lock_guard lock(now->mutex);
  now->has_fired.resize(now->rules.size());
  for (size_t i = 0; i < now->rules.size(); i++) {
    if (!now->has_fired[i] && !now->rules[i].random) text += now->rules[i].text + "\n";
  }
  return text;
}

}  // namespace ncclpy::host
