// One rank's communicator, and the handles that stand for it.
//
// Handles are numbers in a checked table; a destroyed communicator is recognised, and one that is aborted while another
// thread is inside a call on it lives until that thread has left.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../driver/mutex.hpp"
#include "errors.hpp"
#include "operation.hpp"
#include "segment.hpp"
#include "wait.hpp"

namespace ncclpy::host {

class Stream;
struct Window;

// A PreMulSum operator: the scalar, or where it lies.
struct UserOperator {
  ncclDataType_t dtype;
  uint64_t scalar;
  const void* memory;
};

// Whether an abort has ended a communicator. With splitShare (shrinkShare) the children of a communicator share its
// fate, as they share NCCL's abort flag: aborting one stops what runs on any of them.
struct Fate {
  std::atomic<bool> aborted{false};
  Mutex<NCCLPY_LOCK_FATE> mutex;
  std::vector<std::weak_ptr<Comm>> members;  // that wait for news of it, beside the one that made it
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  int nranks = 0;
  int rank = 0;
  int device = 0;
  ncclConfig_t config = {};
  std::string name;  // the configuration's, or ""
  ncclComm_t handle = nullptr;
  std::shared_ptr<Segment> segment;  // set by the initialisation under `mutex`; from then on read without it
  std::shared_ptr<Comm> parent;      // while this one is made of it: its end is ours
  bool sheds_dead = false;           // made by a shrink: the parent's dead ranks do not matter

  bool blocking() const { return config.blocking != 0; }

  // For messages that all ranks give: what they all call this communicator.
  std::string title() const;

  // What ncclCommGetAsyncError says, and the sentence behind an error.
  ncclResult_t async() const {
    return busy_.load(std::memory_order_acquire) ? ncclInProgress : async_.load(std::memory_order_acquire);
  }
  // As async(), for those who poll.
  ncclResult_t poll();
  // A fault: in progress for so many polls, or, with 0, for so long.
  void pretend_busy(uint64_t polls, double seconds);
  void set_async(ncclResult_t result, const std::string& text = {});
  std::string async_text();
  // NCCL's rule before any use: not while something is in progress, not after an error.
  ncclResult_t ensure_ready();
  // The same before an operation, which a revoked or a suspended communicator does not take either.
  ncclResult_t ensure_open(const char* function);
  // The initialisation is over and what it has filled in may be read by any thread.
  void set_initialised() { initialised_.store(true, std::memory_order_release); }

  // Ends every wait of this rank. Waits until none of its operations touches memory any more.
  void abort();
  // A rank is dead: ends every wait as well, and is what the communicator reports from now on.
  void lose(int dead_rank);
  // Ends the operations, for good; what waits for other ranks otherwise goes on. As abort(), waits until none of them
  // touches memory any more.
  void revoke();
  bool revoked() const { return revoked_.load(std::memory_order_acquire); }
  // A shrink leaves the dead behind: the error that they have caused is over.
  void forgive();
  // Whether nothing of this communicator can come to an end any more.
  bool ended() const {
    return aborted() || lost_.load(std::memory_order_acquire) ||
           (parent && (sheds_dead ? parent->aborted() : parent->ended()));
  }
  bool aborted() const { return fate_->aborted.load(std::memory_order_acquire); }
  // From now on, and before anything was issued, an abort of `other` ends this one as well, and the other way round.
  void share_fate(const std::shared_ptr<Comm>& other);
  // Whether its operations are to stop.
  bool stopped() const { return revoked() || ended(); }
  // Why a wait has ended early, as an error of the calling thread.
  ncclResult_t stop_reason(const char* waited_for);
  void set_segment(std::shared_ptr<Segment> joined);
  std::shared_ptr<Segment> shared_segment();

  // Passes the gate together with all other ranks. False if aborted before it opened.
  bool pass(Gate& gate, uint64_t& generation);
  // The same where all others are known to come without waiting for anything else.
  void pass_surely(Gate& gate, uint64_t& generation);
  // Gives `bytes` to every rank and collects everyone's, in rank order. At most exchange_bytes; blocks.
  ncclResult_t exchange(const void* mine, size_t bytes, void* all);

  // Puts the operations on their streams as one launch. Does not block.
  ncclResult_t issue(std::vector<Operation> operations, const std::vector<cudaStream_t>& streams);
  ncclResult_t issue(const Operation& operation, cudaStream_t stream);
  // Waits until everything issued has run, or for abort.
  void drain();
  // A job in the background is about to work on it, and has done so: an abort waits for that, as NCCL's does.
  void begin_job() { jobs_.fetch_add(1, std::memory_order_seq_cst); }
  void end_job() {
    jobs_.fetch_sub(1, std::memory_order_seq_cst);
    local_.ring();
  }

  // A call is made: the word for it, which everybody can see from now on.
  uint64_t note_call(Deed deed);
  // For missing.hpp: the ranks that are waited for, and the children whose initialisation is under way.
  void await(Side side, std::vector<int> ranks);
  std::vector<int> awaited(Side side);
  std::vector<std::shared_ptr<Comm>> unborn();

  Mutex<NCCLPY_LOCK_STATE> mutex;
  Mutex<NCCLPY_LOCK_CONTROL> control;  // one exchange, split or the like at a time
  std::map<int, UserOperator> operators;
  std::set<void*> registrations;
  std::map<std::vector<int>, int> shrunk_to;  // how often, by the survivors
  uint64_t grown = 0;                         // how often; guarded by control
  bool finalized = false;
  std::atomic<bool> suspended{false};
  bool counted = false;  // among segment->local; guarded by its mutex
  std::map<ncclWindow_t, std::shared_ptr<Window>> windows;

  // The stream tasks' own state, handed from one task to the next in issue order.
  std::map<std::pair<int, int>, uint64_t> signals_taken;  // by peer and counter
  uint64_t data_generation = 0;
  uint64_t collectives_done = 0;
  std::optional<bool> reads_peers;  // can_read_peers, once it was asked

 private:
  struct Launch;
  void run(const Launch& launch);
  void execute(const Operation* operations, size_t count);
  template <class Tell>
  void run_operations(const Operation* operations, size_t count, Tell tell);
  Side note_arrival(const Gate& gate, uint64_t generation);
  uint64_t take_ticket();
  ncclResult_t issue_captured(std::vector<Operation> operations, const std::vector<std::shared_ptr<Stream>>& queues);
  bool enter(uint64_t ticket);
  void leave(uint64_t ticket);
  void ring();

  std::atomic<ncclResult_t> async_{ncclSuccess};
  std::string async_text_;
  std::atomic<bool> initialised_{false};
  std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();
  std::atomic<bool> lost_{false};
  std::atomic<bool> busy_{false};  // by pretend_busy, with the next two, which mutex guards
  uint64_t busy_polls_ = 0;
  std::chrono::steady_clock::time_point busy_until_;
  std::atomic<bool> revoked_{false};
  bool forgiven_ = false;  // guarded by mutex
  std::vector<std::weak_ptr<Comm>> children_;  // being initialised by a split
  Mutex<NCCLPY_LOCK_ISSUING> issuing_;
  std::atomic<uint64_t> issued_{0};
  std::atomic<uint64_t> executed_{0};
  std::atomic<uint32_t> running_{0};
  std::atomic<uint32_t> jobs_{0};
  Bell local_;  // news within this process: a launch has run, abort
  uint64_t control_generation_ = 0;
  std::atomic<uint32_t> calls_[size_t(Deed::deeds)] = {};
  Mutex<NCCLPY_LOCK_AWAITED> awaited_mutex_;
  std::vector<int> awaited_[sides];
  friend std::shared_ptr<Comm> new_child(const std::shared_ptr<Comm>&);
};

// What is said of a dead rank.
std::string death_notice(Segment& segment, int rank);

// A rank of the segment is dead: tells this process's communicators on it.
void break_comms(Segment& segment, int dead_rank);

// Makes a handle for `comm`; NULL handles, handles of destroyed communicators and other nonsense give an error.
ncclComm_t add_handle(const std::shared_ptr<Comm>& comm);
ncclResult_t look_up(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm);
// As look_up, at the beginning of a call, where a fault plan may have its say.
ncclResult_t find_comm(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm);
void remove_handle(ncclComm_t handle);

ncclResult_t check_pointer(const void* pointer, const char* function, const char* name);

// A communicator being made from `parent`; the parent's abort ends its initialisation.
std::shared_ptr<Comm> new_child(const std::shared_ptr<Comm>& parent);

// Runs a collective, on the stream's thread.
void run_collective(Comm& comm, const Operation& operation);

}  // namespace ncclpy::host
