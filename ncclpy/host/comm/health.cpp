// A later error replaces an earlier one, but no error replaces that of a dead rank. Only clear_remote_error() clears
// an error; ncclInProgress is temporary.
#include "health.hpp"

#include <mutex>

namespace ncclpy::host {

void Health::set_async(ncclResult_t result, const std::string& text) {
  std::lock_guard lock(mutex_);
  set_async_locked(result, text);
}

void Health::begin_progress() {
  std::lock_guard lock(mutex_);
  in_progress_++;
  set_async_locked(ncclInProgress, {});
}

void Health::end_progress(ncclResult_t result, const std::string& text) {
  std::lock_guard lock(mutex_);
  if (--in_progress_ == 0 || result != ncclSuccess) set_async_locked(result, text);
}

void Health::set_async_locked(ncclResult_t result, const std::string& text) {
  // The error of a dead rank is never replaced.
  if (async_.load(std::memory_order_relaxed) == ncclRemoteError && !remote_error_cleared_) return;
  // The end of a background call does not clear an error, and its begin does not hide one.
  const ncclResult_t now = async_.load(std::memory_order_relaxed);
  if (result == ncclSuccess && now != ncclInProgress) return;
  if (result == ncclInProgress && now != ncclSuccess) return;
  if (!text.empty()) async_text_ = text;
  async_.store(result, std::memory_order_release);
}

ncclResult_t Health::poll() {
  if (busy_.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex_);
    const bool over = busy_polls_ > 0 ? --busy_polls_ == 0 : std::chrono::steady_clock::now() >= busy_until_;
    if (!over) return ncclInProgress;
    busy_.store(false, std::memory_order_release);
  }
  return async();
}

void Health::pretend_busy(uint64_t polls, double seconds) {
  std::lock_guard lock(mutex_);
  // `polls` polls return ncclInProgress; the next poll, which ends the state, is counted as well.
  busy_polls_ = polls > 0 ? polls + 1 : 0;
  busy_until_ = std::chrono::steady_clock::now() +
                std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  busy_.store(true, std::memory_order_release);
}

std::string Health::async_text() {
  std::lock_guard lock(mutex_);
  return async_text_;
}

void Health::adopt_disagreement() {
  const ncclResult_t now = async_.load(std::memory_order_acquire);
  if (now != ncclSuccess && now != ncclInProgress) return;
  set_async(ncclInvalidUsage, disagreement_.load(std::memory_order_acquire)->text());
}

ncclResult_t Health::ensure_ready() {
  const ncclResult_t now = async();
  if (now == ncclInProgress || (now == ncclSuccess && !initialised()))
    return fail(ncclInvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
  if (now != ncclSuccess) set_last_error(async_text());
  return now;
}

ncclResult_t Health::ensure_open(const char* function) {
  if (revoked()) return fail(ncclInvalidUsage, "%s : communicator was revoked", function);
  NCCLPY_TRY(ensure_ready());
  if (suspended())
    return fail(ncclInvalidUsage, "%s : communicator is suspended, call ncclCommResume first", function);
  return ncclSuccess;
}

bool Health::set_lost(const std::string& notice) {
  if (lost_.load(std::memory_order_acquire)) return false;
  set_async(ncclRemoteError, notice);
  lost_.store(true, std::memory_order_seq_cst);
  return true;
}

void Health::clear_remote_error() {
  std::lock_guard lock(mutex_);
  remote_error_cleared_ = true;
  if (async_.load(std::memory_order_relaxed) == ncclRemoteError) async_.store(ncclSuccess, std::memory_order_release);
}

}  // namespace ncclpy::host
