// The thread's group, and its end.
#include "group.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/background.hpp"
#include "base/mutex.hpp"
#include "faults/fault.hpp"
#include "launch.hpp"
#include "simulate.hpp"

namespace ncclpy::host {
namespace {

constexpr size_t least_operations = 2;  // reserved for each communicator of a group: a send and a receive

// The operations of one communicator in the group.
struct Share {
  std::shared_ptr<Comm> comm;
  std::vector<Operation> operations;
};

// The jobs and operations of one group.
struct Contents {
  std::vector<Job> jobs;
  std::vector<Share> shares;  // one for each communicator, in the order of their first operations

  // Guards worked_on, the communicators with an unfinished background job.
  Mutex<NCCLPY_LOCK_GROUP> mutex;
  std::vector<std::shared_ptr<Comm>> worked_on;

  Contents() = default;
  Contents(Contents&& other) noexcept
      : jobs(std::move(other.jobs)), shares(std::move(other.shares)), worked_on(std::move(other.worked_on)) {}
  Contents& operator=(Contents&& other) noexcept {
    jobs = std::move(other.jobs);
    shares = std::move(other.shares);
    worked_on = std::move(other.worked_on);
    return *this;
  }

  void add(const std::shared_ptr<Comm>& comm, Operation operation) {
    // Searched from the end: mostly the communicator is that of the last operation.
    auto share = std::find_if(shares.rbegin(), shares.rend(), [&](const Share& known) { return known.comm == comm; });
    if (share != shares.rend()) return share->operations.push_back(std::move(operation));
    shares.push_back({comm, {}});
    shares.back().operations.reserve(least_operations);
    shares.back().operations.push_back(std::move(operation));
  }

  void begin_jobs() {
    worked_on = comms();
    for (const auto& comm : worked_on) comm->queue.begin_job();
  }

  // Ends one communicator's job; the jobs of other communicators of the group may still wait for other ranks.
  void end_job(const std::shared_ptr<Comm>& comm) {
    {
      std::lock_guard lock(mutex);
      const auto found = std::find(worked_on.begin(), worked_on.end(), comm);
      if (found == worked_on.end()) return;
      worked_on.erase(found);
    }
    comm->queue.end_job();
  }

  void end_jobs() {
    for (const auto& comm : std::vector<std::shared_ptr<Comm>>(worked_on)) end_job(comm);
  }

  // Each communicator of the group, once.
  std::vector<std::shared_ptr<Comm>> comms() const {
    std::vector<std::shared_ptr<Comm>> all;
    auto add = [&](const std::shared_ptr<Comm>& comm) {
      for (const auto& known : all) {
        if (known == comm) return;
      }
      all.push_back(comm);
    };
    for (const Job& job : jobs) add(job.comm);
    for (const Share& share : shares) add(share.comm);
    return all;
  }
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  int blocking = -1;  // unknown before the first communicator
  Contents contents;
};

thread_local Group group;

struct Outcome {
  ncclResult_t result = ncclSuccess;
  std::string text;
};

// Runs a function that returns a result code; an exception becomes a result code as well.
template <class Function>
Outcome outcome_of(Function function) {
  Outcome outcome;
  outcome.result = guarded("ncclGroupEnd", function);
  if (outcome.result != ncclSuccess) outcome.text = last_error();
  return outcome;
}

Outcome run_jobs(Contents& contents) {
  std::vector<Job>& jobs = contents.jobs;
  // One thread for each communicator, which runs the communicator's jobs in order.
  std::vector<std::vector<Job*>> shares;
  for (Job& job : jobs) {
    std::vector<Job*>* share = nullptr;
    for (auto& candidate : shares) {
      if (candidate.front()->comm == job.comm) share = &candidate;
    }
    if (share == nullptr) share = &shares.emplace_back();
    share->push_back(&job);
  }
  std::vector<Outcome> outcomes(shares.size());
  std::vector<std::function<void()>> works;
  for (size_t i = 0; i < shares.size(); i++) {
    works.push_back([&contents, &share = shares[i], &outcome = outcomes[i]] {
      for (Job* job : share) {
        Outcome now = outcome_of(job->run);
        if (outcome.result == ncclSuccess) outcome = now;
      }
      contents.end_job(share.front()->comm);
    });
  }
  const Outcome started = outcome_of([&] {
    run_together(std::move(works));
    return ncclSuccess;
  });
  if (started.result != ncclSuccess) {
    for (Job& job : jobs) {
      if (job.drop) job.drop();
    }
    return started;
  }
  for (const Outcome& outcome : outcomes) {
    if (outcome.result != ncclSuccess) return outcome;
  }
  return {};
}

// Returns an error for a message of a rank to itself whose counterpart is not in the group: it could never arrive.
ncclResult_t check_messages_to_self(const std::vector<Operation>& operations, int rank) {
  int sends = 0, receives = 0;
  for (const Operation& operation : operations) {
    if (!operation.message() || operation.root != rank) continue;
    (operation.kind == Operation::send ? sends : receives)++;
  }
  if (sends > receives) return fail(ncclInvalidUsage, "Trying to send to self without a matching recv");
  if (receives > sends) return fail(ncclInvalidUsage, "Trying to recv to self without a matching send");
  return ncclSuccess;
}

ncclResult_t check_messages_to_self(const std::vector<Share>& shares) {
  for (const Share& share : shares) NCCLPY_TRY(check_messages_to_self(share.operations, share.comm->rank));
  return ncclSuccess;
}

ncclResult_t issue_operations(std::vector<Share>& shares) {
  NCCLPY_TRY(check_messages_to_self(shares));
  for (Share& share : shares) NCCLPY_TRY(issue(share.comm, std::move(share.operations)));
  return ncclSuccess;
}

// Estimates the group's duration: the longest one of its communicators, which work concurrently.
ncclResult_t simulate(const std::vector<Share>& shares, ncclSimInfo_t* simulation) {
  NCCLPY_TRY(check_messages_to_self(shares));
  double microseconds = 0.0;
  for (const Share& share : shares) microseconds = std::max(microseconds, estimate(share.operations, share.comm->nranks));
  set_estimated_time(simulation, microseconds);
  return ncclSuccess;
}

Outcome launch(Contents& contents) {
  if (!contents.jobs.empty()) {
    Outcome outcome = run_jobs(contents);
    if (outcome.result != ncclSuccess) return outcome;
  }
  return outcome_of([&] { return issue_operations(contents.shares); });
}

ncclResult_t end_in_background(Contents contents) {
  auto shared = std::make_shared<Contents>(std::move(contents));
  for (const auto& comm : shared->comms()) comm->health.begin_progress();
  shared->begin_jobs();
  auto work = [shared] {
    const Outcome outcome = launch(*shared);
    for (const auto& comm : shared->comms()) comm->health.end_progress(outcome.result, outcome.text);
    shared->end_jobs();
  };
  const ncclResult_t started = guarded("ncclGroupEnd", [&] {
    if (shared->jobs.empty()) run_soon(work);
    else run_in_background("ncclpy-job", work);
    return ncclInProgress;
  });
  if (started == ncclInProgress) return started;
  for (const auto& comm : shared->comms()) comm->health.end_progress(started, last_error());
  shared->end_jobs();
  return started;
}

// Notes that a communicator takes part in the group. Blocking and nonblocking communicators cannot share a group: it
// would be undefined whether the group's end waits. A destroy makes it wait in any case.
ncclResult_t join(const Comm& comm, bool destroys) {
  if (destroys) {
    group.blocking = 1;
  } else if (group.blocking == -1) {
    group.blocking = comm.blocking();
  } else if (group.blocking != int(comm.blocking())) {
    return fail(ncclInvalidArgument, "Blocking and nonblocking communicators are not allowed in the same group.");
  }
  return ncclSuccess;
}

}  // namespace

void group_start() { group.depth++; }

ncclResult_t note_group_error(ncclResult_t result) {
  if (group.depth > 0 && result != ncclSuccess && result != ncclInProgress) group.error = result;
  return result;
}

ncclResult_t group_end(ncclSimInfo_t* simulation) {
  if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group.depth > 0) return ncclSuccess;
  Group ended = std::exchange(group, Group());
  if (ended.error == ncclSuccess && faults_planned.load(std::memory_order_relaxed)) {
    const auto comms = ended.contents.comms();
    if (!comms.empty()) ended.error = fault_at_call(comms[0].get(), comms[0]->rank, "ncclGroupEnd");
  }
  if (ended.error == ncclSuccess && simulation != nullptr) {
    ended.error = check_sim_info(simulation);
    if (ended.error == ncclSuccess) ended.error = simulate(ended.contents.shares, simulation);
    ended.contents.shares.clear();
  }
  if (ended.error != ncclSuccess) {
    for (Job& job : ended.contents.jobs) {
      if (job.drop) job.drop();
    }
    for (const auto& comm : ended.contents.comms()) {
      if (!comm->blocking()) comm->health.set_async(ended.error, last_error());
    }
    return ended.error;
  }
  if (ended.contents.jobs.empty() && ended.contents.shares.empty()) return ncclSuccess;
  if (ended.blocking == 0) return end_in_background(std::move(ended.contents));
  const Outcome outcome = launch(ended.contents);
  if (outcome.result != ncclSuccess) set_last_error(outcome.text);
  return outcome.result;
}

ncclResult_t submit(const std::shared_ptr<Comm>& comm, Operation operation) {
  operation.call = comm->note_call(kind_of(operation));
  if (group.depth == 0) {
    if (comm->blocking()) {
      if (operation.message()) NCCLPY_TRY(check_messages_to_self({operation}, comm->rank));
      return issue(comm, operation);
    }
    Contents single;
    single.add(comm, std::move(operation));
    return end_in_background(std::move(single));
  }
  NCCLPY_TRY(join(*comm, false));
  group.contents.add(comm, std::move(operation));
  return ncclSuccess;
}

ncclResult_t submit(Job job) {
  if (group.depth == 0) {
    group_start();
    const ncclResult_t result = submit(std::move(job));
    note_group_error(result);
    return group_end();
  }
  const ncclResult_t result = join(*job.comm, job.destroys);
  if (result != ncclSuccess) {
    if (job.drop) job.drop();
    return result;
  }
  group.contents.jobs.push_back(std::move(job));
  return ncclSuccess;
}

}  // namespace ncclpy::host

ncclResult_t ncclGroupStart(void) {
  ncclpy::host::group_start();
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  return ncclpy::host::guarded("ncclGroupEnd", [] { return ncclpy::host::group_end(); });
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simulation) {
  return ncclpy::host::guarded("ncclGroupSimulateEnd", [&] { return ncclpy::host::group_end(simulation); });
}
