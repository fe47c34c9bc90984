// The state of one rank's communicator: whether it may be used, what has gone wrong, and whether it has ended.
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

// Whether communicators were aborted. With splitShare (shrinkShare) the children of a communicator share this flag, as
// they share NCCL's abort flag: aborting one stops what runs on any of them.
struct SharedAbort {
  std::atomic<bool> aborted{false};
  Mutex<NCCLPY_LOCK_SHARED_ABORT> mutex;
  std::vector<std::weak_ptr<Comm>> members;  // the communicators that share this object; none if only one has it
};

class Health {
 public:
  bool ignores_dead_ranks = false;  // made by a shrink: dead ranks of the parent do not matter

  // The result of ncclCommGetAsyncError; async_text() explains an error.
  ncclResult_t async() {
    if (has_disagreement()) adopt_disagreement();
    return busy_.load(std::memory_order_acquire) ? ncclInProgress : async_.load(std::memory_order_acquire);
  }
  // Like async(); the call counts as a poll of pretend_busy.
  ncclResult_t poll();
  // Injected fault: reports ncclInProgress for `polls` polls or, if that is 0, for `seconds`.
  void pretend_busy(uint64_t polls, double seconds);
  // Sets the result of async(), by the precedence that health.cpp describes.
  void set_async(ncclResult_t result, const std::string& text = {});
  // Called when a call continues in the background, and when it has ended. Meanwhile the communicator is in progress.
  void begin_progress();
  void end_progress(ncclResult_t result, const std::string& text);
  std::string async_text();
  // NCCL's check before any use: returns an error while a call is in progress, and after an error.
  ncclResult_t ensure_ready();
  // As ensure_ready, but also returns an error if the communicator is revoked or suspended: for operations.
  ncclResult_t ensure_open(const char* function);
  // Called at the end of the initialisation: from now on any thread may read what it has filled in.
  void set_initialised() { initialised_.store(true, std::memory_order_release); }
  bool initialised() const { return initialised_.load(std::memory_order_acquire); }
  // Sets the place where ranks report that they do not agree.
  void observe(const Disagreement* disagreement) { disagreement_.store(disagreement, std::memory_order_release); }
  bool has_disagreement() const {
    const Disagreement* const disagreement = disagreement_.load(std::memory_order_acquire);
    return disagreement != nullptr && disagreement->is_reported();
  }
  void set_suspended(bool suspended) { suspended_.store(suspended); }
  bool suspended() const { return suspended_.load(); }

  // While this communicator is initialised from another one, the end of `parent` ends it too.
  void follow(const Health* parent) { parent_.store(parent, std::memory_order_release); }
  void set_aborted() { shared_abort_->aborted.store(true, std::memory_order_seq_cst); }
  void set_revoked() { revoked_.store(true, std::memory_order_seq_cst); }
  // Records a dead rank; `notice` is the error text. Returns false if a rank was dead before.
  bool set_lost(const std::string& notice);
  // Clears the error of a dead rank: a shrink excludes dead ranks.
  void clear_remote_error();

  bool aborted() const { return shared_abort_->aborted.load(std::memory_order_acquire); }
  bool revoked() const { return revoked_.load(std::memory_order_acquire); }
  // Whether this communicator was aborted, has a dead rank or, while it is initialised from a parent, the parent has
  // ended: all its waits for ranks then end.
  bool ended() const {
    if (aborted() || lost_.load(std::memory_order_acquire)) return true;
    const Health* const parent = parent_.load(std::memory_order_acquire);
    return parent != nullptr && (ignores_dead_ranks ? parent->aborted() : parent->ended());
  }
  // Whether this communicator's operations must stop.
  bool stopped() const { return revoked() || has_disagreement() || ended(); }
  // Whether an abort or a revoke has ended the operations. An operation that cannot complete for another reason (a
  // dead rank, ranks that do not agree) hangs until an abort or a revoke, as a kernel of NCCL does.
  bool is_released() const { return aborted() || revoked(); }
  bool hangs_on_dead_rank() const { return lost_.load(std::memory_order_acquire) && !is_released(); }
  // Whether this communicator, which is being initialised, has ended because its parent has ended. Always false for
  // the child of a shrink.
  bool ends_with_parent() const {
    const Health* const parent = parent_.load(std::memory_order_acquire);
    return parent != nullptr && parent->ended() && !ignores_dead_ranks;
  }

  // Makes an abort of `other` abort this communicator as well, and vice versa. Must precede the first operation.
  void share_abort(const Health& other) { shared_abort_ = other.shared_abort_; }
  SharedAbort& shared_abort() { return *shared_abort_; }

 private:
  // Makes the reported disagreement this communicator's error, unless it has one.
  void adopt_disagreement();
  void set_async_locked(ncclResult_t result, const std::string& text);

  // Guards changes of async_, its text, remote_error_cleared_, and the fields of progress and pretend_busy.
  Mutex<NCCLPY_LOCK_STATE> mutex_;
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
  std::atomic<bool> busy_{false};  // pretend_busy is in effect, as long as the next two fields say
  uint64_t busy_polls_ = 0;
  std::chrono::steady_clock::time_point busy_until_;
};

}  // namespace ncclpy::host
