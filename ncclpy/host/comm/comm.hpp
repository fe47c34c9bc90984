// One rank's communicator: its health, the queue of its launches, its rendezvous with the other ranks, and what it
// owns.
//
// Handles are numbers in a checked table: the handle of a destroyed communicator is recognised, and a communicator
// that is aborted while another thread is inside a call on it lives until that thread has returned.
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

// A registered buffer.
struct Registration {
  const void* memory;
  size_t bytes;
  std::shared_ptr<const MemoryUse> memory_use;  // with NCCLPY_HOST_CHECKS=1
};

// A PreMulSum operator: the scalar, or its address.
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
  std::shared_ptr<Segment> segment;  // set by the initialisation under `mutex`; read without it afterwards
  std::shared_ptr<Comm> parent;      // while this one is initialised from it: the parent's end ends it too
  Health health;
  Queue queue{health};
  Rendezvous rendezvous{health};

  bool blocking() const { return config.blocking != 0; }

  // Names the communicator in error texts: the same text on all ranks.
  std::string title() const;

  // Ends every wait of this rank. Returns when none of its operations touches memory any more and no background job
  // works on the communicator.
  void abort();
  // Records a dead rank, which the communicator reports from now on, and ends the waits of its calls.
  void mark_lost(int dead_rank);
  // Ends the operations for good; other waits for ranks continue. Returns, as abort(), when no operation touches
  // memory any more.
  void revoke();
  // Makes an abort of `other` abort this communicator as well, and vice versa. Must precede the first operation.
  void share_abort(const std::shared_ptr<Comm>& other);
  // Sets the calling thread's error to the reason why a wait has ended early, and returns its result code.
  ncclResult_t stop_reason(const char* waited_for);
  void set_segment(std::shared_ptr<Segment> joined);
  // The segment, nullptr before set_segment(): for threads that may run during the initialisation.
  std::shared_ptr<Segment> shared_segment();

  // Records a call and returns its word. All ranks can read the word from now on.
  uint64_t note_call(CallKind kind);
  // For stragglers.hpp: the ranks that this rank waits for, and the children that are being initialised.
  void set_awaited(Side side, std::vector<int> ranks);
  std::vector<int> awaited(Side side);
  std::vector<std::shared_ptr<Comm>> initialising_children();

  Mutex<NCCLPY_LOCK_STATE> mutex;
  Mutex<NCCLPY_LOCK_CONTROL> control;  // held by one control call (exchange, split and the like) at a time
  std::map<int, UserOperator> operators;
  std::map<void*, Registration> registrations;
  std::map<std::vector<int>, int> shrunk_to;  // number of shrinks, by survivors
  uint64_t grown = 0;                         // number of grows; guarded by control
  bool finalized = false;
  bool disconnected = false;  // finalised or revoked: NCCL then asks no peer to deregister, see check_deregister()
  bool in_local_list = false;  // in segment->local, and depart() was not called yet; guarded by segment->mutex
  std::map<ncclWindow_t, std::shared_ptr<Window>> windows;

  // State of the stream tasks, handed from one task to the next in the order of issue.
  std::map<std::pair<int, int>, uint64_t> signals_taken;  // by peer and counter
  std::optional<bool> reads_peers;  // result of peer_memory.hpp's reads_peers, once known
  TransferTuner tuner;

 private:
  void notify_waiters();

  std::vector<std::weak_ptr<Comm>> children_;  // all that a split, shrink or grow has made from this communicator
  std::atomic<uint32_t> calls_[size_t(CallKind::kinds)] = {};
  Mutex<NCCLPY_LOCK_AWAITED_RANKS> awaited_mutex_;
  std::vector<int> awaited_[sides];
  friend std::shared_ptr<Comm> new_child(const std::shared_ptr<Comm>&);
};

// The text that reports a dead rank.
std::string death_notice(Segment& segment, int rank);

// Records a dead rank in all communicators of this process on the segment.
void mark_comms_lost(Segment& segment, int dead_rank);

// Makes a handle for `comm`. look_up gives an error for NULL, for handles of destroyed communicators and for invalid
// values.
ncclComm_t add_handle(const std::shared_ptr<Comm>& comm);
ncclResult_t look_up(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm);
void remove_handle(ncclComm_t handle);
// All communicators of this process that have a handle.
std::vector<std::shared_ptr<Comm>> all_comms();

ncclResult_t check_pointer(const void* pointer, const char* function, const char* name);

// Makes a communicator to be initialised from `parent`: the end of the parent (of a shrink's parent: an abort) ends
// the initialisation.
std::shared_ptr<Comm> new_child(const std::shared_ptr<Comm>& parent);

}  // namespace ncclpy::host
