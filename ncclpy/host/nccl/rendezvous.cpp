// Gates, and the words that pass through them.
#include "rendezvous.hpp"

#include <cstring>

#include "wait.hpp"

namespace ncclpy::host {

void Rendezvous::note_arrival(Side side, uint64_t generation) {
  // Not taken back by an abort: the rank has come, and nothing follows. Nor where a thread leaves: another one comes.
  segment_->slot(rank_).arrived[side].store(generation, std::memory_order_relaxed);
}

Passage Rendezvous::pass(Gate& gate, uint64_t& generation, Side side) {
  const uint64_t target = ++generation * uint64_t(segment_->nranks());
  Bell& bell = segment_->header().bell;
  note_arrival(side, generation);
  if (gate.arrive(target)) {
    bell.ring();
    return Passage::open;
  }
  // A revoked communicator can still be split: only its data stop.
  const auto ended = [&] { return side == data_side ? health_.stopped() : health_.ended(); };
  wait_until(bell, segment_->spin(), [&] { return gate.open(target) || ended() || Interruption::wants_out(); });
  if (gate.open(target) || !gate.withdraw(target)) return Passage::open;
  generation--;
  return ended() ? Passage::ended : Passage::left;
}

void Rendezvous::pass_data_surely() {
  Gate& gate = segment_->header().data;
  const uint64_t target = ++data_generation_ * uint64_t(segment_->nranks());
  Bell& bell = segment_->header().bell;
  note_arrival(data_side, data_generation_);
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
