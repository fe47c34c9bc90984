// Records, gates, and the words that pass through them.
#include "rendezvous.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/wait.hpp"
#include "segment/corruption.hpp"

namespace ncclpy::host {
namespace {
constexpr int few_looks = 64;  // so often who waits for room asks for more than it needs
}

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
  if (header.short_of_room.load(std::memory_order_relaxed) != 0) segment_->ring_all();
  PlacedRecord& next = slot.placed[next_place()];
  expect_writing(&next);
  expect_writing(next.little);
}

// First described and then passed: who sees that it has passed can see what it has described.
void Rendezvous::go_on() {
  describe();
  segment_->slot(rank_).passed.store(described_, std::memory_order_release);
  segment_->header().bell.ring();
}

template <class Done>
Passage Rendezvous::pass(Gate& gate, uint64_t& generation, Side side, Done done) {
  const uint64_t target = ++generation * uint64_t(segment_->nranks());
  Bell& bell = segment_->header().bell;
  arrive(side);
  if (gate.arrive(target)) {
    bell.ring();
    return Passage::open;
  }
  // A revoked communicator can still be split: only its data stop.
  const auto ended = [&] { return side == data_side ? health_.stopped() : health_.is_told() || health_.ended(); };
  const auto corrupted = [&] { return side == data_side && is_corrupted(*segment_, rank_, described_); };
  wait_until(bell, segment_->spin(),
             [&] { return gate.open(target) || ended() || corrupted() || Interruption::wants_out() || done(); });
  if (gate.open(target) || !gate.withdraw(target)) return Passage::open;
  generation--;
  leave(side);
  if (ended()) return Passage::ended;
  return corrupted() ? Passage::corrupted : Passage::left;
}

Passage Rendezvous::meet(Comm& comm, Agree agree) {
  if (!std::exchange(waiting_, true)) describe();
  const Passage passage = await_described(comm, agree, [] { return false; });
  if (passage != Passage::open) return passage;
  waiting_ = false;
  return agree_on_all(comm, agree) ? Passage::open : Passage::ended;
}

// Who does not agree with the root waits for all, and hears then.
Passage Rendezvous::meet_root(int root, Comm& comm, SameAs same, Agree agree) {
  if (!std::exchange(waiting_, true)) describe();
  bool root_agrees = false;
  const Passage passage = await_described(comm, agree, [&] {
    if (number_of(root, described_) == described_) root_agrees = same(comm, described_, root);
    return root_agrees;
  });
  if (passage != Passage::open) return passage;
  waiting_ = false;
  return root_agrees || agree_on_all(comm, agree) ? Passage::open : Passage::ended;
}

Passage Rendezvous::meet_at_gate(Comm& comm, Agree agree) {
  if (!std::exchange(waiting_, true)) {
    describe();
    segment_->header().bell.ring_behind_fence();
  }
  // Who does not agree may not come to the gate: he has called for less, or has ended what came before.
  bool agreed = true;
  int looks = 0;
  const Passage passage = pass(segment_->header().data, data_generation_, data_side, [&] {
    if (++looks <= few_looks || !do_not_agree(comm, agree)) return false;
    disagree();
    agreed = false;
    return true;
  });
  if (passage != Passage::open) {
    if (!agreed || passage == Passage::corrupted) waiting_ = false;
    return agreed ? passage : Passage::ended;
  }
  waiting_ = false;
  return agree_on_all(comm, agree) ? Passage::open : Passage::ended;
}

// While a rank writes over what it has passed, its place has no number.
bool Rendezvous::all_have(uint64_t number) const {
  for (int rank = 0; rank < segment_->nranks(); rank++) {
    if (number_of(rank, number) >= number) continue;
    if (segment_->slot(rank).passed.load(std::memory_order_acquire) < number) return false;
  }
  return true;
}

bool Rendezvous::agrees(uint64_t number, Comm& comm, Agree agree) {
  if (agree(comm, number)) return true;
  disagree();
  return false;
}

// Others may wait for what this rank does not come to, and find the reason when they look.
void Rendezvous::disagree() {
  disagreed_.store(true, std::memory_order_relaxed);
  segment_->ring_all();
}

bool Rendezvous::do_not_agree(Comm& comm, Agree agree) const {
  for (uint64_t number = agreed_ + 1; number <= described_ && all_have(number); number++) {
    if (!agree(comm, number)) return true;
  }
  return false;
}

// While it waits it looks at what it went on from: who did not agree then does not come.
template <class Enough>
Passage Rendezvous::await_described(Comm& comm, Agree agree, Enough enough) {
  Header& header = segment_->header();
  int rank = 0;
  const auto all_are_here = [&] {
    for (; rank < segment_->nranks(); rank++) {
      if (number_of(rank, described_) != described_) return false;
    }
    // Those that were there first may have been taken back.
    for (rank = 0; rank < segment_->nranks(); rank++) {
      if (number_of(rank, described_) != described_) return false;
    }
    return true;
  };
  if (all_are_here()) {  // who comes last tells those who sleep
    header.bell.ring_behind_fence();
    return Passage::open;
  }
  bool come = enough(), agreed = true;
  if (come) return Passage::open;
  int looks = 0;
  const auto corrupted = [&] { return is_corrupted(*segment_, rank_, described_); };
  wait_until(header.bell, segment_->spin(), [&] {
    come = all_are_here() || enough();
    if (!come && ++looks > few_looks) agreed = catch_up(comm, agree);
    return come || !agreed || health_.stopped() || corrupted() || Interruption::wants_out();
  });
  if (come) return Passage::open;
  if (!agreed) waiting_ = false;
  if (!agreed || health_.stopped()) return Passage::ended;
  if (!corrupted()) return Passage::left;
  waiting_ = false;
  return Passage::corrupted;
}

// When all have described theirs. What they do not agree on is not passed, and ends all that follows.
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

// Who comes later waits in vain, as for a rank that has not come. Who has come has all that it needs. Of a child that ends with
// this one the record stays: what it gives is there all the same.
void Rendezvous::take_back() {
  if (waiting_) segment_->slot(rank_).placed[place_of(described_)].number.store(0, std::memory_order_relaxed);
}

void Rendezvous::pass() {
  Header& header = segment_->header();
  segment_->slot(rank_).passed.store(described_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // who sleeps until it is seen, or sees this
  if (header.short_of_room.load(std::memory_order_relaxed) != 0) header.bell.ring_behind_fence();
}

bool Rendezvous::catch_up(Comm& comm, Agree agree) {
  while (is_ahead() && all_have(agreed_ + 1)) {
    if (!agrees(agreed_ + 1, comm, agree)) return false;
    agreed_++;
  }
  return true;
}

Passage Rendezvous::await_room(size_t bytes, Comm& comm, Agree agree) {
  if (has_disagreed()) return Passage::ended;
  const uint64_t next = described_ + 1, depth = bytes <= little_bytes ? places : small_buffers;
  if (next <= all_passed_ + depth) return Passage::open;
  // Room for some more at once: to look at what others write costs both.
  const uint64_t needed = next - depth;
  const Passage passage = await_passed(needed + depth / 2 - 1, needed, next, comm, agree);
  if (passage == Passage::corrupted) described_++;  // for this rank alone: it has completed, and the next one has its number
  return passage;
}

Passage Rendezvous::await_all_passed(Comm& comm, Agree agree) {
  return has_disagreed() ? Passage::ended : await_passed(described_, described_, 0, comm, agree);
}

Passage Rendezvous::await_passed(uint64_t wanted, uint64_t needed, uint64_t next, Comm& comm, Agree agree) {
  Header& header = segment_->header();
  bool agreed = true;
  // What others have passed is read before what they have described is compared: it may be gone afterwards.
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
    header.short_of_room.fetch_add(1, std::memory_order_seq_cst);
    int looks = 0;
    wait_until(header.bell, segment_->spin(), [&] {
      return have_passed(++looks < few_looks ? wanted : needed) || health_.stopped() || corrupted() ||
             Interruption::wants_out();
    });
    header.short_of_room.fetch_sub(1, std::memory_order_relaxed);
  }
  if (!agreed) return Passage::ended;
  if (all_passed_ >= needed) return Passage::open;
  if (health_.stopped()) return Passage::ended;
  return corrupted() ? Passage::corrupted : Passage::left;
}

Passage Rendezvous::pass_data() {
  return pass(segment_->header().data, data_generation_, data_side, [] { return false; });
}

Passage Rendezvous::stay_away() {
  const auto corrupted = [&] { return is_corrupted(*segment_, rank_, described_); };
  wait_until(segment_->header().bell, [&] { return health_.stopped() || corrupted() || Interruption::wants_out(); });
  if (health_.stopped()) return Passage::ended;
  return corrupted() ? Passage::corrupted : Passage::left;
}

void Rendezvous::pass_data_surely() {
  Gate& gate = segment_->header().data;
  const uint64_t target = ++data_generation_ * uint64_t(segment_->nranks());
  Bell& bell = segment_->header().bell;
  arrive(data_side);
  if (gate.arrive(target)) return bell.ring();
  wait_until(bell, segment_->spin(), [&] { return gate.open(target); });
}

bool Rendezvous::exchange(const void* mine, size_t bytes, void* all, Comm& comm, Agree agree) {
  const auto finds_disagreement = [&] {
    if (health_.revoked() || !do_not_agree(comm, agree)) return false;
    segment_->ring_all();
    return true;
  };
  // Before it comes, too: others who have not looked yet are not to take it for one who has not found it.
  if (finds_disagreement()) return false;
  const int parity = int((control_generation_ + 1) & 1);
  std::memcpy(segment_->slot(rank_).exchange[parity], mine, bytes);
  int looks = 0;
  const auto gives_up = [&] { return ++looks > few_looks && finds_disagreement(); };
  if (pass(segment_->header().control, control_generation_, control_side, gives_up) != Passage::open) return false;
  for (int r = 0; r < segment_->nranks(); r++) {
    std::memcpy(static_cast<char*>(all) + size_t(r) * bytes, segment_->slot(r).exchange[parity], bytes);
  }
  return true;
}

}  // namespace ncclpy::host
