#include "connection_thread.hpp"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <vector>

#include "client.hpp"
#include "clock.hpp"
#include "descriptors.hpp"
#include "mutex.hpp"

namespace ncclpy::store::connection_thread {
namespace {

struct ConnectionThread {
  Mutex<NCCLPY_LOCK_STORE_CONNECTIONS> mutex;
  std::unordered_map<Client*, std::shared_ptr<Client>> clients;
  Descriptor epoll;
  Descriptor news;  // wakes the thread: a client was added, the last was removed, or one has another tick interval
  bool running = false;
};

// The ConnectionThread is never destroyed, since its thread may outlive the statics. A forked child makes a new one:
// the inherited mutex may be held by a thread that exists only in the parent.
std::atomic<ConnectionThread*> current{nullptr};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });

ConnectionThread& connection_thread() {
  ConnectionThread* one = current;
  if (one == nullptr) {
    auto* made = new ConnectionThread;
    if (current.compare_exchange_strong(one, made)) return *made;
    delete made;  // another thread was faster
  }
  return *one;
}

void* run(void* argument) {
  ConnectionThread& it = *static_cast<ConnectionThread*>(argument);
  std::vector<epoll_event> events(256);
  std::vector<std::shared_ptr<Client>> all, ready;
  double next_tick = 0;         // 0: at once
  double planned_tick = now();  // the last `next_tick` that was not 0; a tick's delay counts from it
  while (true) {
    const int count =
        epoll_wait(it.epoll.get(), events.data(), static_cast<int>(events.size()), milliseconds_until(next_tick));
    const double time = now();
    double seconds_late = 0;  // of this tick
    all.clear();
    ready.clear();
    {
      std::lock_guard lock(it.mutex);
      if (it.clients.empty()) {
        it.running = false;
        return nullptr;
      }
      for (int i = 0; i < count; i++) {
        void* tag = events[static_cast<size_t>(i)].data.ptr;
        if (tag == nullptr) {
          uint64_t drained;
          if (read(it.news.get(), &drained, sizeof drained) > 0) next_tick = 0;
          continue;
        }
        const auto at = it.clients.find(static_cast<Client*>(tag));
        if (at != it.clients.end()) ready.push_back(at->second);
      }
      if (time >= next_tick) {
        seconds_late = std::max(0.0, time - planned_tick);
        next_tick = time + 10;
        for (auto& [pointer, client] : it.clients) {
          all.push_back(client);
          next_tick = std::min(next_tick, time + client->tick_interval());
        }
        planned_tick = next_tick;
      }
    }
    for (auto& client : ready) client->read_pending();
    for (auto& client : all) client->tick(time, seconds_late);
  }
}

}  // namespace

bool add(const std::shared_ptr<Client>& client) {
  ConnectionThread& it = connection_thread();
  std::lock_guard lock(it.mutex);
  if (!it.epoll) {
    it.epoll = Descriptor(epoll_create1(EPOLL_CLOEXEC));
    it.news = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    epoll_event event{};
    event.events = EPOLLIN;
    if (!it.epoll || !it.news || epoll_ctl(it.epoll.get(), EPOLL_CTL_ADD, it.news.get(), &event) != 0) {
      it.epoll.close();
      it.news.close();
      return false;
    }
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = client.get();
  if (epoll_ctl(it.epoll.get(), EPOLL_CTL_ADD, client->fd(), &event) != 0) return false;
  it.clients.emplace(client.get(), client);
  if (!it.running) {
    pthread_t thread;
    if (!start_thread(thread, "ncclpy-connect", run, &it)) {
      it.clients.erase(client.get());
      epoll_ctl(it.epoll.get(), EPOLL_CTL_DEL, client->fd(), nullptr);
      return false;
    }
    pthread_detach(thread);
    it.running = true;
  }
  const uint64_t one = 1;
  return write(it.news.get(), &one, sizeof one) > 0;
}

void remove(Client* client) {
  ConnectionThread& it = connection_thread();
  std::shared_ptr<Client> last;  // destroyed after the lock is released
  std::lock_guard lock(it.mutex);
  const auto at = it.clients.find(client);
  if (at == it.clients.end()) return;
  epoll_ctl(it.epoll.get(), EPOLL_CTL_DEL, client->fd(), nullptr);
  last = std::move(at->second);
  it.clients.erase(at);
  const uint64_t one = 1;
  if (it.clients.empty() && write(it.news.get(), &one, sizeof one) < 0) {
    // The counter of `news` is full: the thread is about to wake.
  }
}

void update_tick_interval() {
  const uint64_t one = 1;
  if (write(connection_thread().news.get(), &one, sizeof one) < 0) {
    // The counter of `news` is full: the thread is about to wake. Or no client was ever added: there is no thread.
  }
}

void watch(Client* client, bool readable, bool writable) {
  ConnectionThread& it = connection_thread();
  epoll_event event{};
  // With neither EPOLLIN nor EPOLLOUT, epoll reports only the connection's end; with EPOLLONESHOT, only once.
  event.events = (readable ? EPOLLIN : EPOLLONESHOT) | (writable ? EPOLLOUT : 0u);
  event.data.ptr = client;
  epoll_ctl(it.epoll.get(), EPOLL_CTL_MOD, client->fd(), &event);
}

}  // namespace ncclpy::store::connection_thread
