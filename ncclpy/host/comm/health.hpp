// How one rank's communicator is: whether it may be used, what has gone wrong with it, and whether it is at its end.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/mutex.hpp"
#include "segment/disagreement.hpp"

namespace ncclpy::host {

class Comm;

// Whether an abort has ended a communicator. With splitShare (shrinkShare) the children of a communicator share its
// fate, as they share NCCL's abort flag: aborting one stops what runs on any of them.
struct SharedAbort {
  std::atomic<bool> aborted{false};
  Mutex<NCCLPY_LOCK_FATE> mutex;
  std::vector<std::weak_ptr<Comm>> members;  // that wait for news of it, beside the one that made it
};

class Health {
 public:
  bool ignores_dead_ranks = false;  // made by a shrink: the parent's dead ranks do not matter

  // What ncclCommGetAsyncError says, and the sentence behind an error.
  ncclResult_t async() {
    if (has_disagreement()) adopt_disagreement();
    return busy_.load(std::memory_order_acquire) ? ncclInProgress : async_.load(std::memory_order_acquire);
  }
  // As async(), for those who poll.
  ncclResult_t poll();
  // A fault: in progress for so many polls, or, with 0, for so long.
  void pretend_busy(uint64_t polls, double seconds);
  void set_async(ncclResult_t result, const std::string& text = {});
  // A call goes on in the background, and has ended. While others still do, it is in progress.
  void begin_progress();
  void end_progress(ncclResult_t result, const std::string& text);
  std::string async_text();
  // NCCL's rule before any use: not while something is in progress, not after an error.
  ncclResult_t ensure_ready();
  // The same before an operation, which a revoked or a suspended communicator does not take either.
  ncclResult_t ensure_open(const char* function);
  // The initialisation is over and what it has filled in may be read by any thread.
  void set_initialised() { initialised_.store(true, std::memory_order_release); }
  bool initialised() const { return initialised_.load(std::memory_order_acquire); }
  // Where the ranks tell each other that they do not agree.
  void observe(const Disagreement* disagreement) { disagreement_.store(disagreement, std::memory_order_release); }
  bool has_disagreement() const {
    const Disagreement* const disagreement = disagreement_.load(std::memory_order_acquire);
    return disagreement != nullptr && disagreement->is_reported();
  }
  void set_suspended(bool suspended) { suspended_.store(suspended); }
  bool suspended() const { return suspended_.load(); }

  // While it is made of another one, whose end is its end.
  void follow(const Health* parent) { parent_.store(parent, std::memory_order_release); }
  void set_aborted() { shared_abort_->aborted.store(true, std::memory_order_seq_cst); }
  void set_revoked() { revoked_.store(true, std::memory_order_seq_cst); }
  // A rank is dead, of which `notice` tells. False if one was before.
  bool set_lost(const std::string& notice);
  // A shrink leaves the dead behind: the error that they have caused is over.
  void clear_remote_error();

  bool aborted() const { return shared_abort_->aborted.load(std::memory_order_acquire); }
  bool revoked() const { return revoked_.load(std::memory_order_acquire); }
  // Whether nothing of this communicator can come to an end any more.
  bool ended() const {
    if (aborted() || lost_.load(std::memory_order_acquire)) return true;
    const Health* const parent = parent_.load(std::memory_order_acquire);
    return parent != nullptr && (ignores_dead_ranks ? parent->aborted() : parent->ended());
  }
  // Whether its operations are to stop.
  bool stopped() const { return revoked() || has_disagreement() || ended(); }
  // Whether a rank is dead and nothing else has ended it: what waits for that rank waits on, as a kernel of NCCL does.
  bool hangs_on_dead_rank() const {
    return lost_.load(std::memory_order_acquire) && !aborted() && !revoked() && !has_disagreement();
  }
  // Whether its end is its parent's.
  bool ends_with_parent() const {
    const Health* const parent = parent_.load(std::memory_order_acquire);
    return parent != nullptr && parent->ended() && !ignores_dead_ranks;
  }

  // From now on, and before anything was issued, an abort of `other` ends this one as well, and the other way round.
  void share_abort(const Health& other) { shared_abort_ = other.shared_abort_; }
  SharedAbort& shared_abort() { return *shared_abort_; }

 private:
  // Makes what was told this communicator's error, unless it has one.
  void adopt_disagreement();
  void set_async_locked(ncclResult_t result, const std::string& text);

  Mutex<NCCLPY_LOCK_STATE> mutex_;  // guards the text, and changes of what is not atomic
  std::atomic<ncclResult_t> async_{ncclSuccess};
  std::string async_text_;
  int in_progress_ = 0;  // calls in the background; guarded by mutex_
  std::atomic<bool> initialised_{false};
  std::shared_ptr<SharedAbort> shared_abort_ = std::make_shared<SharedAbort>();
  std::atomic<const Health*> parent_{nullptr};
  std::atomic<const Disagreement*> disagreement_{nullptr};
  std::atomic<bool> lost_{false};
  std::atomic<bool> revoked_{false};
  std::atomic<bool> suspended_{false};
  bool remote_error_cleared_ = false;
  std::atomic<bool> busy_{false};  // by pretend_busy, with the next two
  uint64_t busy_polls_ = 0;
  std::chrono::steady_clock::time_point busy_until_;
};

}  // namespace ncclpy::host
