// Where the ranks of a communicator wait for each other: through the records of their collectives, at barriers in the
// shared memory, and in exchanges of small values.
//
// Collectives are numbered. A rank describes its next collective by a record, followed by its number, in the next of
// its places; an inline contribution lies beside the record. A rank that needs nothing from the others, such as the
// root of a small broadcast, continues at once. A rank that needs only the root continues once the root has described
// the same collective. Other ranks wait until all have described theirs, and compare the records. A rank has passed a
// collective when it needs nothing more of it.
//
// A rank overwrites its record and contribution only when all ranks have passed the collective and it has compared the
// records itself: a rank that continued without waiting compares them later, before it counts the collective as passed
// by all. So the ranks agreed on every overwritten record, and a mismatched record stays until all ranks have found
// it. A rank that has found a mismatch runs no later collective.
#pragma once

#include "health.hpp"
#include "segment/segment.hpp"

namespace ncclpy::host {

enum class WaitResult {
  ok,
  ended,      // the communicator has stopped, or the ranks do not agree, so the rank runs nothing more
  suspended,  // the calling thread's time limit has passed: the rank has not arrived
  // completed without the other ranks, as another rank's abort ends collectives on GPUs: see abort_corruption.hpp
  corrupted,
};

// Whether the ranks agree on a collective that all have described. A mismatch becomes the communicator's async error.
using Agree = bool (*)(Comm& comm, uint64_t number);
// Whether another rank's record of a collective equals this rank's; the record must not have been overwritten.
using HasSameRecord = bool (*)(Comm& comm, uint64_t number, int rank);

class Rendezvous {
 public:
  explicit Rendezvous(const Health& health) : health_(health) {}
  // Must precede any other use.
  void join(Segment& segment, int rank) {
    segment_ = &segment;
    rank_ = rank;
  }

  // The place of the next collective's record.
  int next_place() const { return place_of(described_ + 1); }
  // Waits until that place may be written, and an inline buffer of `bytes` with it. The result is `ended` also if the
  // ranks have not agreed on a collective from which this rank continued without waiting.
  WaitResult await_record_space(size_t bytes, Comm& comm, Agree agree);
  // After the record is written: tells the other ranks, and continues without waiting for theirs.
  void post_record();
  // After the record is written: tells the other ranks, and waits for theirs. The result is `ended` also if the ranks
  // do not agree. After `suspended` the next call resumes the wait, since other ranks may have read the record.
  WaitResult meet(Comm& comm, Agree agree);
  // Like meet(), but waits only until the root has described the same collective.
  WaitResult meet_root(int root, Comm& comm, HasSameRecord has_same_record, Agree agree);
  // Like meet(), for ranks that access each other's memory afterwards. The last rank to arrive opens the barrier, so
  // either all ranks go through, even if one of them is ended, or none does.
  WaitResult meet_at_barrier(Comm& comm, Agree agree);
  bool is_waiting() const { return waiting_; }
  // Withdraws the record of a rank that has stopped and runs nothing any more, if the rank still waits for others'
  // records.
  void withdraw_record();
  // Marks the last described collective as passed by this rank.
  void mark_passed();
  // Waits until all other ranks have passed what this rank has described. All ranks must call it.
  WaitResult await_all_passed(Comm& comm, Agree agree);

  // Waits at the barrier of the operations on streams, until all ranks have arrived.
  WaitResult data_barrier();
  // Waits for the end of the communicator where this rank cannot do its part of a collective and so must not arrive.
  WaitResult await_end();
  // Like data_barrier(), where all other ranks are known to arrive without waiting for anything else.
  void data_barrier_uninterruptible();
  // An all-gather of `bytes` of every rank, in rank order; at most exchange_bytes. Blocks. Returns false if the
  // communicator ended first, or if the ranks have not agreed on a collective: a rank that has found such a mismatch
  // does not arrive.
  bool exchange(const void* mine, size_t bytes, void* all, Comm& comm, Agree agree);

  // Whether this rank has found a mismatch; and whether it finds one now among the collectives from which it
  // continued.
  bool has_disagreed() const { return disagreed_.load(std::memory_order_relaxed); }
  bool finds_disagreement(Comm& comm, Agree agree) { return has_disagreed() || !catch_up(comm, agree); }

  // Exists while this rank waits for something other than a collective. A rank that then describes a collective from
  // which this rank continued wakes this rank, which compares the records.
  class WaiterRegistration {
   public:
    explicit WaiterRegistration(Rendezvous& rendezvous)
        : header_(rendezvous.is_ahead() ? &rendezvous.segment_->header() : nullptr) {
      if (header_ != nullptr) header_->record_waiters.fetch_add(1, std::memory_order_seq_cst);
    }
    ~WaiterRegistration() {
      if (header_ != nullptr) header_->record_waiters.fetch_sub(1, std::memory_order_relaxed);
    }
    WaiterRegistration(const WaiterRegistration&) = delete;
    WaiterRegistration& operator=(const WaiterRegistration&) = delete;

   private:
    Header* const header_;
  };

 private:
  // The number that the record in the place of collective `number` has.
  uint64_t number_of(int rank, uint64_t number) const {
    return segment_->slot(rank).placed[place_of(number)].number.load(std::memory_order_acquire);
  }
  bool all_have(uint64_t number) const;
  // Compares the records of a collective that all ranks have described. A mismatch is permanent.
  bool agrees(uint64_t number, Comm& comm, Agree agree);
  void mark_disagreed();
  // Whether all ranks have described a collective on which they do not agree. Any thread may call this.
  bool have_mismatch(Comm& comm, Agree agree) const;
  // Numbers the record that this rank has written, so that the others read it, and wakes the ranks that wait for it.
  void describe();
  // Waits until all ranks have described the collective that this rank described last, or until `enough()`.
  template <class Enough>
  WaitResult await_described(Comm& comm, Agree agree, Enough enough);
  bool agree_on_all(Comm& comm, Agree agree);
  // Whether this rank continued from a collective before all ranks were known to agree on it. The collective in which
  // it waits does not count.
  bool is_ahead() const { return agreed_ + (waiting_ ? 1 : 0) < described_; }
  // Compares the records that all ranks have described meanwhile. Returns false on a mismatch.
  bool catch_up(Comm& comm, Agree agree);
  // Waits until all ranks have passed collective `wanted` or, after some polls, `needed`, an earlier one. `next` is
  // the collective that is described afterwards, or 0.
  WaitResult await_passed(uint64_t wanted, uint64_t needed, uint64_t next, Comm& comm, Agree agree);

  // Written by one thread at a time, read by any.
  struct Count {
    std::atomic<uint64_t> value{0};
    operator uint64_t() const { return value.load(std::memory_order_relaxed); }
    void operator++(int) { value.store(*this + 1, std::memory_order_relaxed); }
  };

  // The result is `ended` also if `done()`, which is called repeatedly, returns true.
  template <class Done>
  WaitResult pass_barrier(Barrier& barrier, uint64_t& generation, Side side, Done done);
  void arrive(Side side);
  void leave(Side side) { arrivals_[side]--; }

  const Health& health_;
  Segment* segment_ = nullptr;
  int rank_ = 0;
  // State of the stream tasks, handed from one task to the next in the order of issue.
  Count described_;                     // the last collective that this rank has described
  bool waiting_ = false;                // for the other ranks' records of that collective
  Count agreed_;                        // the last one on which all ranks are known to agree
  std::atomic<bool> disagreed_{false};  // a mismatch was found on the next one
  uint64_t all_passed_ = 0;             // the last one that all ranks are known to have passed and agreed on
  uint64_t data_generation_ = 0;
  // State of the control calls.
  uint64_t control_generation_ = 0;
  uint64_t arrivals_[sides] = {};
};

}  // namespace ncclpy::host
