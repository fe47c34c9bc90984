#include "server.hpp"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "clock.hpp"
#include "handshake.hpp"

namespace ncclpy::store {
namespace {

constexpr size_t kScratch = 256 << 10;
constexpr double kPatience = 3;     // seconds in which a connection has to prove that it knows the token
constexpr double kHaste = 0.25;     // seconds in which it has to send its first byte, while others wait for accept()
constexpr size_t kMaxUnproved = 64;  // most connections that have not proved that they know the token
constexpr size_t kLines = 256;  // most lines that wait for next_line(); more are counted and dropped
constexpr uint64_t kWake = 0;  // epoll's id of wake_; those of the listeners follow
constexpr uint64_t kFirstConnection = 1024;

std::string text_of(const sockaddr_storage& address) {
  char host[INET6_ADDRSTRLEN] = "?";
  if (address.ss_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &six.sin6_addr, host, sizeof host);
    return "[" + std::string(host) + "]:" + std::to_string(ntohs(six.sin6_port));
  }
  const auto& four = reinterpret_cast<const sockaddr_in&>(address);
  inet_ntop(AF_INET, &four.sin_addr, host, sizeof host);
  return std::string(host) + ":" + std::to_string(ntohs(four.sin_port));
}

// The beginning of what a connection has sent, for the log.
std::string shown(std::string_view bytes) {
  std::string text;
  for (char each : bytes.substr(0, 24)) text += each >= 0x20 && each < 0x7f ? each : '.';
  return "'" + text + "'";
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t at = 0; at < count;) {
    const ssize_t got = getrandom(bytes.data() + at, count - at, 0);
    if (got > 0) at += static_cast<size_t>(got);
  }
  return bytes;
}

// How many connections may be open that have not proved that they know the token. `fd` is the latest connection's
// descriptor. The system gives the lowest free descriptor, so all below `fd` are in use. Of the descriptors above,
// such connections get a quarter, since the rest of the process needs descriptors too.
size_t max_unproved(int fd) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMaxUnproved;
  const rlim_t latest = static_cast<rlim_t>(fd);
  const rlim_t left = limit.rlim_cur > latest ? limit.rlim_cur - latest : 0;
  return static_cast<size_t>(std::clamp<rlim_t>(left / 4, 1, kMaxUnproved));
}

}  // namespace

Server::Server(const ServerOptions& options)
    : options_(options),
      max_frame_(2 * options.max_value + (1 << 20)),  // a compare_set has two values
      table_(*this, options.max_value, options.max_answer, options.capacity),
      max_unproved_(kMaxUnproved),
      last_id_(kFirstConnection),
      scratch_(kScratch) {}

Server::~Server() { stop(); }

void Server::listen(int fd) { listeners_.emplace_back(fd); }

bool Server::start() {
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !wake_) return false;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) return false;
  for (size_t i = 0; i < listeners_.size(); i++) {
    event.data.u64 = kWake + 1 + i;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listeners_[i].get(), &event) != 0) return false;
  }
  running_ = start_thread(thread_, "ncclpy-store", &Server::main, this);
  return running_;
}

void Server::wake() {
  const uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof one) < 0) {
    // The counter of the eventfd is full: the thread is awake.
  }
}

void Server::refuse_new() {
  if (!running_) return;
  shut_ = true;
  for (const Descriptor& each : listeners_) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, each.get(), nullptr);
    shutdown(each.get(), SHUT_RDWR);  // not closed: the thread may be about to use the descriptor's number
  }
  wake();
}

void Server::stop() {
  if (running_) {
    running_ = false;
    stop_ = true;
    wake();
    pthread_join(thread_, nullptr);
  }
  epoll_.close();
  wake_.close();
  listeners_.clear();
  std::lock_guard lock(lines_mutex_);
  stopped_ = true;
  lines_news_.notify_all();
}

bool Server::next_line(std::string& line, double seconds) {
  std::unique_lock lock(lines_mutex_);
  lines_news_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopped_ || !lines_.empty(); });
  if (lines_.empty()) return false;
  line = std::move(lines_.front());
  lines_.pop_front();
  if (lines_lost_ && lines_.empty()) {
    lines_.push_back("and " + std::to_string(lines_lost_) + " more lines, which were not read in time");
    lines_lost_ = 0;
  }
  return true;
}

void Server::line(std::string words) {
  std::lock_guard lock(lines_mutex_);
  if (lines_.size() >= kLines) {
    lines_lost_++;
    return;
  }
  lines_.push_back(std::move(words));
  lines_news_.notify_one();
}

void* Server::main(void* self) {
  static_cast<Server*>(self)->run();
  return nullptr;
}

void Server::run() {
  std::vector<epoll_event> events(512);
  const double tick = std::min(options_.heartbeat / 4, 1.0);
  next_sweep_ = now() + tick;
  while (!stop_) {
    const double until = std::min(next_sweep_, table_.next_deadline());
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), milliseconds_until(until));
    for (int i = 0; i < count; i++) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == kWake) {
        uint64_t drained;
        if (::read(wake_.get(), &drained, sizeof drained) > 0 && shut_) send_unproved_away();
        continue;
      }
      if (id <= listeners_.size()) {
        accept(listeners_[id - 1].get());
        continue;
      }
      const auto at = connections_.find(id);
      if (at == connections_.end()) continue;
      Connection& connection = *at->second;
      const uint32_t what = events[static_cast<size_t>(i)].events;
      if (what & EPOLLOUT) flush(connection);
      if (what & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) read(connection);
    }
    const double time = now();
    if (table_.next_deadline() <= time) table_.expire(time);
    if (time >= next_sweep_) {
      sweep(time, time - next_sweep_);
      next_sweep_ = time + (paused_ ? std::min(tick, kHaste) : tick);
    }
    settle();
    if (paused_ && unproved_ < max_unproved_ && time >= full_until_) enable_listeners(true);
  }
  say_farewell();
  tell_refused(std::numeric_limits<double>::infinity());
  connections_.clear();
}

// Turns the listeners' events on or off. While no connection can be accepted they are off: a connection that waits for
// accept() would wake the thread all the time.
void Server::enable_listeners(bool enabled) {
  paused_ = !enabled;
  if (paused_) next_sweep_ = std::min(next_sweep_, now() + kHaste);
  epoll_event event{};
  event.events = enabled ? EPOLLIN : 0u;
  for (size_t each = 0; each < listeners_.size(); each++) {
    event.data.u64 = kWake + 1 + each;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listeners_[each].get(), &event);
  }
}

void Server::accept(int listener) {
  for (int i = 0; i < 64 && !paused_ && !shut_; i++) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    const int fd = accept4(listener, reinterpret_cast<sockaddr*>(&address), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        line("cannot accept another client (" + std::to_string(connections_.size()) +
             " are connected), it has to wait: " +
             (errno == EMFILE   ? "the limit of descriptors is reached (ulimit -n)"
              : errno == ENFILE ? "the system's limit of descriptors is reached"
                                : "the system has no memory for it"));
        full_until_ = now() + 1;
        enable_listeners(false);
      }
      return;
    }
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    const auto patience = static_cast<unsigned>(options_.heartbeat * 1e3);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience, sizeof patience);
    auto made = std::make_unique<Connection>();
    made->id = ++last_id_;
    made->fd = Descriptor(fd);
    made->peer = text_of(address);
    made->since = made->heard = now();
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = made->id;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) continue;
    connections_.emplace(made->id, std::move(made));
    unproved_++;
    max_unproved_ = max_unproved(fd);
    if (unproved_ >= max_unproved_) enable_listeners(false);
  }
}

void Server::read(Connection& connection) {
  if (!connection.doomed.empty()) return;
  const ssize_t got = recv(connection.fd.get(), scratch_.data(), scratch_.size(), 0);
  if (got < 0) {
    if (errno != EAGAIN && errno != EINTR) doom(connection, std::string("the connection broke: ") + strerror(errno));
    return;
  }
  if (got == 0) {
    doom(connection, "the connection ended");
    return;
  }
  connection.heard = now();
  const std::string_view bytes(scratch_.data(), static_cast<size_t>(got));
  if (connection.in.empty()) {
    connection.in.append(bytes.substr(parse(connection, bytes)));
  } else {
    // A frame that arrives in pieces is parsed when it is whole, and not again for each piece after its header.
    const bool known = connection.stage == Stage::open && connection.in.size() >= kHeader;
    connection.in.append(bytes);
    if (known && connection.in.size() - kHeader < get_u64(connection.in.data())) return;
    connection.in.erase(0, parse(connection, connection.in));
  }
}

size_t Server::parse(Connection& connection, std::string_view bytes) {
  size_t used = 0;
  while (connection.doomed.empty()) {
    const std::string_view rest = bytes.substr(used);
    if (connection.stage != Stage::open) {
      const size_t step = shake_hands(connection, rest);
      if (step == 0) break;
      used += step;
      continue;
    }
    if (rest.size() < kHeader) break;
    Header header;
    if (!header.get(rest.data()) || header.op >= Op::change || header.status != Status::ok) {
      doom(connection, "it sent an invalid frame: " + shown(rest));
      break;
    }
    if (header.length > max_frame_) {
      doom(connection, "it announced a frame of " + std::to_string(header.length) + " bytes; the limit is " +
                           std::to_string(max_frame_));
      break;
    }
    if (rest.size() - kHeader < header.length) break;
    frame(connection, header, rest.substr(kHeader, header.length));
    used += kHeader + header.length;
  }
  return used;
}

// Returns 0 if no bytes were used: the message is not complete yet, the greeting is wrong, or the server is closing.
size_t Server::shake_hands(Connection& connection, std::string_view bytes) {
  if (connection.stage == Stage::greeting) {
    const std::string wrong = wrong_greeting(bytes);
    if (!wrong.empty()) {
      if (bytes.substr(0, kMagic.size()) == kMagic) {  // a client of another version: tell it this server's version
        queue(connection, {server_greeting(!options_.token.empty(), 0, std::string(kNonce, '\0')), nullptr});
        flush(connection);
      }
      doom(connection, wrong + ": " + shown(bytes));
      return 0;
    }
    if (bytes.size() < kGreeting) return 0;
    const uint32_t theirs = get_u32(bytes.data() + 12);
    // Both ends use the smaller of their two values.
    connection.heartbeat = theirs ? std::min(options_.heartbeat, theirs * 1e-3) : options_.heartbeat;
    const std::string mine = server_greeting(!options_.token.empty(),
                                             static_cast<uint32_t>(connection.heartbeat * 1e3), random_bytes(kNonce));
    connection.greetings = std::string(bytes.substr(0, kGreeting)) + mine;
    connection.stage = Stage::proof;
    queue(connection, {mine, nullptr});
    return kGreeting;
  }
  if (bytes.size() < kDigest) return 0;
  if (shut_) return 0;  // send_unproved_away() follows
  const bool right =
      equal_in_constant_time(bytes.substr(0, kDigest), proof("client", options_.token, connection.greetings));
  char numbers[12];
  put_u32(numbers, static_cast<uint32_t>(right ? Verdict::welcome : Verdict::wrong_token));
  put_u64(numbers + 4, right ? connection.id - kFirstConnection : 0);
  const std::string mine = right ? proof("server", options_.token, connection.greetings) : std::string(kDigest, '\0');
  queue(connection, {std::string(numbers, 4) + mine + std::string(numbers + 4, 8), nullptr});
  if (right) {
    connection.stage = Stage::open;
    unproved_--;
    clients_++;
  } else {
    flush(connection);
    doom(connection, "it does not know the token");
  }
  return kDigest;
}

void Server::frame(Connection& connection, const Header& header, std::string_view body) {
  if (header.op == Op::goodbye) {
    connection.goodbye = true;
    send(connection.id, header.id, Op::goodbye, Status::ok, {});
    flush(connection);
    doom(connection, "goodbye");
    return;
  }
  if (!table_.request(connection.id, header, body, now())) {
    doom(connection, "it sent an invalid request (" + std::to_string(static_cast<int>(header.op)) + ")");
  }
}

void Server::send(uint64_t id, uint64_t request, Op op, Status status, Body body) {
  const auto at = connections_.find(id);
  if (at == connections_.end() || !at->second->doomed.empty()) return;
  Connection& connection = *at->second;
  Header header;
  header.length = body.head.size() + (body.tail ? body.tail->size() : 0);
  header.id = request;
  header.op = op;
  header.status = status;
  std::string start(kHeader, '\0');
  header.put(start.data());
  start += body.head;
  queue(connection, {std::move(start), nullptr});
  if (body.tail && !body.tail->empty()) queue(connection, {{}, std::move(body.tail)});
}

void Server::queue(Connection& connection, Piece piece) {
  connection.backlog += piece.bytes().size();
  // Small pieces are merged.
  if (!piece.shared && !connection.out.empty() && !connection.out.back().shared &&
      connection.out.back().own.size() + piece.own.size() < (16 << 10)) {
    connection.out.back().own += piece.own;
  } else {
    connection.out.push_back(std::move(piece));
  }
  if (!connection.dirty) {
    connection.dirty = true;
    dirty_.push_back(connection.id);
  }
  if (connection.backlog > options_.max_backlog) {
    doom(connection, "it does not read: " + std::to_string(connection.backlog) + " bytes wait for it");
  }
}

void Server::doom(Connection& connection, std::string why) {
  if (!connection.doomed.empty()) return;
  connection.doomed = std::move(why);
  if (!connection.dirty) {
    connection.dirty = true;
    dirty_.push_back(connection.id);
  }
}

void Server::flush(Connection& connection) {
  while (!connection.out.empty()) {
    iovec parts[64];
    int count = 0;
    for (const Piece& piece : connection.out) {
      std::string_view bytes = piece.bytes();
      if (count == 0) bytes.remove_prefix(connection.sent);
      parts[count++] = {const_cast<char*>(bytes.data()), bytes.size()};
      if (count == 64) break;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t done = sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) {
        doom(connection, std::string("the connection broke: ") + strerror(errno));
        return;
      }
      break;
    }
    connection.backlog -= static_cast<size_t>(done);
    size_t left = connection.sent + static_cast<size_t>(done);
    while (!connection.out.empty() && left >= connection.out.front().bytes().size()) {
      left -= connection.out.front().bytes().size();
      connection.out.pop_front();
    }
    connection.sent = left;
  }
  const bool blocked = !connection.out.empty();
  if (blocked != connection.blocked) {
    connection.blocked = blocked;
    epoll_event event{};
    event.events = EPOLLIN | (blocked ? EPOLLOUT : 0u);
    event.data.u64 = connection.id;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd.get(), &event);
  }
}

// Sends what is queued, and closes doomed connections. The end of one connection may queue frames for others.
void Server::settle() {
  while (!dirty_.empty()) {
    std::vector<uint64_t> now_dirty;
    now_dirty.swap(dirty_);
    for (uint64_t id : now_dirty) {
      const auto at = connections_.find(id);
      if (at == connections_.end()) continue;
      Connection& connection = *at->second;
      connection.dirty = false;
      if (connection.doomed.empty() && !connection.blocked) flush(connection);
      if (!connection.doomed.empty()) close(id);
    }
  }
}

void Server::close(uint64_t id) {
  const auto at = connections_.find(id);
  const std::unique_ptr<Connection> connection = std::move(at->second);
  connections_.erase(at);
  if (connection->stage == Stage::open) {
    clients_--;
    if (!connection->goodbye) {
      line("lost client " + std::to_string(id - kFirstConnection) + " at " + connection->peer + ": " +
           connection->doomed);
    }
    table_.gone(id, connection->goodbye);
  } else {
    unproved_--;
    if (!shut_) {  // a closing server does not log this: the client may be one of the next store on this port
      refused_++;
      last_refused_ = connection->peer + ": " + connection->doomed;
      tell_refused(now());
    }
  }
  shutdown(connection->fd.get(), SHUT_WR);
}

// Logs refused connections once a second at most: a client that floods the server does not flood the log.
void Server::tell_refused(double time) {
  if (refused_ == 0 || time < refused_told_ + 1) return;
  line("refused " + last_refused_ +
       (refused_ == 1 ? "" : " (and " + std::to_string(refused_ - 1) + " more within the last second or two)"));
  refused_ = 0;
  refused_told_ = time;
}

// Called when the server is closing: closes the connections of clients that have not completed the handshake. These
// clients connect again, and reach the next server on this port if there is one.
void Server::send_unproved_away() {
  for (auto& [id, connection] : connections_) {
    if (connection->stage != Stage::open) doom(*connection, "the server is closing");
  }
}

// `seconds_late` is by how much this sweep is late, because the server's process or machine was stopped. That time
// does not count as silence: bytes that arrived meanwhile may not be read yet, and the clients may have been stopped
// too.
void Server::sweep(double time, double seconds_late) {
  for (auto& [id, connection] : connections_) {
    connection->heard = std::min(time, connection->heard + seconds_late);
    connection->since = std::min(time, connection->since + seconds_late);
    if (connection->stage == Stage::open) {
      if (time - connection->heard > connection->heartbeat) {
        char words[64];
        snprintf(words, sizeof words, "nothing was heard of it for %.3g s", time - connection->heard);
        Writer told;
        told.bytes(words);
        send(id, 0, Op::farewell, Status::late, {std::move(told.body), nullptr});
        flush(*connection);
        doom(*connection, words);
      }
      continue;
    }
    const bool silent = connection->stage == Stage::greeting && connection->in.empty();
    if (time - connection->since > std::min(silent && paused_ ? kHaste : kPatience, options_.heartbeat)) {
      doom(*connection, "it did not complete the handshake in time");
    }
  }
  tell_refused(time);
}

void Server::say_farewell() {
  Writer words;
  words.bytes("the server was closed");
  for (auto& [id, connection] : connections_) {
    if (connection->stage == Stage::open) send(id, 0, Op::farewell, Status::ok, {words.body, nullptr});
    flush(*connection);
    shutdown(connection->fd.get(), SHUT_WR);
  }
  clients_ = 0;
}

}  // namespace ncclpy::store
