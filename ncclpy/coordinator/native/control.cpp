#include "control.hpp"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "ncclpy/bootstrap/native/clock.hpp"

namespace ncclpy::coordinator {

using store::now;

namespace {

constexpr uint32_t kGoodbye = UINT32_MAX;  // in place of a length; a length of 0 is a heartbeat
constexpr uint32_t kMaxFrame = 1u << 30;  // bytes
constexpr size_t kScratch = 64 << 10;     // bytes that one call of recv() takes
constexpr double kFarewell = 1.0;  // seconds at the end to send the rest, and for the other ranks to close their ends
// Seconds for which operations that are brought one after the other are put into one frame: a frame costs a system
// call here and wakes the receiving thread, which takes longer than bringing a few more operations.
constexpr double kTogether = 40e-6;
// Seconds for which a thread that brings one operation after the other is not disturbed: the thread that takes
// received frames waits, since it would take the GIL.
constexpr double kUndisturbed = 500e-6;
// Seconds after an operation was brought for which the thread that waits for the response polls without sleeping, as
// waking up takes as long as the rest of the exchange. The thread polls longer with kManyCores cores or more.
constexpr double kAwake = 500e-6, kAwakeWithCores = 3e-3;
constexpr unsigned kManyCores = 8;

void put_length(std::string& out, uint32_t length) {
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(length >> shift));
}

uint32_t length_at(const char* bytes) {
  uint32_t length = 0;
  for (int i = 0; i < 4; ++i) length |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return length;
}

}  // namespace

Control::Control(const Place& place, const Options& options, Peer parent, const std::vector<int>& children)
    : options_(options),
      many_cores_(std::thread::hardware_concurrency() >= kManyCores),
      node_(place, options.cache, options.timeout, options.stall_after) {
  const double time = now();
  if (parent.fd >= 0) {
    Link& link = links_.emplace_back();
    link.rank = parent.rank;
    link.fd = store::Descriptor(parent.fd);
    link.last_received = link.last_queued = time;
  }
  for (size_t i = 0; i < children.size(); ++i) {
    Link& link = links_.emplace_back();
    link.rank = place.children[i].first;
    link.child = static_cast<int>(i);
    link.fd = store::Descriptor(children[i]);
    link.last_received = link.last_queued = time;
  }
}

bool Control::start() {
  wake_fd_ = store::Descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_fd_) return false;
  auto* const self = new std::shared_ptr<Control>(shared_from_this());
  running_ = store::start_thread(thread_, "ncclpy-coord", main, self);
  if (!running_) delete self;
  return running_;
}

// Calls of this rank.

Brought Control::bring(uint32_t group, const std::string& key, const std::string& fixed, const std::string& own,
                       bool joinable) {
  const Lock lock(mutex_);
  return bring_locked(group, key, fixed, own, joinable);
}

bool Control::try_bring(uint32_t group, const std::string& key, const std::string& fixed, const std::string& own,
                        bool joinable, Brought& brought) {
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  brought = bring_locked(group, key, fixed, own, joinable);
  return true;
}

Brought Control::bring_locked(uint32_t group, const std::string& key, const std::string& fixed, const std::string& own,
                              bool joinable) {
  const double time = now();
  before_last_ = last_brought_;
  last_brought_ = time;
  const Brought brought = node_.bring(group, key, fixed, own, joinable, time);
  if (brought != Brought::taken) return brought;
  if (time - sent_at_ >= kTogether) {
    sent_at_ = time;
    flush(time);
    if (asleep_ && readers_ > 0) wake_attendant();  // to be awake when the response arrives
  } else if (send_due_ == 0) {  // at that time all that was brought is sent, unless an earlier flush() has sent it
    send_due_ = sent_at_ + kTogether;
    if (attending_ && asleep_until_ > send_due_) wake_attendant();
  }
  return brought;
}

// Makes a frame of what was brought and is not sent yet. A caller that changes the node does this first: the frame's
// bits refer to what the slots hold now.
void Control::settle_brought() {
  if (send_due_ != 0) node_.settle();
}

Brought Control::join() {
  const Lock lock(mutex_);
  settle_brought();
  const Brought joined = node_.join();
  flush(now());
  return joined;
}

void Control::shut_down(bool drain, const std::string& reason) {
  const Lock lock(mutex_);
  settle_brought();
  node_.shut_down(drain, reason);
  flush(now());
}

void Control::launched(uint32_t group) {
  const Lock lock(mutex_);
  settle_brought();
  node_.launched(group);
  flush(now());
}

Bits Control::have(uint32_t group, const std::string& key) {
  const Lock lock(mutex_);
  return node_.have(group, key);
}

Counters Control::counters() {
  const Lock lock(mutex_);
  return node_.counters;
}

bool Control::is_in_burst(double time) const {
  return time - before_last_ < 2 * kTogether && time - last_brought_ < kTogether &&
         time - frames_since_ < kUndisturbed;
}

Control::Next Control::next(std::vector<Record>& records, double until) {
  Lock lock(mutex_);
  ++readers_;
  if (attending_) wake_attendant();  // if the Control's own thread attends, it stops, and this thread attends
  Next found = Next::nothing;
  for (;;) {
    const double time = now();
    const bool bursts = !frames_.empty() && is_in_burst(time);
    if (!frames_.empty() && !bursts) {
      records = std::move(frames_.front());
      frames_.pop_front();
      frames_since_ = time;
      found = Next::frame;
      break;
    }
    if (frames_.empty() && (node_.ended() || stopping_)) {
      found = Next::over;
      break;
    }
    const double left = until - time;
    if (left <= 0 && !bursts) break;
    if (attending_ || !running_) {
      frame_ready_.wait_for(lock, std::chrono::duration<double>(bursts ? kTogether : std::min(left, 3600.0)));
      continue;
    }
    attending_ = true;
    lock.unlock();
    try {
      step(bursts ? time + kTogether : until, true);
    } catch (...) {
      lock.lock();
      attending_ = false;
      --readers_;
      throw;
    }
    lock.lock();
    attending_ = asleep_ = false;
  }
  --readers_;
  last_attended_ = now();
  if (readers_ > 0 || stopping_) {
    frame_ready_.notify_all();
    unattended_.notify_all();
  }
  return found;
}

void Control::close(bool wait) {
  bool joins = false;
  {
    const Lock lock(mutex_);
    joins = running_ && wait;
    if (!stopping_) {
      stopping_ = true;
      for (Link& link : links_) {
        if (link.broken) continue;
        put_length(link.out, kGoodbye);
        send_queued(link);
      }
    }
    if (running_ && !wait) pthread_detach(thread_);
    running_ = false;
    frame_ready_.notify_all();
    unattended_.notify_all();
    wake_attendant();
  }
  if (joins) pthread_join(thread_, nullptr);
}

// Sending. The caller holds the mutex.

void Control::flush(double time, bool attends) {
  bool has_records = false;
  send_due_ = 0;
  node_.settle();
  for (Link& link : links_) {
    for (const std::string& frame : link.child < 0 ? node_.up : node_.down) enqueue(link, frame, time);
    if (!link.out.empty()) send_queued(link);
  }
  node_.up.clear();
  node_.down.clear();
  if (!node_.records.empty()) {
    if (frames_.empty()) frames_since_ = time;
    for (auto& frame : node_.records) frames_.push_back(std::move(frame));
    node_.records.clear();
    has_records = true;
  }
  if (has_records || node_.ended()) {
    frame_ready_.notify_all();
    if (attending_ && readers_ > 0 && !attends) wake_attendant();  // it is in next(), asleep in poll()
  }
  const double soon = options_.timeout > 0 ? std::min(options_.timeout, options_.stall_after) : options_.stall_after;
  if (attending_ && asleep_until_ > time + soon + 1e-3 && node_.pending()) wake_attendant();
}

void Control::enqueue(Link& link, std::string_view frame, double time) {
  if (link.broken) return;
  put_length(link.out, static_cast<uint32_t>(frame.size()));
  link.out.append(frame);
  link.last_queued = time;
}

void Control::send_queued(Link& link) {
  while (!link.broken && link.sent < link.out.size()) {
    const ssize_t n =
        send(link.fd.get(), link.out.data() + link.sent, link.out.size() - link.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      link.sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wake_attendant();  // the attending thread sends the rest when there is space
      return;
    } else if (errno != EINTR) {
      link.broken = true;  // the attending thread reads what arrived before, and finds the end
    }
  }
  link.out.clear();
  link.sent = 0;
}

void Control::wake_attendant() {
  const uint64_t one = 1;
  if (wake_fd_ && write(wake_fd_.get(), &one, sizeof(one)) < 0) return;  // counter full: the thread wakes in any case
}

// Receiving. The attending thread calls these functions.

void Control::drop_link(Link& link, const std::string& why) {
  link.fd.close();
  link.broken = true;
  if (link.child < 0) {
    node_.lost_parent(link.rank, why);
  } else {
    node_.lost_child(static_cast<size_t>(link.child), why);
  }
}

bool Control::read(Link& link, std::vector<char>& scratch, double time) {
  const ssize_t n = recv(link.fd.get(), scratch.data(), scratch.size(), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return true;
  const int failed = n < 0 ? errno : 0;
  const Lock lock(mutex_);
  if (stopping_) {  // bytes are read and ignored: closing with unread bytes could reset the connection before the other
                    // end has read the goodbye
    if (n <= 0) link.fd.close();
    return n > 0;
  }
  if (n <= 0) {
    settle_brought();
    drop_link(link, link.goodbye ? "has closed its coordinator"
                    : failed != 0 && failed != ECONNRESET ? std::string("cannot be reached: ") + strerror(failed)
                                                          : "has ended, or its machine");
    flush(time, true);
    return false;
  }
  settle_brought();
  link.last_received = time;
  link.in.append(scratch.data(), static_cast<size_t>(n));
  size_t at = 0;
  std::string wrong;
  while (wrong.empty() && link.in.size() - at >= 4) {
    const uint32_t length = length_at(link.in.data() + at);
    if (length == kGoodbye) {
      link.goodbye = true;
      at += 4;
      continue;
    }
    if (length > kMaxFrame) wrong = "a frame of " + std::to_string(length) + " bytes";
    if (!wrong.empty() || link.in.size() - at - 4 < length) break;
    const std::string_view frame(link.in.data() + at + 4, length);
    at += 4 + size_t{length};
    if (length == 0) continue;
    try {
      if (link.child < 0) {
        node_.from_parent(frame, time);
      } else {
        node_.from_child(static_cast<size_t>(link.child), frame, time);
      }
      node_.settle();  // a frame upwards has the number of the last frame applied before it
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  }
  link.in.erase(0, at);
  if (!wrong.empty()) drop_link(link, "has sent a malformed frame of the control plane: " + wrong);
  flush(time, true);
  return wrong.empty();
}

void* Control::main(void* self) {
  const std::unique_ptr<std::shared_ptr<Control>> kept(static_cast<std::shared_ptr<Control>*>(self));
  Control& control = **kept;
  try {
    control.run();
  } catch (const std::exception&) {  // such as no memory; the other ranks see closed connections, and end too
    const Lock lock(control.mutex_);
    control.stopping_ = true;
    for (Link& link : control.links_) link.fd.close();
    control.frame_ready_.notify_all();
  }
  return nullptr;
}

// The Control's thread.

void Control::run() {
  attend();
  say_goodbye();
}

// Attends whenever no thread has waited for frames for the interval of a heartbeat.
void Control::attend() {
  const double beat = options_.silence / 6;
  for (;;) {
    {
      Lock lock(mutex_);
      while (!stopping_ && (attending_ || readers_ > 0 || now() - last_attended_ < beat))
        unattended_.wait_for(lock, std::chrono::duration<double>(std::min(beat, 3600.0)));
      while (stopping_ && attending_) unattended_.wait_for(lock, std::chrono::duration<double>(kFarewell));
      attending_ = true;
      if (stopping_) return;
    }
    step(now() + beat, false);
    const Lock lock(mutex_);
    attending_ = asleep_ = false;
    if (readers_ > 0) frame_ready_.notify_all();
  }
}

// Sends what is not sent yet, and waits until the others have closed their ends, or gives up after kFarewell.
void Control::say_goodbye() {
  const double give_up = now() + kFarewell;
  bool writes_shut_down = false;
  for (;;) {
    {
      const Lock lock(mutex_);
      const double time = now();
      flush(time, true);
      bool there = false, unsent = false;
      for (const Link& link : links_) {
        there = there || link.fd;
        unsent = unsent || (link.fd && !link.broken && !link.out.empty());
      }
      if (!there || time >= give_up) {
        for (Link& link : links_) link.fd.close();
        return;
      }
      if (!unsent && !writes_shut_down) {
        writes_shut_down = true;
        for (Link& link : links_)
          if (link.fd) shutdown(link.fd.get(), SHUT_WR);
      }
    }
    step(give_up, false);
  }
}

// With `reads`, this does not wait if there is a frame for next() to take. During a burst it waits up to kTogether for
// more of the burst.
void Control::step(double until, bool reads) {
  const double beat = options_.silence / 6;
  double awake = 0;
  {
    const Lock lock(mutex_);
    const double time = now();
    if (scratch_.empty()) {
      scratch_.resize(kScratch);
      last_step_ = time;
    }
    if (time - last_step_ > 2 * beat) {  // this process or its machine was stopped: the others may have sent meanwhile
      for (Link& link : links_) link.last_received = std::max(link.last_received, time - beat);
    }
    last_step_ = time;
    until = std::min({until, time + beat, node_.look(time)});
    for (Link& link : links_) {
      if (!link.fd) continue;
      if (time - link.last_queued >= beat) enqueue(link, {}, time);
      if (time - link.last_received >= options_.silence && !node_.ended()) {
        char words[64];
        snprintf(words, sizeof(words), "has been silent for %.0f s", time - link.last_received);
        drop_link(link, words);
      }
    }
    if (send_due_ == 0 || time >= send_due_) flush(time, true);
    if (send_due_ != 0) until = std::min(until, send_due_);
    if (reads && !frames_.empty()) {
      if (!is_in_burst(time)) return;
      until = std::min(until, time + kTogether);  // more of the burst may arrive until then
    }
    polled_.clear();
    polled_links_.clear();
    polled_.push_back({wake_fd_.get(), POLLIN, 0});
    for (size_t i = 0; i < links_.size(); ++i) {
      Link& link = links_[i];
      if (!link.fd) continue;
      const bool writes = !link.broken && !link.out.empty();
      polled_.push_back({link.fd.get(), static_cast<short>(POLLIN | (writes ? POLLOUT : 0)), 0});
      polled_links_.push_back(i);
    }
    asleep_until_ = until;
    asleep_ = true;
    if (reads && node_.pending()) {
      awake = std::min(until, last_brought_ + (many_cores_ ? kAwakeWithCores : kAwake));
      asleep_ = awake <= time;
    }
  }
  int ready = 0;
  while (ready == 0 && now() < awake) {
    ready = poll(polled_.data(), polled_.size(), 0);
    if (ready == 0) sched_yield();
  }
  if (ready == 0 && awake > 0) {  // from here on a thread that brings something wakes this one
    const Lock lock(mutex_);
    asleep_ = true;
  }
  const double left = std::min(std::max(0.0, until - now()), 60.0);
  const timespec patience = {static_cast<time_t>(left), static_cast<long>(std::fmod(left, 1.0) * 1e9)};
  if (ready == 0) ready = ppoll(polled_.data(), polled_.size(), &patience, nullptr);
  if (ready <= 0) return;
  const double time = now();
  if (polled_[0].revents != 0) {
    uint64_t wakes = 0;
    if (::read(wake_fd_.get(), &wakes, sizeof(wakes)) < 0) wakes = 0;
  }
  for (size_t i = 1; i < polled_.size(); ++i) {
    Link& link = links_[polled_links_[i - 1]];
    if ((polled_[i].revents & POLLOUT) != 0) {
      const Lock lock(mutex_);
      send_queued(link);
    }
    if ((polled_[i].revents & ~POLLOUT) != 0) read(link, scratch_, time);
  }
}

}  // namespace ncclpy::coordinator
