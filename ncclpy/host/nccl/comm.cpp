// A communicator's state, its waits and its launches.
#include "comm.hpp"

#include <algorithm>
#include <cstring>

#include "../driver/exports.hpp"
#include "../driver/graph.hpp"
#include "../driver/handles.hpp"
#include "../driver/stream.hpp"
#include "collective.hpp"
#include "fault.hpp"
#include "one_sided.hpp"
#include "p2p.hpp"

namespace ncclpy::host {

namespace {
HandleTable<Comm>& handles() {
  static auto* const table = new HandleTable<Comm>('N');
  return *table;
}
}  // namespace

ncclComm_t add_handle(const std::shared_ptr<Comm>& comm) {
  comm->handle = reinterpret_cast<ncclComm_t>(handles().add(comm));
  return comm->handle;
}

ncclResult_t look_up(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm) {
  NCCLPY_TRY(check_pointer(handle, function, "comm"));
  *comm = handles().find(reinterpret_cast<uint64_t>(handle));
  if (*comm == nullptr) {
    return fail(ncclInvalidArgument, "%s : comm %p is no communicator, or one that was destroyed or aborted", function,
                static_cast<void*>(handle));
  }
  return ncclSuccess;
}

ncclResult_t find_comm(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm) {
  NCCLPY_TRY(look_up(handle, function, comm));
  return fault_at_call(comm->get(), (*comm)->rank, function);
}

void remove_handle(ncclComm_t handle) { handles().remove(reinterpret_cast<uint64_t>(handle)); }

ncclResult_t check_pointer(const void* pointer, const char* function, const char* name) {
  if (pointer == nullptr) return fail(ncclInvalidArgument, "%s : %s argument is NULL", function, name);
  return ncclSuccess;
}

std::shared_ptr<Comm> new_child(const std::shared_ptr<Comm>& parent) {
  auto child = std::make_shared<Comm>();
  child->parent = parent;
  child->device = parent->device;
  std::lock_guard lock(parent->mutex);
  auto& children = parent->children_;
  for (size_t i = children.size(); i-- > 0;) {
    if (children[i].expired()) children.erase(children.begin() + long(i));
  }
  children.push_back(child);
  return child;
}

std::string Comm::title() const {
  return "communicator " + (name.empty() ? "" : "\"" + name + "\" ") + "of " + std::to_string(nranks) + " ranks";
}

void Comm::set_async(ncclResult_t result, const std::string& text) {
  std::lock_guard lock(mutex);
  // A rank that has died does not come back, whatever else is reported later.
  if (async_.load(std::memory_order_relaxed) == ncclRemoteError && !forgiven_) return;
  // What was in progress is over; an error that came meanwhile stays.
  if (result == ncclSuccess && async_.load(std::memory_order_relaxed) != ncclInProgress) return;
  if (!text.empty()) async_text_ = text;
  async_.store(result, std::memory_order_release);
}

ncclResult_t Comm::poll() {
  if (busy_.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex);
    const bool over = busy_polls_ > 0 ? --busy_polls_ == 0 : std::chrono::steady_clock::now() >= busy_until_;
    if (!over) return ncclInProgress;
    busy_.store(false, std::memory_order_release);
  }
  return async();
}

void Comm::pretend_busy(uint64_t polls, double seconds) {
  std::lock_guard lock(mutex);
  // The poll that finds it over is one more.
  busy_polls_ = polls > 0 ? polls + 1 : 0;
  busy_until_ = std::chrono::steady_clock::now() +
                std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  busy_.store(true, std::memory_order_release);
}

std::string Comm::async_text() {
  std::lock_guard lock(mutex);
  return async_text_;
}

ncclResult_t Comm::ensure_ready() {
  const ncclResult_t now = async();
  if (now == ncclInProgress || (now == ncclSuccess && !initialised_.load(std::memory_order_acquire)))
    return fail(ncclInvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
  if (now != ncclSuccess) set_last_error(async_text());
  return now;
}

ncclResult_t Comm::ensure_open(const char* function) {
  if (revoked()) return fail(ncclInvalidUsage, "%s : communicator was revoked", function);
  NCCLPY_TRY(ensure_ready());
  if (suspended.load())
    return fail(ncclInvalidUsage, "%s : communicator is suspended, call ncclCommResume first", function);
  return ncclSuccess;
}

void Comm::set_segment(std::shared_ptr<Segment> joined) {
  std::lock_guard lock(mutex);
  segment = std::move(joined);
}

std::shared_ptr<Segment> Comm::shared_segment() {
  std::lock_guard lock(mutex);
  return segment;
}

void Comm::ring() {
  local_.ring();
  std::vector<std::shared_ptr<Comm>> children;
  {
    std::lock_guard lock(mutex);
    if (segment != nullptr) {
      segment->header().bell.ring();
      segment->slot(rank).bell.ring();
    }
    for (const auto& child : children_) {
      if (auto alive = child.lock()) children.push_back(std::move(alive));
    }
  }
  for (const auto& child : children) child->ring();
}

void Comm::share_fate(const std::shared_ptr<Comm>& other) {
  fate_ = other->fate_;
  std::lock_guard lock(fate_->mutex);
  auto& members = fate_->members;
  members.erase(std::remove_if(members.begin(), members.end(), [](const auto& one) { return one.expired(); }),
                members.end());
  members.push_back(weak_from_this());
  members.push_back(other);
}

uint64_t Comm::note_call(Deed deed) {
  const uint64_t word = packed(deed, calls_[size_t(deed)].fetch_add(1, std::memory_order_relaxed) + 1);
  segment->slot(rank).called.store(word, std::memory_order_relaxed);
  return word;
}

void Comm::await(Side side, std::vector<int> ranks) {
  std::lock_guard lock(awaited_mutex_);
  awaited_[side] = std::move(ranks);
}

std::vector<int> Comm::awaited(Side side) {
  std::lock_guard lock(awaited_mutex_);
  return awaited_[side];
}

std::vector<std::shared_ptr<Comm>> Comm::unborn() {
  std::vector<std::shared_ptr<Comm>> found;
  std::lock_guard lock(mutex);
  for (const auto& known : children_) {
    auto child = known.lock();
    if (child != nullptr && !child->initialised_.load(std::memory_order_acquire)) found.push_back(std::move(child));
  }
  return found;
}

void Comm::abort() {
  fate_->aborted.store(true, std::memory_order_seq_cst);
  std::vector<std::weak_ptr<Comm>> members;
  {
    std::lock_guard lock(fate_->mutex);
    members = fate_->members;
  }
  for (const auto& member : members) {
    if (const auto alive = member.lock(); alive != nullptr && alive.get() != this) alive->ring();
  }
  if (const auto met = shared_segment()) met->slot(rank).aborted.store(1, std::memory_order_release);
  ring();
  wait_until(local_, [this] {
    return running_.load(std::memory_order_seq_cst) == 0 && jobs_.load(std::memory_order_seq_cst) == 0;
  });
}

void Comm::revoke() {
  revoked_.store(true, std::memory_order_seq_cst);
  ring();
  wait_until(local_, [this] { return running_.load(std::memory_order_seq_cst) == 0; });
}

void Comm::forgive() {
  std::lock_guard lock(mutex);
  forgiven_ = true;
  if (async_.load(std::memory_order_relaxed) == ncclRemoteError) async_.store(ncclSuccess, std::memory_order_release);
}

std::string death_notice(Segment& segment, int rank) {
  const RankSlot& slot = segment.slot(rank);
  return "rank " + std::to_string(rank) + " of " + std::to_string(segment.nranks()) + " is dead: process " +
         std::to_string(slot.pid) + ", on device " + std::to_string(slot.device) +
         ", has ended without destroying its communicator";
}

void Comm::lose(int dead_rank) {
  if (lost_.load(std::memory_order_acquire)) return;
  set_async(ncclRemoteError, death_notice(*shared_segment(), dead_rank));
  lost_.store(true, std::memory_order_seq_cst);
  ring();
}

ncclResult_t Comm::stop_reason(const char* waited_for) {
  if (parent != nullptr && parent->ended() && !sheds_dead) return parent->stop_reason(waited_for);
  const auto met = shared_segment();
  if (aborted() || met == nullptr || met->first_dead() < 0)
    return fail(ncclInternalError, "rank %d was aborted while it waited for %s", rank, waited_for);
  return fail(ncclRemoteError, "%s", death_notice(*met, met->first_dead()).c_str());
}

void break_comms(Segment& segment, int dead_rank) {
  std::vector<std::shared_ptr<Comm>> all;
  {
    std::lock_guard lock(segment.mutex);
    all = segment.local;
  }
  for (const auto& comm : all) comm->lose(dead_rank);
}

Side Comm::note_arrival(const Gate& gate, uint64_t generation) {
  const Side side = &gate == &segment->header().data ? data_side : control_side;
  // Not taken back by an abort: the rank has come, and nothing follows.
  segment->slot(rank).arrived[side].store(generation, std::memory_order_relaxed);
  return side;
}

bool Comm::pass(Gate& gate, uint64_t& generation) {
  const uint64_t target = ++generation * uint64_t(nranks);
  Bell& bell = segment->header().bell;
  const Side side = note_arrival(gate, generation);
  if (gate.arrive(target)) {
    bell.ring();
    return true;
  }
  // A revoked communicator can still be split: only its data stop.
  wait_until(bell, segment->spin(), [&] { return gate.open(target) || (side == data_side ? stopped() : ended()); });
  if (gate.open(target) || !gate.withdraw(target)) return true;
  generation--;
  return false;
}

void Comm::pass_surely(Gate& gate, uint64_t& generation) {
  const uint64_t target = ++generation * uint64_t(nranks);
  Bell& bell = segment->header().bell;
  note_arrival(gate, generation);
  if (gate.arrive(target)) return bell.ring();
  wait_until(bell, segment->spin(), [&] { return gate.open(target); });
}

ncclResult_t Comm::exchange(const void* mine, size_t bytes, void* all) {
  const int parity = int((control_generation_ + 1) & 1);
  std::memcpy(segment->slot(rank).exchange[parity], mine, bytes);
  if (!pass(segment->header().control, control_generation_)) return stop_reason("the other ranks");
  for (int r = 0; r < nranks; r++) {
    std::memcpy(static_cast<char*>(all) + size_t(r) * bytes, segment->slot(r).exchange[parity], bytes);
  }
  return ncclSuccess;
}

// Operations that run together, and the streams that wait for each other around them.
struct Comm::Launch {
  std::shared_ptr<Comm> comm;
  std::vector<Operation> operations;
  uint64_t ticket;
  std::atomic<size_t> streams_missing{0};
  std::atomic<bool> done{false};
};

// Waits for this launch's turn. False if aborted; leave() must be called in either case.
bool Comm::enter(uint64_t ticket) {
  running_.fetch_add(1, std::memory_order_seq_cst);
  if (executed_.load(std::memory_order_acquire) != ticket) {
    wait_until(local_, [&] { return executed_.load(std::memory_order_acquire) == ticket || stopped(); });
  }
  return !stopped();
}

void Comm::leave(uint64_t ticket) {
  // After an abort the order is void; the count only has to reach what was issued.
  if (executed_.load(std::memory_order_acquire) == ticket) executed_.store(ticket + 1, std::memory_order_release);
  running_.fetch_sub(1, std::memory_order_seq_cst);
  local_.ring();
}

template <class Tell>
void Comm::run_operations(const Operation* operations, size_t count, Tell tell) {
  const bool faults = faults_planned.load(std::memory_order_relaxed);
  for (size_t i = 0; faults && i < count; i++) {
    // An operation that does not run takes those of its launch with it, as a kernel would.
    if (!fault_in_run(*this, name_of(operations[i]))) return;
  }
  Messages messages(*this);
  for (size_t i = 0; i < count; i++) {
    if (operations[i].message()) messages.add(operations[i]);
  }
  messages.begin();
  for (size_t i = 0; i < count; i++) {
    if (operations[i].kind == Operation::put || operations[i].kind == Operation::signal) run_put(*this, operations[i]);
  }
  for (size_t i = 0; i < count; i++) {
    if (operations[i].kind != Operation::collective) continue;
    tell(operations[i].deed);
    run_collective(*this, operations[i]);
  }
  for (size_t i = count; i-- > 0;) {
    if (operations[i].message()) tell(operations[i].deed);
  }
  messages.finish();
  for (size_t i = 0; i < count; i++) {
    if (operations[i].kind != Operation::wait_signal) continue;
    tell(operations[i].deed);
    wait_for_signals(*this, operations[i]);
  }
  for (size_t i = 0; faults && i < count; i++) fault_in_result(*this, name_of(operations[i]), operations[i]);
}

void Comm::execute(const Operation* operations, size_t count) {
  // Everybody can see what this rank is at.
  RankSlot& slot = segment->slot(rank);
  const auto tell = [&slot](uint64_t deed) { slot.doing[data_side].store(deed, std::memory_order_relaxed); };
  tell(operations[0].deed);
  run_operations(operations, count, tell);
  slot.done.store(operations[count - 1].deed, std::memory_order_relaxed);
  tell(0);
}

void Comm::run(const Launch& launch) {
  if (enter(launch.ticket)) execute(launch.operations.data(), launch.operations.size());
  leave(launch.ticket);
}

// The launch is complete when the stream has come to it. A default stream is that of the communicator's device.
static ncclResult_t record_launch(const Operation& operation, cudaStream_t stream, int device) {
  if (operation.launch_event == nullptr) return ncclSuccess;
  const CUcontext before = current_context();
  set_current_context(context_of(device));
  const CUresult recorded = cuEventRecord(operation.launch_event, stream);
  set_current_context(before);
  if (recorded == CUDA_SUCCESS) return ncclSuccess;
  return fail(ncclUnhandledCudaError, "launchCompletionEvent %p cannot be recorded on stream %p",
              static_cast<void*>(operation.launch_event), static_cast<void*>(stream));
}

uint64_t Comm::take_ticket() {
  std::lock_guard lock(issuing_);
  return issued_.fetch_add(1, std::memory_order_acq_rel);
}

// Into a graph instead of the streams: each launch of the graph is a launch of these operations, with its own place in
// the communicator's order. The graph keeps the communicator, as NCCL's graphs keep its resources.
ncclResult_t Comm::issue_captured(std::vector<Operation> operations, const std::vector<std::shared_ptr<Stream>>& queues) {
  const CUresult captured = capture(queues, device, [self = shared_from_this(), operations] {
    return Task([self, operations, ticket = self->take_ticket()] {
      if (self->enter(ticket)) self->execute(operations.data(), operations.size());
      self->leave(ticket);
    });
  });
  if (captured == CUDA_SUCCESS) return ncclSuccess;
  if (captured != CUDA_ERROR_STREAM_CAPTURE_MERGE)
    return fail(ncclUnhandledCudaError, "the capture of a stream given to NCCL was invalidated (CUDA error %d)", captured);
  return fail(ncclInvalidUsage,
              "Streams given to a communicator within a NCCL group must either be all uncaptured or all captured by the "
              "same graph.");
}

ncclResult_t Comm::issue(const Operation& operation, cudaStream_t stream) {
  const auto queue = stream_of(stream, device);
  if (queue == nullptr)
    return fail(ncclUnhandledCudaError, "stream %p is no stream, or one that was destroyed", static_cast<void*>(stream));
  NCCLPY_TRY(record_launch(operation, stream, device));
  if (queue->capturing.load(std::memory_order_acquire)) return issue_captured({operation}, {queue});
  std::lock_guard lock(issuing_);
  const uint64_t ticket = issued_.load(std::memory_order_relaxed);
  queue->enqueue([self = shared_from_this(), operation, ticket] {
    if (self->enter(ticket)) self->execute(&operation, 1);
    self->leave(ticket);
  });
  issued_.store(ticket + 1, std::memory_order_release);
  return ncclSuccess;
}

ncclResult_t Comm::issue(std::vector<Operation> operations, const std::vector<cudaStream_t>& streams) {
  std::vector<std::shared_ptr<Stream>> queues;
  for (cudaStream_t stream : streams) {
    auto queue = stream_of(stream, device);
    if (queue == nullptr) {
      return fail(ncclUnhandledCudaError, "stream %p is no stream, or one that was destroyed",
                  static_cast<void*>(stream));
    }
    bool known = false;
    for (const auto& other : queues) known = known || other == queue;
    if (!known) queues.push_back(std::move(queue));
  }
  for (size_t i = 0; i < operations.size(); i++) NCCLPY_TRY(record_launch(operations[i], streams[i], device));
  for (const auto& queue : queues) {
    if (queue->capturing.load(std::memory_order_acquire)) return issue_captured(std::move(operations), queues);
  }
  auto launch = std::make_shared<Launch>();
  launch->comm = shared_from_this();
  launch->operations = std::move(operations);
  launch->streams_missing = queues.size() - 1;
  std::lock_guard lock(issuing_);
  launch->ticket = issued_.load(std::memory_order_relaxed);
  // NCCL launches on the first stream, which waits for the others, which wait for the end.
  try {
    for (size_t i = 1; i < queues.size(); i++) {
      queues[i]->enqueue([launch] {
        launch->streams_missing.fetch_sub(1);
        launch->comm->local_.ring();
        wait_until(launch->comm->local_, [&] { return launch->done.load() || launch->comm->stopped(); });
      });
    }
    queues[0]->enqueue([launch] {
      wait_until(launch->comm->local_,
                 [&] { return launch->streams_missing.load() == 0 || launch->comm->stopped(); });
      launch->comm->run(*launch);
      launch->done.store(true);
      launch->comm->local_.ring();
    });
  } catch (...) {  // there is no thread for one of the streams: the others must not wait for what never comes
    launch->done.store(true);
    local_.ring();
    throw;
  }
  issued_.store(launch->ticket + 1, std::memory_order_release);
  return ncclSuccess;
}

void Comm::drain() {
  const uint64_t target = issued_.load(std::memory_order_acquire);
  wait_until(local_, [&] { return executed_.load(std::memory_order_acquire) >= target || stopped(); });
}

}  // namespace ncclpy::host
