// The sends and receives of one launch. They progress together in whatever order the peers are ready. A thread may
// suspend them, and another one resume them.
#pragma once

#include <vector>

#include "comm/comm.hpp"

namespace ncclpy::host {

class Messages {
 public:
  explicit Messages(Comm& comm) : comm_(comm) {}

  // Adds a send or a receive; messages between the same two ranks keep their order. Empty messages are ignored, as in
  // NCCL.
  void add(const Operation& operation);
  // Does what is possible without waiting, so that peers need not wait for what this rank does next. Returns whether
  // anything was done.
  bool advance();
  // Returns true when all messages are complete and match, or after an abort or a revoke; false if the thread
  // suspended the messages. After either return no peer in this process accesses the messages' memory any more; a peer
  // in another process may still read withdrawn messages, which does no harm.
  bool finish();
  // Withdraws offers until advance() offers the messages again.
  void retract();

 private:
  static constexpr uint64_t never = ~uint64_t(0);
  struct Message {
    const void* source;
    void* target;  // of a receive
    MessageKind kind;
    size_t bytes;
    size_t done = 0;
    bool started = false;    // offered; or, of a message received in pieces, some have arrived
    bool offers = false;     // of a send: offers its buffer instead of copying it in pieces
    uint64_t idle_state = never;  // the channel's state before the offer, a multiple of 4 (see p2p.cpp)
  };
  // The messages with one peer in one direction.
  struct PeerQueue {
    int peer;
    bool sends;
    bool local;     // the peer is a thread of this process
    Message first;  // most queues have no other
    std::vector<Message> more;
    size_t at = 0;
    bool finished() const { return at > more.size(); }
    Message& now() { return at == 0 ? first : more[at - 1]; }
  };

  // These functions advance the first unfinished message of a queue by one step, if that is possible without waiting,
  // and return whether anything was done (copy_offered: whether all was copied). send() and receive() choose between
  // an offer and pieces.
  bool advance(PeerQueue& queue);
  bool offering_is_faster() const;
  bool send(PeerQueue& queue);
  bool receive(PeerQueue& queue);
  bool offer(PeerQueue& queue);
  bool receive_offered(PeerQueue& queue);
  bool copy_offered(PeerQueue& queue, uint64_t idle_state);
  bool refuse(PeerQueue& queue, uint64_t state, uint64_t idle_state);
  bool send_pieces(PeerQueue& queue);
  bool receive_pieces(PeerQueue& queue);
  // Completes a message that the peer has abandoned; returns whether there is one. See abort_corruption.hpp.
  bool complete_corrupted(PeerQueue& queue);
  // Records that this rank completes none of its unfinished messages, see abandon_messages().
  void abandon();
  bool finished() const;
  std::vector<int> peers() const;
  void retract(PeerQueue& queue);
  void report_mismatch(const PeerQueue& queue, const MessageKind& sent, const MessageKind& wanted);
  Channel& channel(const PeerQueue& queue) {
    return queue.sends ? comm_.segment->channel(comm_.rank, queue.peer)
                       : comm_.segment->channel(queue.peer, comm_.rank);
  }
  void notify(int peer) { comm_.segment->slot(peer).changed.notify(); }

  Comm& comm_;
  std::vector<PeerQueue> queues_;
  bool mismatched_ = false;  // a message had another count or type than its peer expected
};

}  // namespace ncclpy::host
