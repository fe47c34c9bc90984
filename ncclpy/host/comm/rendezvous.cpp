// Records, barriers and exchanges.
#include "rendezvous.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/wait.hpp"
#include "segment/abort_corruption.hpp"

namespace ncclpy::host {
namespace {
// polls after which a waiting rank looks for a mismatch, or waits only for the record space that it needs now
constexpr int few_polls = 64;
}

// leave() does not publish the lower count: after an abort nothing follows, and after a suspension the resuming thread
// arrives again.
void Rendezvous::arrive(Side side) {
  segment_->slot(rank_).arrived[side].store(++arrivals_[side], std::memory_order_relaxed);
}

void Rendezvous::describe() {
  Header& header = segment_->header();
  RankSlot& slot = segment_->slot(rank_);
  PlacedRecord& record = slot.placed[next_place()];
  described_++;
  arrive(data_side);
  record.passed = slot.passed.load(std::memory_order_relaxed);
  record.number.store(described_, std::memory_order_release);
  // The fence ensures two things. If two ranks describe at the same time, at least one sees the other's record, and so
  // finds that all are described, and notifies. And a thread that falls asleep is either seen here or sees this
  // record.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (header.record_waiters.load(std::memory_order_relaxed) != 0) segment_->notify_all();
  PlacedRecord& next = slot.placed[next_place()];
  prefetch_for_write(&next);
  prefetch_for_write(next.inline_data);
}

// The order matters: a rank that sees `passed` must also see the record.
void Rendezvous::post_record() {
  describe();
  segment_->slot(rank_).passed.store(described_, std::memory_order_release);
  segment_->header().changed.notify();
}

template <class Done>
WaitResult Rendezvous::pass_barrier(Barrier& barrier, uint64_t& generation, Side side, Done done) {
  const uint64_t target = ++generation * uint64_t(segment_->nranks());
  FutexEvent& changed = segment_->header().changed;
  arrive(side);
  if (barrier.arrive(target)) {
    changed.notify();
    return WaitResult::ok;
  }
  // A revoked communicator can still be split: a revoke ends only the waits of operations.
  const auto ended = [&] {
    return side == data_side ? health_.stopped() : health_.has_disagreement() || health_.ended();
  };
  const auto corrupted = [&] { return side == data_side && is_corrupted(*segment_, rank_, described_); };
  wait_until(changed, segment_->spin(),
             [&] { return barrier.open(target) || ended() || corrupted() || WaitControl::must_leave() || done(); });
  if (barrier.open(target) || !barrier.withdraw(target)) return WaitResult::ok;
  generation--;
  leave(side);
  if (ended()) return WaitResult::ended;
  return corrupted() ? WaitResult::corrupted : WaitResult::suspended;
}

WaitResult Rendezvous::meet(Comm& comm, Agree agree) {
  if (!std::exchange(waiting_, true)) describe();
  const WaitResult result = await_described(comm, agree, [] { return false; });
  if (result != WaitResult::ok) return result;
  waiting_ = false;
  return agree_on_all(comm, agree) ? WaitResult::ok : WaitResult::ended;
}

// A rank that does not agree with the root waits for all ranks, and learns of the mismatch then.
WaitResult Rendezvous::meet_root(int root, Comm& comm, HasSameRecord has_same_record, Agree agree) {
  if (!std::exchange(waiting_, true)) describe();
  bool root_agrees = false;
  const WaitResult result = await_described(comm, agree, [&] {
    if (number_of(root, described_) == described_) root_agrees = has_same_record(comm, described_, root);
    return root_agrees;
  });
  if (result != WaitResult::ok) return result;
  waiting_ = false;
  return root_agrees || agree_on_all(comm, agree) ? WaitResult::ok : WaitResult::ended;
}

WaitResult Rendezvous::meet_at_barrier(Comm& comm, Agree agree) {
  if (!std::exchange(waiting_, true)) {
    describe();
    segment_->header().changed.notify_after_fence();
  }
  // A rank that does not agree may never arrive at the barrier: its call may be an inline one, or it has ended in an
  // earlier collective.
  bool agreed = true;
  int polls = 0;
  const WaitResult result = pass_barrier(segment_->header().data, data_generation_, data_side, [&] {
    if (++polls <= few_polls || !have_mismatch(comm, agree)) return false;
    mark_disagreed();
    agreed = false;
    return true;
  });
  if (result != WaitResult::ok) {
    if (!agreed || result == WaitResult::corrupted) waiting_ = false;
    return agreed ? result : WaitResult::ended;
  }
  waiting_ = false;
  return agree_on_all(comm, agree) ? WaitResult::ok : WaitResult::ended;
}

// While a rank overwrites the record of a collective that it has passed, the place has no number; so `passed` is
// checked as well.
bool Rendezvous::all_have(uint64_t number) const {
  for (int rank = 0; rank < segment_->nranks(); rank++) {
    if (number_of(rank, number) >= number) continue;
    if (segment_->slot(rank).passed.load(std::memory_order_acquire) < number) return false;
  }
  return true;
}

bool Rendezvous::agrees(uint64_t number, Comm& comm, Agree agree) {
  if (agree(comm, number)) return true;
  mark_disagreed();
  return false;
}

// Wakes the other ranks: they may wait for an arrival that this rank will not make, and find the mismatch when they
// compare the records.
void Rendezvous::mark_disagreed() {
  disagreed_.store(true, std::memory_order_relaxed);
  segment_->notify_all();
}

bool Rendezvous::have_mismatch(Comm& comm, Agree agree) const {
  for (uint64_t number = agreed_ + 1; number <= described_ && all_have(number); number++) {
    if (!agree(comm, number)) return true;
  }
  return false;
}

// A waiting rank compares the records of collectives from which it continued: another rank that did not agree on one
// of them will not arrive.
template <class Enough>
WaitResult Rendezvous::await_described(Comm& comm, Agree agree, Enough enough) {
  Header& header = segment_->header();
  int rank = 0;
  const auto all_are_here = [&] {
    for (; rank < segment_->nranks(); rank++) {
      if (number_of(rank, described_) != described_) return false;
    }
    // Records that were found first may have been withdrawn meanwhile.
    for (rank = 0; rank < segment_->nranks(); rank++) {
      if (number_of(rank, described_) != described_) return false;
    }
    return true;
  };
  if (all_are_here()) {  // the last rank to arrive notifies sleeping ones
    header.changed.notify_after_fence();
    return WaitResult::ok;
  }
  bool ready = enough(), agreed = true;
  if (ready) return WaitResult::ok;
  int polls = 0;
  const auto corrupted = [&] { return is_corrupted(*segment_, rank_, described_); };
  wait_until(header.changed, segment_->spin(), [&] {
    ready = all_are_here() || enough();
    if (!ready && ++polls > few_polls) agreed = catch_up(comm, agree);
    return ready || !agreed || health_.stopped() || corrupted() || WaitControl::must_leave();
  });
  if (ready) return WaitResult::ok;
  if (!agreed) waiting_ = false;
  if (!agreed || health_.stopped()) return WaitResult::ended;
  if (!corrupted()) return WaitResult::suspended;
  waiting_ = false;
  return WaitResult::corrupted;
}

// Called once all ranks have described the collective. After a mismatch the collective is not passed, and nothing
// later runs.
bool Rendezvous::agree_on_all(Comm& comm, Agree agree) {
  uint64_t passed = described_;
  for (int rank = 0; rank < segment_->nranks(); rank++) {
    passed = std::min(passed, segment_->slot(rank).placed[place_of(described_)].passed);
  }
  for (; agreed_ < described_; agreed_++) {
    if (!agrees(agreed_ + 1, comm, agree)) return false;
  }
  all_passed_ = std::max(all_passed_, passed);
  return true;
}

// A rank that has not seen the record waits for this rank as for one that has not arrived; a rank that has seen it has
// all that it needs. The records of children that end with this communicator are not withdrawn: their contributions
// are complete.
void Rendezvous::withdraw_record() {
  if (waiting_) segment_->slot(rank_).placed[place_of(described_)].number.store(0, std::memory_order_relaxed);
}

void Rendezvous::mark_passed() {
  Header& header = segment_->header();
  segment_->slot(rank_).passed.store(described_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // a sleeping thread is seen here, or sees `passed`
  if (header.record_waiters.load(std::memory_order_relaxed) != 0) header.changed.notify_after_fence();
}

bool Rendezvous::catch_up(Comm& comm, Agree agree) {
  while (is_ahead() && all_have(agreed_ + 1)) {
    if (!agrees(agreed_ + 1, comm, agree)) return false;
    agreed_++;
  }
  return true;
}

WaitResult Rendezvous::await_record_space(size_t bytes, Comm& comm, Agree agree) {
  if (has_disagreed()) return WaitResult::ended;
  const uint64_t next = described_ + 1, depth = bytes <= record_inline_bytes ? record_places : inline_buffers;
  if (next <= all_passed_ + depth) return WaitResult::ok;
  // For some polls waits for more places than needed, so that it reads less often what other ranks write: such a read
  // costs both sides.
  const uint64_t needed = next - depth;
  const WaitResult result = await_passed(needed + depth / 2 - 1, needed, next, comm, agree);
  // for this rank alone the collective is complete, and has used its number
  if (result == WaitResult::corrupted) described_++;
  return result;
}

WaitResult Rendezvous::await_all_passed(Comm& comm, Agree agree) {
  return has_disagreed() ? WaitResult::ended : await_passed(described_, described_, 0, comm, agree);
}

WaitResult Rendezvous::await_passed(uint64_t wanted, uint64_t needed, uint64_t next, Comm& comm, Agree agree) {
  Header& header = segment_->header();
  bool agreed = true;
  // Reads what other ranks have passed before it compares their records, which they may overwrite afterwards.
  const auto have_passed = [&](uint64_t number) {
    uint64_t passed = described_;
    for (int rank = 0; rank < segment_->nranks(); rank++) {
      if (rank != rank_) passed = std::min(passed, segment_->slot(rank).passed.load(std::memory_order_acquire));
    }
    agreed = catch_up(comm, agree);
    all_passed_ = std::max(all_passed_, std::min<uint64_t>(passed, agreed_));
    return !agreed || all_passed_ >= number;
  };
  const auto corrupted = [&] { return is_corrupted(*segment_, rank_, next); };
  if (!have_passed(needed)) {
    header.record_waiters.fetch_add(1, std::memory_order_seq_cst);
    int polls = 0;
    wait_until(header.changed, segment_->spin(), [&] {
      return have_passed(++polls < few_polls ? wanted : needed) || health_.stopped() || corrupted() ||
             WaitControl::must_leave();
    });
    header.record_waiters.fetch_sub(1, std::memory_order_relaxed);
  }
  if (!agreed) return WaitResult::ended;
  if (all_passed_ >= needed) return WaitResult::ok;
  if (health_.stopped()) return WaitResult::ended;
  return corrupted() ? WaitResult::corrupted : WaitResult::suspended;
}

WaitResult Rendezvous::data_barrier() {
  return pass_barrier(segment_->header().data, data_generation_, data_side, [] { return false; });
}

WaitResult Rendezvous::await_end() {
  const auto corrupted = [&] { return is_corrupted(*segment_, rank_, described_); };
  wait_until(segment_->header().changed,
             [&] { return health_.stopped() || corrupted() || WaitControl::must_leave(); });
  if (health_.stopped()) return WaitResult::ended;
  return corrupted() ? WaitResult::corrupted : WaitResult::suspended;
}

void Rendezvous::data_barrier_uninterruptible() {
  Barrier& barrier = segment_->header().data;
  const uint64_t target = ++data_generation_ * uint64_t(segment_->nranks());
  FutexEvent& changed = segment_->header().changed;
  arrive(data_side);
  if (barrier.arrive(target)) return changed.notify();
  wait_until(changed, segment_->spin(), [&] { return barrier.open(target); });
}

bool Rendezvous::exchange(const void* mine, size_t bytes, void* all, Comm& comm, Agree agree) {
  const auto finds_disagreement = [&] {
    if (health_.revoked() || !have_mismatch(comm, agree)) return false;
    segment_->notify_all();
    return true;
  };
  // Checked before arriving as well: ranks that have not compared yet must not take this rank for one that agrees.
  if (finds_disagreement()) return false;
  const int parity = int((control_generation_ + 1) & 1);
  std::memcpy(segment_->slot(rank_).exchange[parity], mine, bytes);
  int polls = 0;
  const auto gives_up = [&] { return ++polls > few_polls && finds_disagreement(); };
  const WaitResult result = pass_barrier(segment_->header().control, control_generation_, control_side, gives_up);
  if (result != WaitResult::ok) return false;
  for (int r = 0; r < segment_->nranks(); r++) {
    std::memcpy(static_cast<char*>(all) + size_t(r) * bytes, segment_->slot(r).exchange[parity], bytes);
  }
  return true;
}

}  // namespace ncclpy::host
