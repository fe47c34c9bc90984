// Threads that go from stream to stream.
#include "crew.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "base/thread.hpp"
#include "stream.hpp"

namespace ncclpy::host {

class Worker {
 public:
  Condition wake;
  std::shared_ptr<Stream> stream;
  bool idle = false;  // among the idle ones: may be reserved, may end
};

namespace {

constexpr std::chrono::seconds linger_time{1};

// Never destroyed: threads may run until the process is gone.
struct Crew {
  Mutex<NCCLPY_LOCK_CREW> mutex;  // guards the workers as well
  std::size_t workers = 0;
  // With room for all. The last one to have worked is the first to work again: its caches are warm.
  std::vector<Worker*> idle;
};

Crew& crew() {
  static auto* const the = new Crew;
  return *the;
}

void put_back(Crew& the, Worker* worker) {
  worker->idle = true;
  the.idle.push_back(worker);
}

// A worker's life; it begins reserved.
void live(std::unique_ptr<Worker> me) {
  Crew& the = crew();
  int named = -1;
  std::unique_lock lock(the.mutex);
  for (;;) {
    while (me->stream == nullptr) {
      if (!me->idle) {
        me->wake.wait(lock);
      } else if (me->wake.wait_for(lock, linger_time) == std::cv_status::timeout && me->idle) {
        the.idle.erase(std::find(the.idle.begin(), the.idle.end(), me.get()));
        --the.workers;
        return;
      }
    }
    std::shared_ptr<Stream> stream = std::move(me->stream);
    lock.unlock();
    if (named != stream->device()) {
      char name[16];
      named = stream->device();
      std::snprintf(name, sizeof name, "ncclpy-dev%d", named);
      pthread_setname_np(pthread_self(), name);
    }
    stream->execute();
    stream.reset();
    lock.lock();
    put_back(the, me.get());
  }
}

}  // namespace

Reserved reserve_worker() {
  Crew& the = crew();
  {
    std::lock_guard lock(the.mutex);
    if (!the.idle.empty()) {
      Worker* const worker = the.idle.back();
      the.idle.pop_back();
      worker->idle = false;
      return Reserved(worker);
    }
    the.idle.reserve(the.workers + 1);
    ++the.workers;
  }
  try {
    auto made = std::make_unique<Worker>();
    Worker* const worker = made.get();
    start_thread("ncclpy-dev", [made = std::move(made)]() mutable { live(std::move(made)); }).detach();
    return Reserved(worker);
  } catch (...) {
    std::lock_guard lock(the.mutex);
    --the.workers;
    throw;
  }
}

Reserved::~Reserved() {
  if (worker_ == nullptr) return;
  std::lock_guard lock(crew().mutex);
  put_back(crew(), worker_);
  worker_->wake.notify_one();
}

void Reserved::run(std::shared_ptr<Stream> stream) {
  Worker* const worker = std::exchange(worker_, nullptr);
  std::lock_guard lock(crew().mutex);
  worker->stream = std::move(stream);
  worker->wake.notify_one();
}

}  // namespace ncclpy::host
