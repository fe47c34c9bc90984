// Jobs on threads of their own, and the one thread for work that never waits.
#include "background.hpp"

#include <atomic>
#include <deque>
#include <thread>

#include "mutex.hpp"
#include "thread.hpp"
#include "wait.hpp"

namespace ncclpy::host {
namespace {

// One thread and its queue. It lives as long as the process.
class Worker {
 public:
  void add(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    if (!started_) start_thread("ncclpy-soon", [this] { run(); }).detach();
    started_ = true;
    queue_.push_back(std::move(work));
    wake_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !queue_.empty(); });
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      work = nullptr;  // destroys what the work owned while the lock is not held
      lock.lock();
    }
  }

  Mutex<NCCLPY_LOCK_BACKGROUND> mutex_;
  Condition wake_;
  std::deque<std::function<void()>> queue_;
  bool started_ = false;
};

}  // namespace

void run_in_background(const char* name, std::function<void()> work) { start_thread(name, std::move(work)).detach(); }

void run_soon(std::function<void()> work) {
  static auto* const worker = new Worker;
  worker->add(std::move(work));
}

void run_together(std::vector<std::function<void()>> works) {
  if (works.empty()) return;
  // The works may wait for each other, so they start when all of them have a thread, or not at all.
  enum { waiting, go, stop };
  std::atomic<int> begin{waiting};
  FutexEvent changed;
  std::vector<std::thread> threads;
  const auto release = [&](int how) {
    begin.store(how);
    changed.notify();
  };
  const auto join = [&] {
    for (std::thread& thread : threads) thread.join();
  };
  try {
    threads.reserve(works.size());
    for (size_t i = 0; i + 1 < works.size(); i++) {
      threads.push_back(start_thread("ncclpy-job", [&, i] {
        wait_until(changed, [&] { return begin.load() != waiting; });
        if (begin.load() == go) works[i]();
      }));
    }
  } catch (...) {
    release(stop);
    join();
    throw;
  }
  release(go);
  works.back()();
  join();
}

}  // namespace ncclpy::host
