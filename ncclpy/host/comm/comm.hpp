// One rank's communicator: its health, the queue of its launches, its rendezvous with the other ranks, and what it owns.
//
// Handles are numbers in a checked table; a destroyed communicator is recognised, and one that is aborted while another
// thread is inside a call on it lives until that thread has left.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/mutex.hpp"
#include "health.hpp"
#include "queue.hpp"
#include "rendezvous.hpp"
#include "segment/call_kind.hpp"
#include "segment/segment.hpp"
#include "transfer_tuner.hpp"

namespace ncclpy::host {

class MemoryUse;
struct Window;

// A buffer that is registered.
struct Registration {
  const void* memory;
  size_t bytes;
  std::shared_ptr<const MemoryUse> memory_use;  // with checks
};

// A PreMulSum operator: the scalar, or where it lies.
struct UserOperator {
  ncclDataType_t dtype;
  uint64_t scalar;
  const void* memory;
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
  Health health;
  Queue queue{health};
  Rendezvous rendezvous{health};

  bool blocking() const { return config.blocking != 0; }

  // For messages that all ranks give: what they all call this communicator.
  std::string title() const;

  // Ends every wait of this rank. Waits until none of its operations touches memory any more.
  void abort();
  // A rank is dead: ends every wait as well, and is what the communicator reports from now on.
  void mark_lost(int dead_rank);
  // Ends the operations, for good; what waits for other ranks otherwise goes on. As abort(), waits until none of them
  // touches memory any more.
  void revoke();
  // From now on, and before anything was issued, an abort of `other` ends this one as well, and the other way round.
  void share_abort(const std::shared_ptr<Comm>& other);
  // Why a wait has ended early, as an error of the calling thread.
  ncclResult_t stop_reason(const char* waited_for);
  void set_segment(std::shared_ptr<Segment> joined);
  std::shared_ptr<Segment> shared_segment();

  // A call is made: the word for it, which everybody can see from now on.
  uint64_t note_call(CallKind kind);
  // For stragglers.hpp: the ranks that are waited for, and the children whose initialisation is under way.
  void set_awaited(Side side, std::vector<int> ranks);
  std::vector<int> awaited(Side side);
  std::vector<std::shared_ptr<Comm>> initialising_children();

  Mutex<NCCLPY_LOCK_STATE> mutex;
  Mutex<NCCLPY_LOCK_CONTROL> control;  // one exchange, split or the like at a time
  std::map<int, UserOperator> operators;
  std::map<void*, Registration> registrations;
  std::map<std::vector<int>, int> shrunk_to;  // how often, by the survivors
  uint64_t grown = 0;                         // how often; guarded by control
  bool finalized = false;
  bool disconnected = false;  // its end has begun, or it was revoked: with strict_ends, NCCL asks no peer any more
  bool counted = false;  // among segment->local; guarded by its mutex
  std::map<ncclWindow_t, std::shared_ptr<Window>> windows;

  // The stream tasks' own state, handed from one task to the next in issue order.
  std::map<std::pair<int, int>, uint64_t> signals_taken;  // by peer and counter
  std::optional<bool> reads_peers;  // see peer_memory.hpp, once it was asked
  TransferTuner tuner;

 private:
  void notify_waiters();

  std::vector<std::weak_ptr<Comm>> children_;  // being initialised by a split
  std::atomic<uint32_t> calls_[size_t(CallKind::kinds)] = {};
  Mutex<NCCLPY_LOCK_AWAITED> awaited_mutex_;
  std::vector<int> awaited_[sides];
  friend std::shared_ptr<Comm> new_child(const std::shared_ptr<Comm>&);
};

// What is said of a dead rank.
std::string death_notice(Segment& segment, int rank);

// A rank of the segment is dead: tells this process's communicators on it.
void mark_comms_lost(Segment& segment, int dead_rank);

// Makes a handle for `comm`; NULL handles, handles of destroyed communicators and other nonsense give an error.
ncclComm_t add_handle(const std::shared_ptr<Comm>& comm);
ncclResult_t look_up(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm);
void remove_handle(ncclComm_t handle);
// Those of this process that have a handle.
std::vector<std::shared_ptr<Comm>> all_comms();

ncclResult_t check_pointer(const void* pointer, const char* function, const char* name);

// A communicator being made from `parent`; the parent's abort ends its initialisation.
std::shared_ptr<Comm> new_child(const std::shared_ptr<Comm>& parent);

}  // namespace ncclpy::host
