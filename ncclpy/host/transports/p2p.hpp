// Sends and receives of one launch, which progress together in whatever order the peers are ready. A thread may leave them and
// another one go on.
#pragma once

#include <vector>

#include "comm/comm.hpp"

namespace ncclpy::host {

class Messages {
 public:
  explicit Messages(Comm& comm) : comm_(comm) {}

  // Adds a send or a receive; those between the same two ranks keep their order. No bytes are no message, as in NCCL.
  void add(const Operation& operation);
  // Does what can be done without waiting, so that peers need not wait for what this rank does next. Whether that was
  // anything.
  bool advance();
  // Returns when all messages are through, or, after an abort, when no peer touches their memory any more. False if it was
  // left; then, too, none does.
  bool finish();
  // Takes back what is offered, until advance() offers it again.
  void retract();

 private:
  static constexpr uint64_t never = ~uint64_t(0);
  struct Message {
    const void* source;
    void* target;  // of a receive
    MessageKind kind;
    size_t bytes;
    size_t done = 0;
    bool started = false;           // offered, or, of pieces received, some are
    bool offers = false;            // instead of passing in pieces, of a send
    uint64_t place = never;         // the channel's state before the offer
  };
  // The messages with one peer in one direction.
  struct Line {
    int peer;
    bool sends;
    bool local;     // the peer is a thread of this process
    Message first;  // most have no more
    std::vector<Message> more;
    size_t at = 0;
    bool finished() const { return at > more.size(); }
    Message& now() { return at == 0 ? first : more[at - 1]; }
  };

  bool advance(Line& line);
  bool saves_to_offer() const;
  bool send(Line& line);
  bool receive(Line& line);
  bool offer(Line& line);
  bool receive_offered(Line& line);
  bool copy_offered(Line& line, uint64_t place);
  bool refuse(Line& line, uint64_t state, uint64_t place);
  bool send_pieces(Line& line);
  bool receive_pieces(Line& line);
  // Whether the peer has broken the message off, which is over then: see corruption.hpp.
  bool complete_corrupted(Line& line);
  void break_off();
  bool finished() const;
  std::vector<int> peers() const;
  void retract(Line& line);
  void complain(const Line& line, const MessageKind& sent, const MessageKind& wanted);
  Channel& channel(const Line& line) {
    return line.sends ? comm_.segment->channel(comm_.rank, line.peer) : comm_.segment->channel(line.peer, comm_.rank);
  }
  void tell(int peer) { comm_.segment->slot(peer).bell.ring(); }

  Comm& comm_;
  std::vector<Line> lines_;
};

}  // namespace ncclpy::host
