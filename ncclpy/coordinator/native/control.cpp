#include "control.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>

#include "ncclpy/bootstrap/native/clock.hpp"

namespace ncclpy::coordinator {

using store::now;

namespace {

constexpr uint32_t kGoodbye = UINT32_MAX;  // in the place of a length; 0 is a sign of life
constexpr uint32_t kLongest = 1u << 30;
constexpr size_t kScratch = 64 << 10;
constexpr double kFarewell = 1.0;  // seconds for what is still to be sent at the end

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
    : options_(options), node_(place, options.cache, options.timeout, options.stall_after) {
  const double time = now();
  if (parent.fd >= 0) {
    Link& link = links_.emplace_back();
    link.rank = parent.rank;
    link.fd = store::Descriptor(parent.fd);
    link.heard = link.said = time;
  }
  for (size_t i = 0; i < children.size(); ++i) {
    Link& link = links_.emplace_back();
    link.rank = place.children[i].first;
    link.child = static_cast<int>(i);
    link.fd = store::Descriptor(children[i]);
    link.heard = link.said = time;
  }
}

bool Control::start() {
  nudge_ = store::Descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!nudge_) return false;
  auto* const self = new std::shared_ptr<Control>(shared_from_this());
  running_ = store::start_thread(thread_, "ncclpy-coord", main, self);
  if (!running_) delete self;
  return running_;
}

// What this rank does.

Brought Control::bring(uint32_t group, std::string key, std::string fixed, std::string own, bool joinable) {
  const Lock lock(mutex_);
  const double time = now();
  const Brought brought =
      node_.bring(group, std::move(key), std::move(fixed), std::move(own), joinable, time);
  if (brought == Brought::taken) flush(time);
  return brought;
}

Brought Control::join() {
  const Lock lock(mutex_);
  const Brought joined = node_.join();
  flush(now());
  return joined;
}

void Control::shut_down(bool drain, const std::string& reason) {
  const Lock lock(mutex_);
  node_.shut_down(drain, reason);
  flush(now());
}

void Control::launched(uint32_t group) {
  const Lock lock(mutex_);
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

Control::Next Control::next(std::vector<Record>& records, double until) {
  Lock lock(mutex_);
  while (told_.empty()) {
    if (node_.ended() || stopping_) return Next::over;
    const double left = until - now();
    if (left <= 0) return Next::nothing;
    news_.wait_for(lock, std::chrono::duration<double>(std::min(left, 3600.0)));
  }
  records = std::move(told_.front());
  told_.pop_front();
  return Next::frame;
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
        push(link);
      }
    }
    if (running_ && !wait) pthread_detach(thread_);
    running_ = false;
    news_.notify_all();
    nudge();
  }
  if (joins) pthread_join(thread_, nullptr);
}

// What goes; with the mutex.

void Control::flush(double time) {
  node_.settle();
  for (Link& link : links_) {
    for (const std::string& frame : link.child < 0 ? node_.up : node_.down) say(link, frame, time);
    if (!link.out.empty()) push(link);
  }
  node_.up.clear();
  node_.down.clear();
  if (!node_.told.empty()) {
    for (auto& frame : node_.told) told_.push_back(std::move(frame));
    node_.told.clear();
    news_.notify_all();
  }
  if (node_.ended()) news_.notify_all();
  const double soon = options_.timeout > 0 ? std::min(options_.timeout, options_.stall_after) : options_.stall_after;
  if (asleep_until_ > time + soon + 1e-3 && node_.pending()) nudge();
}

void Control::say(Link& link, std::string_view frame, double time) {
  if (link.broken) return;
  put_length(link.out, static_cast<uint32_t>(frame.size()));
  link.out.append(frame);
  link.said = time;
}

void Control::push(Link& link) {
  while (!link.broken && link.sent < link.out.size()) {
    const ssize_t n =
        send(link.fd.get(), link.out.data() + link.sent, link.out.size() - link.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      link.sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      nudge();  // the thread goes on when there is room
      return;
    } else if (errno != EINTR) {
      link.broken = true;  // the thread reads what came before that, and finds the end
    }
  }
  link.out.clear();
  link.sent = 0;
}

void Control::nudge() {
  const uint64_t one = 1;
  if (nudge_ && write(nudge_.get(), &one, sizeof(one)) < 0) return;  // it is full, and so the thread wakes
}

// What comes; the thread's.

void Control::lose(Link& link, const std::string& why) {
  link.fd.close();
  link.broken = true;
  if (link.child < 0) {
    node_.lost_parent(link.rank, why);
  } else {
    node_.lost_child(static_cast<size_t>(link.child), why);
  }
}

// Returns whether the connection is still there.
bool Control::read(Link& link, std::vector<char>& scratch, double time) {
  const ssize_t n = recv(link.fd.get(), scratch.data(), scratch.size(), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return true;
  const int failed = n < 0 ? errno : 0;
  const Lock lock(mutex_);
  if (stopping_) {  // what still comes is for nobody; but a connection that is closed over it would lose the goodbye
    if (n <= 0) link.fd.close();
    return n > 0;
  }
  if (n <= 0) {
    lose(link, link.goodbye ? "has closed its coordinator"
               : failed != 0 && failed != ECONNRESET ? std::string("cannot be reached: ") + strerror(failed)
                                                     : "has ended, or its machine");
    flush(time);
    return false;
  }
  link.heard = time;
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
    if (length > kLongest) wrong = "a frame of " + std::to_string(length) + " bytes";
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
      node_.settle();  // what goes upwards says which frame it was written behind
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  }
  link.in.erase(0, at);
  if (!wrong.empty()) lose(link, "has sent what is no frame of the control plane: " + wrong);
  flush(time);
  return wrong.empty();
}

void* Control::main(void* self) {
  const std::unique_ptr<std::shared_ptr<Control>> kept(static_cast<std::shared_ptr<Control>*>(self));
  Control& control = **kept;
  try {
    control.run();
  } catch (const std::exception&) {  // memory is out, say: for this rank it is over, and so for the others
    const Lock lock(control.mutex_);
    control.stopping_ = true;
    for (Link& link : control.links_) link.fd.close();
    control.news_.notify_all();
  }
  return nullptr;
}

void Control::run() {
  std::vector<char> scratch(kScratch);
  std::vector<pollfd> polled;
  std::vector<size_t> which;
  const double beat = options_.silence / 6;
  double last = now(), give_up = 0;
  bool hushed = false;
  for (;;) {
    double until = 0;
    {
      const Lock lock(mutex_);
      const double time = now();
      if (time - last > 2 * beat) {  // this process was stopped, or its machine: the others may have spoken meanwhile
        for (Link& link : links_) link.heard = std::max(link.heard, time - beat);
      }
      last = time;
      until = std::min(time + beat, node_.look(time));
      for (Link& link : links_) {
        if (!link.fd) continue;
        if (time - link.said >= beat) say(link, {}, time);
        if (time - link.heard >= options_.silence && !node_.ended()) {
          char words[64];
          snprintf(words, sizeof(words), "has been silent for %.0f s", time - link.heard);
          lose(link, words);
        }
      }
      flush(time);
      bool unsent = false;
      polled.clear();
      which.clear();
      polled.push_back({nudge_.get(), POLLIN, 0});
      for (size_t i = 0; i < links_.size(); ++i) {
        Link& link = links_[i];
        if (!link.fd) continue;
        const bool writes = !link.broken && !link.out.empty();
        unsent = unsent || writes;
        polled.push_back({link.fd.get(), static_cast<short>(POLLIN | (writes ? POLLOUT : 0)), 0});
        which.push_back(i);
      }
      if (stopping_) {
        if (give_up == 0) give_up = time + kFarewell;
        if (!unsent && !hushed) {
          hushed = true;
          for (Link& link : links_)
            if (link.fd) shutdown(link.fd.get(), SHUT_WR);
        }
        if (which.empty() || time >= give_up) {  // the others have heard it, or are given up
          for (Link& link : links_) link.fd.close();
          return;
        }
        until = std::min(until, give_up);
      }
      asleep_until_ = until;
    }
    const int ready = poll(polled.data(), polled.size(), store::milliseconds_until(until));
    if (ready <= 0) continue;
    const double time = now();
    if (polled[0].revents != 0) {
      uint64_t nudges = 0;
      if (::read(nudge_.get(), &nudges, sizeof(nudges)) < 0) nudges = 0;
    }
    for (size_t i = 1; i < polled.size(); ++i) {
      Link& link = links_[which[i - 1]];
      if ((polled[i].revents & POLLOUT) != 0) {
        const Lock lock(mutex_);
        push(link);
      }
      if ((polled[i].revents & ~POLLOUT) != 0) read(link, scratch, time);
    }
  }
}

}  // namespace ncclpy::coordinator
