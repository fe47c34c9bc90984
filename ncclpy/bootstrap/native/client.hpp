// A client's connection: any number of threads ask and wait on it at once.
//
// There is no thread for each connection. A thread that waits for an answer reads for all who wait; when it leaves it
// passes that on. While nobody waits the keeper, one thread for all connections of the process, reads what comes
// unasked, sends signs of life, and notices when the server is gone. None of this needs the GIL.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "descriptors.hpp"
#include "frame.hpp"
#include "mutex.hpp"
#include "teller.hpp"

namespace ncclpy::store {

struct Answer {
  Op op{};
  Status status{};
  std::string body;
};

class Client : public std::enable_shared_from_this<Client> {
 public:
  // Takes over a connection on which the handshake was made; `max_frame` is the longest frame that it may be sent.
  Client(int fd, double heartbeat, size_t max_frame);

  // Has the keeper look after it. Returns false where that cannot be started.
  bool start();

  // Asks, and returns the request's id; 0 where the connection is lost. Never waits: what cannot be sent is sent later.
  uint64_t submit(Op op, std::string_view body);

  enum class Turn { answered, waiting, lost };

  // Waits for an answer until then, or until a signal comes.
  Turn wait(uint64_t id, double until);

  // Takes an answer that has come, and for a watch the next change; false where there is none.
  bool take(uint64_t id, Answer& answer);

  // Gives a request up: its answer is not wanted any more. `tell` has the server give it up too.
  void forget(uint64_t id, bool tell);

  // Tells something by itself from now on, also when the key `asked` changes; returns the number to end that with, 0
  // where the connection is lost. Never waits.
  uint64_t tell(const std::string& asked, Teller teller);

  // Ends it: nothing is told any more when this returns.
  void hush(uint64_t id);

  // Says goodbye, waits a moment for the server to hear it, and lets go. Those who wait find it lost.
  void close(const char* why, double patience);

  // Why it is lost, as a sentence; "" while it is not.
  std::string lost();

  // Whether it is lost because this process was silent for longer than its lease.
  bool lease_ended();

  // For the keeper.
  void attend();
  void tick(double time, double away);
  int fd() const { return fd_.get(); }
  // How often to tick.
  double pace() const { return tells_ ? std::min(heartbeat_ / 4, Teller::kPace) : heartbeat_ / 4; }

 private:
  struct Slot {
    std::deque<Answer> answers;
    bool stream = false;  // of a watch, whose first answer is not its last
    Condition* sleeper = nullptr;
  };

  using Lock = std::unique_lock<Mutex<NCCLPY_LOCK_STORE_CLIENT>>;

  uint64_t ask(Op op, std::string_view body);
  void say(Teller& teller, double time, bool asked);
  void put_out(std::string_view bytes);
  bool push();
  void lose(std::string why);
  void watch_socket(bool reader_waits);
  void pass_on();
  bool read_once(Lock& lock, double until);
  void lose_connection(const std::string& why);
  void lose_lease(std::string_view why);
  double stopped() const;
  void dispatch(const Header& header, std::string body);

  const double heartbeat_;
  const size_t max_frame_;
  Mutex<NCCLPY_LOCK_STORE_CLIENT> mutex_;
  Descriptor fd_;
  Descriptor nudge_;  // wakes the reader
  std::string lost_;
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, Slot> slots_;
  std::map<uint64_t, Teller> tellers_;      // by the watch of what they are asked by
  std::atomic<bool> tells_{false};          // whether there are any
  std::unordered_set<Condition*> sleepers_;  // of those who wait while another reads
  std::string out_;
  size_t out_sent_ = 0;
  bool reading_ = false;  // somebody reads
  bool watched_ = false;  // the keeper is woken by what comes
  bool ticked_ = false;   // the keeper has looked at it
  double ticked_at_ = 0;
  double stopped_for_ = 0;   // how long this process did not run, the last time that this was long
  double stopped_until_ = 0;
  bool lease_ended_ = false;
  double sent_ = 0;
  std::atomic<double> heard_{0};
  std::string in_;  // the reader's
};

}  // namespace ncclpy::store
