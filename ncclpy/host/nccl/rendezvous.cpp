// Records, gates, and the words that pass through them.
#include "rendezvous.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "wait.hpp"

namespace ncclpy::host {

// Not taken back by an abort: the rank has come, and nothing follows. Nor where a thread leaves: another one comes.
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
  // Of two who come last at least one sees the other, and rings; and whoever falls asleep is seen, or sees this.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (header.short_of_room.load(std::memory_order_relaxed) != 0) header.bell.ring_behind_fence();
  PlacedRecord& next = slot.placed[next_place()];
  expect_writing(&next);
  expect_writing(next.little);
}

void Rendezvous::go_on() {
  segment_->slot(rank_).passed.store(described_ + 1, std::memory_order_release);  // needed or not, it looks at nothing any more
  describe();
  segment_->header().bell.ring_behind_fence();
}

Passage Rendezvous::meet(Comm& comm, Agree agree) {
  if (!std::exchange(waiting_, true)) describe();
  return met(await_all_described(comm, agree), comm, agree);
}

Passage Rendezvous::meet_at_gate(Comm& comm, Agree agree) {
  if (!std::exchange(waiting_, true)) {
    describe();
    segment_->header().bell.ring_behind_fence();  // one that was ahead waits for this, and not at the gate
  }
  if (is_ahead()) {  // at the gate it would not hear of the others' disagreement, who do not come then
    const Passage passage = await_all_described(comm, agree);
    if (passage != Passage::open) return passage;
  }
  return met(pass_data(), comm, agree);
}

// While it waits it looks at what it went on from: who did not agree then does not come.
Passage Rendezvous::await_all_described(Comm& comm, Agree agree) {
  Header& header = segment_->header();
  int rank = 0;
  const auto all_have = [&] {
    for (; rank < segment_->nranks(); rank++) {
      if (number_of(rank, described_) != described_) return false;
    }
    // Those that were there first may have been taken back.
    for (rank = 0; rank < segment_->nranks(); rank++) {
      if (number_of(rank, described_) != described_) return false;
    }
    return true;
  };
  bool come = all_have();
  if (come) {
    header.bell.ring_behind_fence();
    return Passage::open;
  }
  bool agreed = true;
  wait_until(header.bell, segment_->spin(), [&] {
    come = all_have();
    if (!come && is_ahead()) agreed = catch_up(comm, agree);
    return come || !agreed || health_.stopped() || Interruption::wants_out();
  });
  if (come) return Passage::open;
  return !agreed || health_.stopped() ? Passage::ended : Passage::left;
}

// What follows when all have described theirs.
Passage Rendezvous::met(Passage passage, Comm& comm, Agree agree) {
  if (passage != Passage::open) return passage;
  waiting_ = false;
  uint64_t passed = described_;
  for (int rank = 0; rank < segment_->nranks(); rank++) {
    passed = std::min(passed, segment_->slot(rank).placed[place_of(described_)].passed);
  }
  all_passed_ = std::max(all_passed_, passed);
  while (agreed_ < described_) {
    if (!agree(comm, agreed_ + 1)) return Passage::ended;
    agreed_++;
  }
  return Passage::open;
}

// Who comes later waits in vain, as for a rank that has not come. Who has come has all that it needs.
void Rendezvous::take_back() {
  if (waiting_) segment_->slot(rank_).placed[place_of(described_)].number.store(0, std::memory_order_relaxed);
}

void Rendezvous::pass() { segment_->slot(rank_).passed.store(described_, std::memory_order_release); }

bool Rendezvous::catch_up(Comm& comm, Agree agree) {
  const auto all_have = [&](uint64_t number) {
    for (int rank = 0; rank < segment_->nranks(); rank++) {
      if (number_of(rank, number) < number) return false;
    }
    return true;
  };
  while (is_ahead() && all_have(agreed_ + 1)) {
    if (!agree(comm, agreed_ + 1)) return false;
    agreed_++;
  }
  return true;
}

Passage Rendezvous::await_room(size_t bytes, Comm& comm, Agree agree) {
  const uint64_t next = described_ + 1, depth = bytes <= little_bytes ? places : small_buffers;
  if (next <= all_passed_ + depth) return Passage::open;
  // Room for some more at once: to look at what others write costs both.
  const uint64_t needed = next - depth;
  return await_passed(needed + depth / 2 - 1, needed, comm, agree);
}

Passage Rendezvous::await_all_passed(Comm& comm, Agree agree) {
  segment_->header().bell.ring();  // who waits here for this rank may not have heard that it has passed the last
  return await_passed(described_, described_, comm, agree);
}

Passage Rendezvous::await_passed(uint64_t wanted, uint64_t needed, Comm& comm, Agree agree) {
  Header& header = segment_->header();
  bool agreed = true;
  const auto have_passed = [&](uint64_t number) {
    agreed = catch_up(comm, agree);
    uint64_t passed = described_;
    for (int rank = 0; rank < segment_->nranks() && passed >= number; rank++) {
      if (rank != rank_) passed = std::min(passed, segment_->slot(rank).passed.load(std::memory_order_acquire));
    }
    all_passed_ = std::max(all_passed_, passed);
    return !agreed || passed >= number;
  };
  header.short_of_room.fetch_add(1, std::memory_order_seq_cst);
  wait_until(header.bell, segment_->spin(), [&] { return have_passed(wanted) || health_.stopped() || Interruption::wants_out(); });
  header.short_of_room.fetch_sub(1, std::memory_order_relaxed);
  if (!agreed) return Passage::ended;
  if (all_passed_ >= needed) return Passage::open;
  return health_.stopped() ? Passage::ended : Passage::left;
}

Passage Rendezvous::pass(Gate& gate, uint64_t& generation, Side side) {
  const uint64_t target = ++generation * uint64_t(segment_->nranks());
  Bell& bell = segment_->header().bell;
  arrive(side);
  if (gate.arrive(target)) {
    bell.ring();
    return Passage::open;
  }
  // A revoked communicator can still be split: only its data stop.
  const auto ended = [&] { return side == data_side ? health_.stopped() : health_.ended(); };
  wait_until(bell, segment_->spin(), [&] { return gate.open(target) || ended() || Interruption::wants_out(); });
  if (gate.open(target) || !gate.withdraw(target)) return Passage::open;
  generation--;
  leave(side);
  return ended() ? Passage::ended : Passage::left;
}

void Rendezvous::pass_data_surely() {
  Gate& gate = segment_->header().data;
  const uint64_t target = ++data_generation_ * uint64_t(segment_->nranks());
  Bell& bell = segment_->header().bell;
  arrive(data_side);
  if (gate.arrive(target)) return bell.ring();
  wait_until(bell, segment_->spin(), [&] { return gate.open(target); });
}

bool Rendezvous::exchange(const void* mine, size_t bytes, void* all) {
  const int parity = int((control_generation_ + 1) & 1);
  std::memcpy(segment_->slot(rank_).exchange[parity], mine, bytes);
  if (pass(segment_->header().control, control_generation_, control_side) != Passage::open) return false;
  for (int r = 0; r < segment_->nranks(); r++) {
    std::memcpy(static_cast<char*>(all) + size_t(r) * bytes, segment_->slot(r).exchange[parity], bytes);
  }
  return true;
}

}  // namespace ncclpy::host
