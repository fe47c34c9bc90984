// Heartbeats through a store of torch, from a thread that needs no GIL: they show other machines that this process is
// alive, even while a call of the program keeps the GIL.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

// Increments a count under a key until it is closed, the store's server has ended, or a call of the store fails.
class Heartbeat {
 public:
  // `before` precedes the count, and `period` is the seconds between two beats. `idle` is an idle connection to the
  // server. It ends with the server, and after that no call is made: torch would print a C++ backtrace for the call.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string key, std::string before, double period, int idle)
      : state_(std::make_shared<State>()), process_(::getpid()) {
    state_->store = std::move(store);
    state_->key = std::move(key);
    state_->before = std::move(before);
    state_->period = std::chrono::duration<double>(period);
    state_->idle = ::fcntl(idle, F_DUPFD_CLOEXEC, 0);
    std::thread([state = state_] { state->run(); }).detach();
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  ~Heartbeat() { end(std::chrono::seconds(0)); }

  // Stops counting; called without the GIL. Waits 5 s at most until no call of the store is under way; returns whether
  // that is so.
  bool close() { return end(std::chrono::seconds(5)); }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false, left = false;
    c10::intrusive_ptr<c10d::Store> store;
    std::string key, before;
    std::chrono::duration<double> period{};
    int idle = -1;

    bool server_has_ended() const {
      char one;
      return idle >= 0 && ::recv(idle, &one, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
    }

    void run() {
      std::unique_lock lock(mutex);
      for (long long count = 1; !over; ++count) {
        lock.unlock();
        bool fails = server_has_ended();
        if (!fails) {
          const std::string value = before + " " + std::to_string(count);
          try {
            store->set(key, std::vector<uint8_t>(value.begin(), value.end()));
          } catch (const std::exception&) {
            fails = true;
          }
        }
        lock.lock();
        if (fails) break;
        changed.wait_for(lock, period, [this] { return over; });
      }
      lock.unlock();
      store.reset();
      if (idle >= 0) ::close(idle);
      lock.lock();
      left = true;
      changed.notify_all();
    }
  };

  bool end(std::chrono::seconds patience) {
    if (::getpid() != process_) return true;  // a child of fork has no such thread, and may not have its mutex
    std::unique_lock lock(state_->mutex);
    state_->over = true;
    state_->changed.notify_all();
    return state_->changed.wait_for(lock, patience, [this] { return state_->left; });
  }

  const std::shared_ptr<State> state_;
  const pid_t process_;
};

}  // namespace
