// Where the ranks of a communicator wait for each other: at the gates of the shared memory, and with words to exchange.
#pragma once

#include "health.hpp"
#include "segment.hpp"

namespace ncclpy::host {

enum class Passage {
  open,
  ended,  // before the gate opened
  left,   // by this thread, which goes its way: the rank has not come
};

class Rendezvous {
 public:
  explicit Rendezvous(const Health& health) : health_(health) {}
  // Before any other use: the memory that the ranks share, and whose part in it this is.
  void join(Segment& segment, int rank) {
    segment_ = &segment;
    rank_ = rank;
  }

  // Passes the gate of the data together with all other ranks.
  Passage pass_data() { return pass(segment_->header().data, data_generation_, data_side); }
  // The same where all others are known to come without waiting for anything else.
  void pass_data_surely();
  // Gives `bytes` to every rank and collects everyone's, in rank order. At most exchange_bytes; blocks. False if it
  // ended before.
  bool exchange(const void* mine, size_t bytes, void* all);

 private:
  Passage pass(Gate& gate, uint64_t& generation, Side side);
  void note_arrival(Side side, uint64_t generation);

  const Health& health_;
  Segment* segment_ = nullptr;
  int rank_ = 0;
  uint64_t data_generation_ = 0;  // the stream tasks' own, handed from one to the next in the order of their issue
  uint64_t control_generation_ = 0;
};

}  // namespace ncclpy::host
