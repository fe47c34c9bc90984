#include "client.hpp"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "connection_thread.hpp"

namespace ncclpy::store {
namespace {

constexpr size_t kPiece = 64 << 10;

}  // namespace

Client::Client(int fd, double heartbeat, size_t max_frame)
    : heartbeat_(heartbeat), max_frame_(max_frame), fd_(fd), nudge_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  last_sent_at_ = now();
  last_heard_at_ = now();
  ticked_at_ = now();
}

bool Client::start() {
  Lock lock(mutex_);
  watched_ = true;
  lock.unlock();
  return nudge_ && connection_thread::add(shared_from_this());
}

uint64_t Client::submit(Op op, std::string_view body) {
  Lock lock(mutex_);
  return ask(op, body);
}

// Does what submit() does; the caller holds the mutex.
uint64_t Client::ask(Op op, std::string_view body) {
  if (!lost_.empty()) return 0;
  Header header;
  header.length = body.size();
  header.id = ++last_id_;
  header.op = op;
  const uint64_t id = header.id;
  slots_[id].stream = op == Op::watch;
  char start[kHeader];
  header.put(start);
  const bool empty = out_.empty();
  if (empty && body.size() <= kPiece) {
    // The usual case: the whole frame at once.
    char frame[512];
    std::string longer;
    std::string_view whole;
    if (kHeader + body.size() <= sizeof frame) {
      memcpy(frame, start, kHeader);
      memcpy(frame + kHeader, body.data(), body.size());
      whole = {frame, kHeader + body.size()};
    } else {
      longer.assign(start, kHeader).append(body);
      whole = longer;
    }
    send_or_queue(whole);
  } else {
    out_.append(start, kHeader).append(body);
    push();
  }
  if (!out_.empty() && lost_.empty()) {  // the reading thread, or else the connection thread, sends the rest
    if (reading_) {
      const uint64_t one = 1;
      if (write(nudge_.get(), &one, sizeof one) < 0) {
        // The counter of the eventfd is full: the reader is awake.
      }
    } else {
      watch_socket(false);
    }
  }
  return id;
}

// Sends as many bytes as the socket has space for, and keeps the rest in out_. The caller holds the mutex, and out_ is
// empty.
void Client::send_or_queue(std::string_view bytes) {
  last_sent_at_ = now();
  const ssize_t done = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (done < 0 && errno != EAGAIN && errno != EINTR) {
    // The connection is broken, but not marked as lost here: the reading thread does that when it has read the
    // server's last frames, which may say why.
    return;
  }
  out_.append(bytes.substr(done < 0 ? 0 : static_cast<size_t>(done)));
}

// Sends as much of out_ as the socket has space for. Returns false if some of out_ waits for space.
bool Client::push() {
  while (out_sent_ < out_.size()) {
    const ssize_t done =
        ::send(fd_.get(), out_.data() + out_sent_, out_.size() - out_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return false;
      break;  // the connection is broken: the reading thread marks it as lost
    }
    last_sent_at_ = now();
    out_sent_ += static_cast<size_t>(done);
  }
  out_.clear();
  out_.shrink_to_fit();
  out_sent_ = 0;
  return true;
}

Client::WaitResult Client::wait(uint64_t id, double until) {
  Lock lock(mutex_);
  Condition wake_up;
  bool signalled = false;
  const auto outcome = [&]() {
    const auto at = slots_.find(id);
    if (at == slots_.end()) return WaitResult::lost;
    if (!at->second.answers.empty()) return WaitResult::answered;
    return lost_.empty() ? WaitResult::waiting : WaitResult::lost;
  };
  while (outcome() == WaitResult::waiting && !signalled && now() < until) {
    if (reading_) {
      slots_[id].sleeper = &wake_up;
      sleepers_.insert(&wake_up);
      wake_up.wait_for(lock, std::chrono::duration<double>(until - now()));
      sleepers_.erase(&wake_up);
      const auto at = slots_.find(id);
      if (at != slots_.end()) at->second.sleeper = nullptr;
      continue;
    }
    reading_ = true;
    if (watched_) watch_socket(true);
    while (outcome() == WaitResult::waiting && !signalled && now() < until) signalled = read_once(lock, until);
    reading_ = false;
  }
  // A thread that has only slept hands over too: it may have been woken to read next, and leave since its answer is
  // there.
  if (!reading_ && !watched_) hand_over_reading();
  return outcome();
}

// Called by a reading thread that leaves: makes another waiting thread, or else the connection thread, read next.
void Client::hand_over_reading() {
  if (!sleepers_.empty()) {
    (*sleepers_.begin())->notify_one();
  } else if (lost_.empty()) {
    watch_socket(false);
  }
}

// If `reader_waits`, a waiting thread reads, and incoming bytes do not wake the connection thread. Else they wake it,
// and so does space to send if out_ is not empty.
void Client::watch_socket(bool reader_waits) {
  watched_ = !reader_waits;
  connection_thread::watch(this, !reader_waits, !reader_waits && !out_.empty());
}

// Waits for bytes, and gives the answers among them to the threads that wait for them. Called only by the reading
// thread. Returns whether a signal arrived.
bool Client::read_once(Lock& lock, double until) {
  const bool more = !out_.empty() && !push();
  lock.unlock();
  pollfd both[2] = {{fd_.get(), static_cast<short>(POLLIN | (more ? POLLOUT : 0)), 0}, {nudge_.get(), POLLIN, 0}};
  const int ready = poll(both, 2, milliseconds_until(until));
  const bool signalled = ready < 0 && errno == EINTR;
  std::string why;
  std::vector<std::pair<Header, std::string>> frames;
  if (ready > 0) {
    uint64_t drained;
    if (both[1].revents && read(nudge_.get(), &drained, sizeof drained) < 0) drained = 0;
    if (both[0].revents & (POLLIN | POLLHUP | POLLERR)) {
      // new char[] does not zero the buffer: otherwise each of a thousand threads would touch all of its pages for an
      // answer of a few bytes.
      static thread_local const std::unique_ptr<char[]> piece(new char[kPiece]);
      const ssize_t got = recv(fd_.get(), piece.get(), kPiece, MSG_DONTWAIT);
      if (got > 0) {
        last_heard_at_ = now();
        in_.append(piece.get(), static_cast<size_t>(got));
        size_t used = 0;
        while (in_.size() - used >= kHeader) {
          Header header;
          if (!header.get(in_.data() + used) || header.length > max_frame_) {
            why = "it sent an invalid frame";
            break;
          }
          if (in_.size() - used - kHeader < header.length) break;
          frames.emplace_back(header, in_.substr(used + kHeader, header.length));
          used += kHeader + header.length;
        }
        in_.erase(0, used);
      } else if (got == 0) {
        why = "the connection ended";
      } else if (errno != EAGAIN && errno != EINTR) {
        why = std::string("the connection broke: ") + strerror(errno);
      }
    }
  }
  lock.lock();
  for (auto& [header, body] : frames) dispatch(header, std::move(body));
  if (!why.empty()) lose_connection(why);
  return signalled;
}

// How long this process was stopped just now, as missing ticks show: the connection thread waits for neither the GIL
// nor a socket, so only a stop keeps it from ticking.
double Client::seconds_stopped() const {
  const double time = now();
  return std::max(time - ticked_at_, time - stopped_until_ < heartbeat_ ? stopped_for_ : 0);
}

// The connection has ended or is broken, without a farewell. After a stop that was longer than the lease, the end of
// the lease is reported: this process cannot tell that from the end of the server.
void Client::lose_connection(const std::string& why) {
  const double stopped = seconds_stopped();
  if (stopped <= heartbeat_) return mark_lost("the server is gone: " + why);
  char words[80];
  snprintf(words, sizeof words, "about %.2g s, longer than its lease of %.3g s", stopped, heartbeat_);
  lease_ended_ = lost_.empty();
  mark_lost("this process was stopped (by a signal, a debugger, or with its machine) for " + std::string(words) +
       " at the store; the lease has ended with the connection (" + why + ")");
}

// The server has ended the lease, since it has heard nothing from this process for too long. It still serves others.
void Client::lose_lease(std::string_view why) {
  const double stopped = seconds_stopped();
  char words[80];
  lease_ended_ = lost_.empty();
  if (stopped > heartbeat_ / 2) {
    snprintf(words, sizeof words, "about %.2g s, longer than its lease of %.3g s", stopped, heartbeat_);
    mark_lost("this process was stopped (by a signal, a debugger, or with its machine) for " + std::string(words) +
         " at the store; the lease has ended, but the server serves the others, and a new store reaches it");
  } else {
    snprintf(words, sizeof words, "the lease of %.3g s", heartbeat_);
    mark_lost(std::string(words) + " that this process had at the store has ended: the server says that " +
         std::string(why) + ", and the process was not stopped, so the network between them may be broken");
  }
}

bool Client::lease_ended() {
  Lock lock(mutex_);
  return lease_ended_;
}

void Client::dispatch(const Header& header, std::string body) {
  if (header.op == Op::farewell) {
    std::string_view words = "it said farewell";
    Reader(body).bytes(words);
    if (header.status == Status::late) return lose_lease(words);
    return mark_lost("the server is gone: " + std::string(words));
  }
  const auto at = slots_.find(header.id);
  if (at == slots_.end()) return;  // the answer to a heartbeat, or to a request that no thread waits for any more
  const auto publisher = publishers_.find(header.id);
  if (publisher != publishers_.end()) {
    if (header.op == Op::change) publish(publisher->second, now(), true);
    return;
  }
  at->second.answers.push_back({header.op, header.status, std::move(body)});
  if (at->second.sleeper != nullptr) at->second.sleeper->notify_one();
}

void Client::mark_lost(std::string why) {
  if (!lost_.empty()) return;
  lost_ = std::move(why);
  for (auto& [id, slot] : slots_) {
    if (slot.sleeper != nullptr) slot.sleeper->notify_one();
  }
  // The descriptor stays open until close(): other threads may be about to use its number.
  shutdown(fd_.get(), SHUT_RDWR);
  connection_thread::watch(this, false, false);
}

bool Client::take(uint64_t id, Answer& answer) {
  Lock lock(mutex_);
  const auto at = slots_.find(id);
  if (at == slots_.end() || at->second.answers.empty()) return false;
  answer = std::move(at->second.answers.front());
  at->second.answers.pop_front();
  if (!at->second.stream) slots_.erase(at);
  return true;
}

uint64_t Client::start_publisher(const std::string& question_key, Publisher publisher) {
  Lock lock(mutex_);
  Writer prefix;
  prefix.bytes(question_key);
  const uint64_t id = ask(Op::watch, prefix.body);
  if (id == 0) return 0;
  publish(publishers_.emplace(id, std::move(publisher)).first->second, now(), false);
  has_publishers_ = true;
  lock.unlock();
  connection_thread::update_tick_interval();  // publishers need more ticks
  return id;
}

void Client::end_publisher(uint64_t id) {
  Lock lock(mutex_);
  publishers_.erase(id);
  has_publishers_ = !publishers_.empty();
  lock.unlock();
  forget(id, true);
}

// Publishes a publisher's value, if it is due; the caller holds the mutex.
void Client::publish(Publisher& publisher, double time, bool asked) {
  const std::string value = publisher.next(time, asked);
  if (value.empty()) return;
  Writer body;
  body.bytes(publisher.key()).bytes(value).integer(0);
  slots_.erase(ask(Op::set, body.body));  // no thread waits for the answer
}

void Client::forget(uint64_t id, bool tell) {
  Lock lock(mutex_);
  const auto at = slots_.find(id);
  if (at == slots_.end()) return;
  const bool stream = at->second.stream;
  if (at->second.sleeper != nullptr) at->second.sleeper->notify_one();
  slots_.erase(at);
  lock.unlock();
  if (!tell) return;
  Writer which;
  which.integer(static_cast<int64_t>(id));
  const uint64_t request = submit(stream ? Op::unwatch : Op::cancel, which.body);
  lock.lock();
  slots_.erase(request);
}

void Client::close(const char* why, double patience) {
  if (!fd_) return;
  const uint64_t id = submit(Op::goodbye, "");
  if (id != 0) {
    const double until = now() + patience;
    while (wait(id, until) == WaitResult::waiting && now() < until) continue;
  }
  Lock lock(mutex_);
  if (lost_.empty() || id != 0) {
    lost_.clear();
    mark_lost(why);
  }
  lock.unlock();
  connection_thread::remove(this);
  lock.lock();
  // No thread begins to read or send on a lost connection; one that still reads is about to return.
  while (reading_) {
    lock.unlock();
    usleep(100);
    lock.lock();
  }
  fd_.close();
  nudge_.close();
}

std::string Client::lost() {
  Lock lock(mutex_);
  return lost_;
}

void Client::read_pending() {
  Lock lock(mutex_);
  if (reading_ || !lost_.empty()) return;
  reading_ = true;
  read_once(lock, 0);
  reading_ = false;
  hand_over_reading();
}

void Client::tick(double time, double seconds_late) {
  Lock lock(mutex_);
  if (!lost_.empty()) return;
  if (const double gap = time - ticked_at_; gap > heartbeat_ / 2) {
    stopped_for_ = gap;
    stopped_until_ = time;
  }
  ticked_at_ = time;
  if (!std::exchange(ticked_, true)) seconds_late = time;  // silence before the first tick does not count
  double heard = last_heard_at_;
  while (!last_heard_at_.compare_exchange_weak(heard, std::max(heard, std::min(time, heard + seconds_late)))) continue;
  if (time - last_heard_at_ > heartbeat_) {
    char words[80];
    snprintf(words, sizeof words, "the server is gone: nothing was heard of it for %.3g s", time - last_heard_at_);
    mark_lost(words);
    return;
  }
  for (auto& [id, publisher] : publishers_) publish(publisher, time, false);
  if (time - last_sent_at_ < heartbeat_ / 4 && time - last_heard_at_ < heartbeat_ / 4) return;
  lock.unlock();
  const uint64_t id = submit(Op::ping, "");
  lock.lock();
  slots_.erase(id);
}

}  // namespace ncclpy::store
