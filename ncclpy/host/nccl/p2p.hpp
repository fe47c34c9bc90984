// Sends and receives of one launch, which progress together in whatever order the peers are ready.
#pragma once

#include <vector>

#include "comm.hpp"

namespace ncclpy::host {

class Messages {
 public:
  explicit Messages(Comm& comm) : comm_(comm) {}

  // Adds a send or a receive; those between the same two ranks keep their order. No bytes are no message, as in NCCL.
  void add(const Operation& operation);
  // Offers what can be offered without waiting, so that peers need not wait for what this rank does next.
  void begin() { advance(); }
  // Returns when all messages are through, or, after an abort, when no peer touches their memory any more.
  void finish();

 private:
  struct Message {
    const void* source;
    void* target;  // of a receive
    MessageKind kind;
    size_t bytes;
    size_t done = 0;
    bool started = false;
  };
  // The messages with one peer in one direction.
  struct Line {
    int peer;
    bool sends;
    bool direct;  // the peer is a thread of this process
    std::vector<Message> messages;
    size_t at = 0;
    bool finished() const { return at == messages.size(); }
    Message& now() { return messages[at]; }
  };

  bool advance();
  bool advance(Line& line);
  bool send_direct(Line& line);
  bool receive_direct(Line& line);
  bool send_pieces(Line& line);
  bool receive_pieces(Line& line);
  bool finished() const;
  std::vector<int> peers() const;
  void withdraw(Line& line);
  void complain(const Line& line, const MessageKind& sent, const MessageKind& wanted);
  Channel& channel(const Line& line) {
    return line.sends ? comm_.segment->channel(comm_.rank, line.peer) : comm_.segment->channel(line.peer, comm_.rank);
  }
  void tell(int peer) { comm_.segment->slot(peer).bell.ring(); }

  Comm& comm_;
  std::vector<Line> lines_;
};

}  // namespace ncclpy::host
