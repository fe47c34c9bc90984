// A rank's end of the control plane: its node, connections to its parent and its children, and a thread that reads them.
//
// Who brings an operation sends what is to go upwards himself; what comes is gone through by the thread, which needs no
// GIL. While nothing is brought it wakes for signs of life alone.
#pragma once

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
  size_t cache = 0;
  double timeout = 0;  // none
  double stall_after = 60;
  double silence = 30;  // seconds after which a rank that says nothing is lost
};

// A connection to a rank. `fd` is a stream socket; it is taken over.
struct Peer {
  uint32_t rank = 0;
  int fd = -1;
};

class Control : public std::enable_shared_from_this<Control> {
 public:
  // Children come in the order of the place's.
  Control(const Place& place, const Options& options, Peer parent, const std::vector<int>& children);

  // Returns false where no thread can be started.
  bool start();

  Brought bring(uint32_t group, std::string key, std::string fixed, std::string own, bool joinable);
  Brought join();
  void shut_down(bool drain, const std::string& reason);
  void launched(uint32_t group);
  Bits have(uint32_t group, const std::string& key);
  Counters counters();

  enum class Next { frame, nothing, over };

  // Takes the next frame's records; waits for them until then.
  Next next(std::vector<Record>& records, double until);

  // Says goodbye, unless all have ended, and ends the thread; waits for that if asked.
  void close(bool wait);

 private:
  struct Link {
    uint32_t rank = 0;
    int child = -1;  // its number; -1 for the parent
    store::Descriptor fd;
    std::string in;   // the thread's
    std::string out;
    size_t sent = 0;
    double heard = 0, said = 0;
    bool goodbye = false;
    bool broken = false;
  };

  using Lock = std::unique_lock<store::Mutex<NCCLPY_LOCK_COORDINATOR>>;

  static void* main(void* self);
  void run();
  void flush(double now);
  void push(Link& link);
  void say(Link& link, std::string_view frame, double now);
  bool read(Link& link, std::vector<char>& scratch, double now);
  void lose(Link& link, const std::string& why);
  void nudge();

  const Options options_;
  store::Mutex<NCCLPY_LOCK_COORDINATOR> mutex_;
  store::Condition news_;
  Node node_;
  std::vector<Link> links_;
  store::Descriptor nudge_;
  std::deque<std::vector<Record>> told_;
  double asleep_until_ = 0;  // of the thread
  bool running_ = false, stopping_ = false;
  pthread_t thread_{};
};

}  // namespace ncclpy::coordinator
