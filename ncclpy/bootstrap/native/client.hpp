// A client's connection, on which any number of threads send requests and wait at once.
//
// A connection has no thread of its own. One of the threads that wait on it reads the answers for all of them; when it
// leaves, another waiting thread reads next. While no thread waits, the connection thread, one for all connections of
// the process, reads what the server sends unasked. At all times the connection thread sends heartbeats and detects a
// silent server. None of this needs the GIL.
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
#include "publisher.hpp"

namespace ncclpy::store {

struct Answer {
  Op op{};
  Status status{};
  std::string body;
};

class Client : public std::enable_shared_from_this<Client> {
 public:
  // Takes over a connection on which the handshake was made. A received frame with a body of more than `max_frame`
  // bytes is invalid.
  Client(int fd, double heartbeat, size_t max_frame);

  // Registers the connection with the connection thread. Returns false if the connection thread cannot be started.
  bool start();

  // Sends a request and returns its id; 0 if the connection is lost. Never waits: bytes for which the socket has no
  // space are sent later.
  uint64_t submit(Op op, std::string_view body);

  enum class WaitResult { answered, waiting, lost };

  // Waits for an answer, until the time `until`. In the thread that reads for all, a signal ends the wait earlier.
  WaitResult wait(uint64_t id, double until);

  // Moves the answer that has arrived (for a watch: its next change) into `answer`. Returns false if there is none.
  bool take(uint64_t id, Answer& answer);

  // Gives up a request: its answer is not wanted any more. If `tell`, the server is told to give it up too.
  void forget(uint64_t id, bool tell);

  // Starts a publisher, which publishes from time to time, and also when another client asks for it by changing the
  // key `question_key`. Returns the number that end_publisher() takes, 0 if the connection is lost. Never waits.
  uint64_t start_publisher(const std::string& question_key, Publisher publisher);

  // Ends a publisher, which publishes nothing any more when this returns.
  void end_publisher(uint64_t id);

  // Says goodbye, waits at most `patience` seconds for the server's answer, and closes the connection, which other
  // waiting threads then find lost, for the reason `why`.
  void close(const char* why, double patience);

  // Why the connection is lost, as a sentence; "" while it is not.
  std::string lost();

  // Whether the connection is lost because this process was silent for longer than its lease.
  bool lease_ended();

  // Called by the connection thread when bytes have arrived: reads and dispatches them, unless a waiting thread reads.
  void read_pending();
  // Called by the connection thread at intervals: sends heartbeats and due values of the publishers, and detects the
  // server's silence. `time` is now. `seconds_late` is by how much the tick is late, because the process or its
  // machine was stopped; that time does not count as silence.
  void tick(double time, double seconds_late);
  int fd() const { return fd_.get(); }
  // Seconds between ticks.
  double tick_interval() const {
    return has_publishers_ ? std::min(heartbeat_ / 4, Publisher::kPace) : heartbeat_ / 4;
  }

 private:
  struct Slot {
    std::deque<Answer> answers;
    bool stream = false;  // the request is a watch: more answers may follow the first
    Condition* sleeper = nullptr;
  };

  using Lock = std::unique_lock<Mutex<NCCLPY_LOCK_STORE_CLIENT>>;

  uint64_t ask(Op op, std::string_view body);
  void publish(Publisher& publisher, double time, bool asked);
  void send_or_queue(std::string_view bytes);
  bool push();
  // Marks the connection as lost, for the reason `why`. lose_connection() and lose_lease() compose the reason, for a
  // connection that has ended and for a lease that the server has ended.
  void mark_lost(std::string why);
  void watch_socket(bool reader_waits);
  void hand_over_reading();
  bool read_once(Lock& lock, double until);
  void lose_connection(const std::string& why);
  void lose_lease(std::string_view why);
  double seconds_stopped() const;
  // Gives a frame to the request that it answers, or ends the connection if it is a farewell.
  void dispatch(const Header& header, std::string body);

  const double heartbeat_;
  const size_t max_frame_;
  Mutex<NCCLPY_LOCK_STORE_CLIENT> mutex_;
  Descriptor fd_;
  Descriptor nudge_;  // wakes the reader
  std::string lost_;
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, Slot> slots_;
  std::map<uint64_t, Publisher> publishers_;  // by the id of the watch of the question key
  std::atomic<bool> has_publishers_{false};   // publishers_ is not empty
  std::unordered_set<Condition*> sleepers_;   // of threads that wait while another reads
  std::string out_;
  size_t out_sent_ = 0;
  bool reading_ = false;  // a thread reads
  bool watched_ = false;  // incoming bytes wake the connection thread
  bool ticked_ = false;   // the connection thread has called tick()
  double ticked_at_ = 0;
  double stopped_for_ = 0;    // seconds for which the process was stopped the last time that it missed ticks
  double stopped_until_ = 0;  // when the process ran again
  bool lease_ended_ = false;
  double last_sent_at_ = 0;
  std::atomic<double> last_heard_at_{0};
  std::string in_;  // an incomplete frame; used by the reading thread
};

}  // namespace ncclpy::store
