// A store's server: one thread that serves all connections by an event loop, and never needs the GIL.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "descriptors.hpp"
#include "mutex.hpp"
#include "table.hpp"

namespace ncclpy::store {

struct ServerOptions {
  std::string token;       // empty: none is needed
  double heartbeat = 10;   // seconds of silence after which a client is lost; a client may ask for fewer
  size_t max_value = 0;    // bytes to which an append may make a value grow; a frame may have 1 MiB and twice as many
  size_t max_answer = 0;   // bytes that a list in an answer may have
  size_t capacity = 0;     // bytes that all keys and values may take
  size_t max_backlog = 0;  // bytes that may wait for a client that does not read them
};

class Server final : private Post {
 public:
  explicit Server(const ServerOptions& options);
  ~Server();

  // Takes over a listening socket; before start().
  void listen(int fd);

  // Starts the thread. Returns false if the thread, or a descriptor that it needs, cannot be made.
  bool start();

  // Stops accepting clients. Clients that have completed the handshake stay; other connections are closed. A new
  // client then finds no listener, or the next server on this port.
  void refuse_new();

  // Says farewell to all clients and ends the thread.
  void stop();

  // How many clients have completed the handshake and not left.
  int clients() const { return clients_.load(); }

  // The next line for the log; false if there is none within `seconds`, or will be none.
  bool next_line(std::string& line, double seconds);
  bool stopped() const { return stopped_.load(); }

 private:
  enum class Stage { greeting, proof, open };

  // Bytes to send: `shared`, a value that other connections may send too, or else `own`.
  struct Piece {
    std::string own;
    Value shared;
    std::string_view bytes() const { return shared ? std::string_view(*shared) : std::string_view(own); }
  };

  struct Connection {
    uint64_t id = 0;
    Descriptor fd;
    std::string peer;
    Stage stage = Stage::greeting;
    std::string greetings;
    double since = 0;      // when it was accepted
    double heard = 0;      // when bytes last arrived
    double heartbeat = 0;  // seconds of silence after which the client is lost
    std::string in;        // received bytes that are not parsed yet
    std::deque<Piece> out;
    size_t sent = 0;     // bytes of the first piece that were sent
    size_t backlog = 0;  // bytes in all pieces
    bool dirty = false;  // listed in dirty_
    bool blocked = false;  // the socket had no space for all of `out`: epoll reports when there is space again
    bool goodbye = false;  // the client has said goodbye
    std::string doomed;    // why settle() must close it; "" if it need not
  };

  static void* main(void* self);
  void run();
  void wake();
  void enable_listeners(bool enabled);
  // Accepts the clients that wait at a listener.
  void accept(int listener);
  // Reads what has arrived on a connection, and executes the complete messages.
  void read(Connection& connection);
  // Execute the complete messages in `bytes` (shake_hands: one of the handshake); return how many bytes were used.
  size_t parse(Connection& connection, std::string_view bytes);
  size_t shake_hands(Connection& connection, std::string_view bytes);
  // Executes a frame.
  void frame(Connection& connection, const Header& header, std::string_view body);
  // Has settle() close a connection, for the reason `why`.
  void doom(Connection& connection, std::string why);
  // Appends to what is sent to a client. flush() sends as much of it as the socket has space for.
  void queue(Connection& connection, Piece piece);
  void flush(Connection& connection);
  void settle();
  void close(uint64_t id);
  // Called at intervals: closes connections that were silent or unproved for too long.
  void sweep(double time, double seconds_late);
  void send_unproved_away();
  // Logs the refused connections, at most once a second.
  void tell_refused(double time);
  // Tells all clients that the server ends, and shuts their connections down.
  void say_farewell();
  // Adds a line for the log.
  void line(std::string words);
  void send(uint64_t connection, uint64_t id, Op op, Status status, Body body) override;

  const ServerOptions options_;
  const size_t max_frame_;
  Table table_;
  std::vector<Descriptor> listeners_;
  Descriptor epoll_, wake_;
  pthread_t thread_{};
  bool running_ = false;
  std::atomic<bool> stop_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> shut_{false};  // accepts no new clients
  std::atomic<int> clients_{0};
  size_t unproved_ = 0;  // connections that have not proved that they know the token
  size_t max_unproved_;  // how many such connections there may be
  bool paused_ = false;  // the listeners' events are off
  double next_sweep_ = 0;
  size_t refused_ = 0;    // refused connections that are not logged yet
  std::string last_refused_;
  double refused_told_ = -1;  // when refused connections were last logged
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<uint64_t> dirty_;  // connections that have something to send or are doomed
  std::vector<char> scratch_;
  double full_until_ = 0;  // no connection is accepted before this time, because no descriptor was free

  Mutex<NCCLPY_LOCK_STORE_LINES> lines_mutex_;
  Condition lines_news_;
  std::deque<std::string> lines_;
  size_t lines_lost_ = 0;
};

}  // namespace ncclpy::store
