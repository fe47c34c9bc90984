// Threads that move from stream to stream.
#include "worker_pool.hpp"

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
  bool idle = false;  // in WorkerPool::idle: may be leased, may end
};

namespace {

constexpr std::chrono::seconds idle_timeout{1};

// Never destroyed: threads may run while the process exits.
struct WorkerPool {
  Mutex<NCCLPY_LOCK_WORKERS> mutex;  // guards the workers as well
  std::size_t workers = 0;
  // Has capacity for all workers, so return_worker() does not allocate. The worker that became idle last is leased
  // first: its caches are warm.
  std::vector<Worker*> idle;
};

WorkerPool& worker_pool() {
  static auto* const pool = new WorkerPool;
  return *pool;
}

void return_worker(WorkerPool& pool, Worker* worker) {
  worker->idle = true;
  pool.idle.push_back(worker);
}

// The main function of a worker, which starts as leased.
void run_worker(std::unique_ptr<Worker> me) {
  WorkerPool& pool = worker_pool();
  int named = -1;
  std::unique_lock lock(pool.mutex);
  for (;;) {
    while (me->stream == nullptr) {
      if (!me->idle) {
        me->wake.wait(lock);
      } else if (me->wake.wait_for(lock, idle_timeout) == std::cv_status::timeout && me->idle) {
        pool.idle.erase(std::find(pool.idle.begin(), pool.idle.end(), me.get()));
        --pool.workers;
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
    stream->run_tasks();
    stream.reset();
    lock.lock();
    return_worker(pool, me.get());
  }
}

}  // namespace

WorkerLease lease_worker() {
  WorkerPool& pool = worker_pool();
  {
    std::lock_guard lock(pool.mutex);
    if (!pool.idle.empty()) {
      Worker* const worker = pool.idle.back();
      pool.idle.pop_back();
      worker->idle = false;
      return WorkerLease(worker);
    }
    pool.idle.reserve(pool.workers + 1);
    ++pool.workers;
  }
  try {
    auto made = std::make_unique<Worker>();
    Worker* const worker = made.get();
    start_thread("ncclpy-dev", [made = std::move(made)]() mutable { run_worker(std::move(made)); }).detach();
    return WorkerLease(worker);
  } catch (...) {
    std::lock_guard lock(pool.mutex);
    --pool.workers;
    throw;
  }
}

WorkerLease::~WorkerLease() {
  if (worker_ == nullptr) return;
  std::lock_guard lock(worker_pool().mutex);
  return_worker(worker_pool(), worker_);
  worker_->wake.notify_one();
}

void WorkerLease::run(std::shared_ptr<Stream> stream) {
  Worker* const worker = std::exchange(worker_, nullptr);
  std::lock_guard lock(worker_pool().mutex);
  worker->stream = std::move(stream);
  worker->wake.notify_one();
}

}  // namespace ncclpy::host
