// A rank's end of the control plane: its node, the connections to its parent and children, and a thread that reads
// them.
//
// A thread that brings an operation sends the frame itself. If another frame was sent just before, the attending thread
// sends the operation a moment later, together with those that are brought meanwhile. Received frames are processed by
// the thread that waits for the next one in next(), since that thread would have to be woken for the frame in any case.
// The Control's own thread processes them if no thread has called next() for some time, and at the end of the Control.
// Whichever of the two processes frames is called the attending thread. While no operation waits and no frame arrives,
// both wake only for heartbeats.
#pragma once

#include <poll.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ncclpy/bootstrap/native/descriptors.hpp"
#include "ncclpy/bootstrap/native/mutex.hpp"
#include "node.hpp"

namespace ncclpy::coordinator {

struct Options {
  size_t cache = 0;         // slots of the response cache
  double timeout = 0;       // seconds in which all ranks must bring an operation; 0: no limit
  double stall_after = 60;  // seconds until the first warning of an operation that waits
  double silence = 30;      // seconds after which a silent rank counts as lost
};

// A connection to a rank. `fd` is a stream socket, which the Control closes; -1 for no connection.
struct Peer {
  uint32_t rank = 0;
  int fd = -1;
};

class Control : public std::enable_shared_from_this<Control> {
 public:
  // The sockets of `children` are in the order of place.children.
  Control(const Place& place, const Options& options, Peer parent, const std::vector<int>& children);

  // Starts the Control's thread; returns false if the thread or its eventfd cannot be made.
  bool start();

  // Calls of this rank, see Node. Any thread may make them; they wait only for the mutex.
  Brought bring(uint32_t group, const std::string& key, const std::string& fixed, const std::string& own, bool joinable);

  // bring(), if the mutex is free; else returns false and changes nothing.
  bool try_bring(uint32_t group, const std::string& key, const std::string& fixed, const std::string& own, bool joinable,
                 Brought& brought);

  Brought join();
  void shut_down(bool drain, const std::string& reason);
  void launched(uint32_t group);
  Bits have(uint32_t group, const std::string& key);
  Counters counters();

  enum class Next { frame, nothing, over };

  // Waits until the time `until` for the next frame, and takes its records. Returns `nothing` if none arrives in time,
  // and `over` if no frame is left and the coordinator has ended or close() was called. While operations are brought
  // in quick succession, the call returns up to some hundred microseconds later.
  Next next(std::vector<Record>& records, double until);

  // Says goodbye and ends the Control's thread; with `wait`, waits for the thread's end. If the coordinator has not
  // ended on all ranks, the other ranks consider this one lost.
  void close(bool wait);

 private:
  struct Link {
    uint32_t rank = 0;
    int child = -1;  // the child's number; -1 for the parent
    store::Descriptor fd;
    std::string in;   // used by the attending thread
    std::string out;
    size_t sent = 0;
    double last_received = 0, last_queued = 0;
    bool goodbye = false;
    bool broken = false;
  };

  using Lock = std::unique_lock<store::Mutex<NCCLPY_LOCK_COORDINATOR>>;

  // The Control's own thread. It attends whenever no thread has been in next() for a heartbeat's interval. At the end
  // it says goodbye: it sends what is left, and waits a while until the other ends are closed.
  static void* main(void* self);
  void run();
  void attend();
  void say_goodbye();
  // Waits once, until the time `until` at most, and processes the frames that have arrived; also sends what is due,
  // heartbeats included, and drops silent connections. The attending thread calls this, without the mutex. `reads`:
  // the thread is in next(), so a frame for next() ends the wait.
  void step(double until, bool reads);
  // Whether operations are being brought in quick succession. A thread in next() then takes received frames later: the
  // bringing thread is faster if no other thread takes the GIL.
  bool is_in_burst(double now) const;
  Brought bring_locked(uint32_t group, const std::string& key, const std::string& fixed, const std::string& own,
                       bool joinable);
  // Makes a frame of what was brought and is not sent yet.
  void settle_brought();
  // Sends the node's frames, and passes its records to next(); `attends`: the caller is the attending thread.
  void flush(double now, bool attends = false);
  // Sends as much of a link's queue as the socket takes.
  void send_queued(Link& link);
  // Queues a frame for a link; an empty one is a heartbeat.
  void enqueue(Link& link, std::string_view frame, double now);
  // Reads what has arrived on a link, and processes it, or ignores it after close(). Returns whether the connection is
  // still there.
  bool read(Link& link, std::vector<char>& scratch, double now);
  // Closes a link, and has the node report its rank as lost.
  void drop_link(Link& link, const std::string& why);
  void wake_attendant();

  const Options options_;
  const bool many_cores_;
  store::Mutex<NCCLPY_LOCK_COORDINATOR> mutex_;
  store::Condition frame_ready_;  // for threads that wait for frames
  store::Condition unattended_;   // the Control's thread waits here while another thread attends
  Node node_;
  std::vector<Link> links_;
  store::Descriptor wake_fd_;
  std::deque<std::vector<Record>> frames_;
  double asleep_until_ = 0;      // when the attending thread wakes
  bool asleep_ = false;          // the attending thread sleeps, or is about to
  double last_attended_ = -1e9;  // when next() last returned
  size_t readers_ = 0;           // threads in next()
  bool attending_ = false;       // a thread is in step(), or about to call it
  // Used by the attending thread only, from here to last_step_.
  std::vector<char> scratch_;
  std::vector<pollfd> polled_;
  std::vector<size_t> polled_links_;
  double last_step_ = 0;
  // Used under the mutex.
  double last_brought_ = 0, before_last_ = 0;  // when the last two operations were brought
  double frames_since_ = 0;  // when next() last took a frame or, if later, a frame last arrived in an empty frames_
  double sent_at_ = 0;       // when an operation was last sent at once
  double send_due_ = 0;      // when to send the operations brought since then, 0 for none
  bool running_ = false, stopping_ = false;
  pthread_t thread_{};
};

}  // namespace ncclpy::coordinator
