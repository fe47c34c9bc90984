// Where the ranks of a communicator wait for each other: by the records of their collectives, at the gates of the shared
// memory, and with words to exchange.
//
// Collectives are numbered. A rank describes its next one by a record and the number behind it, in the next of its places, and
// has what it contributes beside the record if that is small. A rank that needs nothing of the others, as the root of a
// broadcast, goes on then; one that needs the root alone does when that has described the same. The others wait until all have
// described theirs, and see whether they agree. A rank has passed a collective when it needs nothing more of it. What all have
// left for it is there until all have passed it, and who writes over it has compared it: who went on looks at what is there before
// he counts it as passed by all. So what is gone was agreed on, and what was not agreed on stays, and all find it. Who has found it
// runs nothing that comes behind it.
#pragma once

#include "health.hpp"
#include "segment/segment.hpp"

namespace ncclpy::host {

enum class WaitResult {
  ok,
  ended,  // before the gate opened
  suspended,   // by this thread, which goes its way: the rank has not come
  corrupted,  // without the others, as another rank's abort ends a collective on GPUs: see abort_corruption.hpp
};

// Whether the ranks agree on a collective that all have described; if not, they are told.
using Agree = bool (*)(Comm& comm, uint64_t number);
// Whether what another rank has described, and still has there, is this one's.
using SameAs = bool (*)(Comm& comm, uint64_t number, int rank);

class Rendezvous {
 public:
  explicit Rendezvous(const Health& health) : health_(health) {}
  // Before any other use: the memory that the ranks share, and whose part in it this is.
  void join(Segment& segment, int rank) {
    segment_ = &segment;
    rank_ = rank;
  }

  // The place of the next collective's record.
  int next_place() const { return place_of(described_ + 1); }
  // Waits until that may be written, and a small buffer of so many bytes with it. Ended also if the ranks have not agreed on a
  // collective that this one did not wait in.
  WaitResult await_record_space(size_t bytes, Comm& comm, Agree agree);
  // It is written: tells the others, and goes on.
  void post_record();
  // It is written: tells the others, and waits for theirs. Ended also if they do not agree. Who has left goes on with waiting:
  // the others may have read what is there.
  WaitResult meet(Comm& comm, Agree agree);
  // The same, but it is enough that the root has described the same.
  WaitResult meet_root(int root, Comm& comm, SameAs same, Agree agree);
  // As meet(), where ranks touch each other's memory then: as the gate is opened by the last to come, either all go through,
  // whatever ends one of them, or none does.
  WaitResult meet_at_barrier(Comm& comm, Agree agree);
  bool is_waiting() const { return waiting_; }
  // This rank has stopped, and nothing of it runs any more: its record is none if it waits for the others'.
  void withdraw_record();
  // This rank needs nothing more of what it has described last.
  void mark_passed();
  // Waits until all others are through with what this rank has described; all ranks do so.
  WaitResult await_all_passed(Comm& comm, Agree agree);

  // Passes the gate of the data together with all other ranks.
  WaitResult data_barrier();
  // Waits for the end where this rank cannot do its part of the collective, so it does not come to the gate.
  WaitResult await_end();
  // As data_barrier(), where all others are known to come without waiting for anything else.
  void data_barrier_uninterruptible();
  // Gives `bytes` to every rank and collects everyone's, in rank order. At most exchange_bytes; blocks. False if it
  // ended before, also because the ranks have not agreed on a collective: who has found that does not come.
  bool exchange(const void* mine, size_t bytes, void* all, Comm& comm, Agree agree);

  // Whether this rank has found that they do not agree; and whether it finds that now, at what it went on from.
  bool has_disagreed() const { return disagreed_.load(std::memory_order_relaxed); }
  bool finds_disagreement(Comm& comm, Agree agree) { return has_disagreed() || !catch_up(comm, agree); }

  // While this rank waits for something else than a meeting: whoever describes what it went on from wakes it up to look at that.
  class WaiterRegistration {
   public:
    explicit WaiterRegistration(Rendezvous& rendezvous) : header_(rendezvous.is_ahead() ? &rendezvous.segment_->header() : nullptr) {
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
  // Which collective a rank has described in the place of one.
  uint64_t number_of(int rank, uint64_t number) const {
    return segment_->slot(rank).placed[place_of(number)].number.load(std::memory_order_acquire);
  }
  bool all_have(uint64_t number) const;
  // Whether all agree on what they have all described. If not, that is for good.
  bool agrees(uint64_t number, Comm& comm, Agree agree);
  void mark_disagreed();
  // Whether those who have all described something are known not to agree on it. Any thread may ask.
  bool have_mismatch(Comm& comm, Agree agree) const;
  void describe();
  // Waits until all have described what this rank has described last, or `enough()`.
  template <class Enough>
  WaitResult await_described(Comm& comm, Agree agree, Enough enough);
  bool agree_on_all(Comm& comm, Agree agree);
  // Whether it went on from a collective without having seen that all agree; not the one in which it waits.
  bool is_ahead() const { return agreed_ + (waiting_ ? 1 : 0) < described_; }
  // Goes through what all have described meanwhile, as far as they agree. False if they do not.
  bool catch_up(Comm& comm, Agree agree);
  // Waits until all have passed one collective, or, with less patience, another one before it. `next` is the collective that is
  // to be described then, or 0.
  WaitResult await_passed(uint64_t wanted, uint64_t needed, uint64_t next, Comm& comm, Agree agree);

  // Written by one thread at a time, and read by others.
  struct Count {
    std::atomic<uint64_t> value{0};
    operator uint64_t() const { return value.load(std::memory_order_relaxed); }
    void operator++(int) { value.store(*this + 1, std::memory_order_relaxed); }
  };

  // Ended also when `done()` is true, which is asked again and again.
  template <class Done>
  WaitResult pass_barrier(Barrier& barrier, uint64_t& generation, Side side, Done done);
  void arrive(Side side);
  void leave(Side side) { arrivals_[side]--; }

  const Health& health_;
  Segment* segment_ = nullptr;
  int rank_ = 0;
  // The stream tasks' own, handed from one to the next in the order of their issue.
  Count described_;          // the last collective that this rank has described
  bool waiting_ = false;     // for the others' descriptions of that
  Count agreed_;             // the last one on which all have agreed, as far as it knows
  std::atomic<bool> disagreed_{false};  // on the next one
  uint64_t all_passed_ = 0;  // the last one that all have passed and agreed on, as far as it knows
  uint64_t data_generation_ = 0;
  // Of those who exchange words.
  uint64_t control_generation_ = 0;
  uint64_t arrivals_[sides] = {};
};

}  // namespace ncclpy::host
