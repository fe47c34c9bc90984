// Streams: the queue, the threads that run it, helping, and the order between the legacy default stream and the
// blocking streams.
//
// Fences keep the legacy order. Before a task of the legacy stream a fence waits for what is queued in the device's
// blocking streams at that time; before a task of a blocking stream a fence waits for what is queued in the legacy
// stream. A fence waits only for tasks that were queued before it, so fences cannot form a cycle.
#include "stream.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/handles.hpp"
#include "base/thread.hpp"
#include "base/wait_control.hpp"
#include "device.hpp"
#include "graph.hpp"

namespace ncclpy::host {
namespace {

struct DeviceStreams {
  std::shared_ptr<Stream> legacy;
  Mutex<NCCLPY_LOCK_DEVICE> mutex;
  std::vector<std::weak_ptr<Stream>> others;  // with destroyed streams that still have work
  std::atomic<bool> has_blocking{false};      // a blocking stream was ever made
};

// Never destroyed: threads may run while the process exits.
DeviceStreams* device_streams() {
  static DeviceStreams* const streams = [] {
    const int count = device_count();
    auto* all = new DeviceStreams[count];
    for (int device = 0; device < count; ++device)
      all[device].legacy = std::make_shared<Stream>(device, Stream::Kind::legacy);
    return all;
  }();
  return streams;
}

HandleTable<Stream>& handles() {
  static auto* const table = new HandleTable<Stream>('S');
  return *table;
}

std::shared_ptr<Stream> make_stream(int device, Stream::Kind kind) {
  auto stream = std::make_shared<Stream>(device, kind);
  DeviceStreams& streams = device_streams()[device];
  std::lock_guard lock(streams.mutex);
  auto& others = streams.others;
  for (std::size_t i = others.size(); i-- > 0;) {
    if (!others[i].expired()) continue;
    others[i] = others.back();
    others.pop_back();
  }
  others.push_back(stream);
  if (kind == Stream::Kind::blocking) streams.has_blocking.store(true, std::memory_order_release);
  return stream;
}

// The per-thread default streams of the calling thread, one for each device; closed when the thread ends.
class ThreadStreams {
 public:
  ~ThreadStreams() {
    if (after_fork()) return;  // a thread that does not exist in the child may hold a lock
    for (auto& [device, stream] : streams_) stream->close();
  }
  std::shared_ptr<Stream> of(int device) {
    std::shared_ptr<Stream>& stream = streams_[device];
    if (stream == nullptr) stream = make_stream(device, Stream::Kind::blocking);
    return stream;
  }

 private:
  std::unordered_map<int, std::shared_ptr<Stream>> streams_;
};

// Spinning saves a sleep of a few microseconds; at most half as many threads as the machine has cores spin at a time.
std::atomic<int> spinning{0};
const int max_spinning = static_cast<int>(std::thread::hardware_concurrency() / 2);
constexpr int spin_polls = 400;

// a wait is prompt if at most this many tasks were queued since the previous wait
constexpr std::uint64_t prompt_tasks = 4;
// upper limit of the number of prompt waits in a row that make a stream lazy; each time that the sweeper finds a task
// that no caller has run, it doubles that number for the stream
constexpr int max_prompt_waits = 512;
constexpr std::chrono::microseconds sweep_every{300};

// Calls sweep() of each stream on its list, 300 us after the last time, and removes a stream for which sweep() returns
// false. The thread sleeps without a timeout while the list is empty.
class Sweeper {
 public:
  void add(std::shared_ptr<Stream> stream) {
    std::lock_guard lock(mutex_);
    if (!started_) start_thread("ncclpy-sweep", [this] { run(); }).detach();
    started_ = true;
    streams_.push_back(std::move(stream));
    work_.notify_one();
  }

 private:
  void run() {
    std::vector<std::shared_ptr<Stream>> lazy;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [&] { return !lazy.empty() || !streams_.empty(); });
        for (auto& stream : streams_) lazy.push_back(std::move(stream));
        streams_.clear();
      }
      std::this_thread::sleep_for(sweep_every);
      for (std::size_t i = lazy.size(); i-- > 0;) {
        if (!lazy[i]->sweep()) lazy.erase(lazy.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }

  Mutex<NCCLPY_LOCK_SWEEPER> mutex_;
  Condition work_;
  std::vector<std::shared_ptr<Stream>> streams_;
  bool started_ = false;
};

void sweep_later(std::shared_ptr<Stream> stream) {
  static auto* const sweeper = new Sweeper;
  sweeper->add(std::move(stream));
}

}  // namespace

bool Point::reached() const { return stream == nullptr || stream->reached(number); }

void Point::wait() const {
  if (stream != nullptr) stream->wait(number);
}

// The points of other streams that the next task must wait for; only those not reached yet.
std::vector<Point> Stream::predecessors() const {
  std::vector<Point> points;
  if (kind_ == Kind::non_blocking) return points;
  const auto add = [&points](Stream& stream) {
    if (!stream.reached(stream.queued_.load(std::memory_order_acquire))) points.push_back(stream.last());
  };
  DeviceStreams& streams = device_streams()[device_];
  if (kind_ == Kind::blocking) {
    add(*streams.legacy);
    return points;
  }
  if (!streams.has_blocking.load(std::memory_order_acquire)) return points;
  std::lock_guard lock(streams.mutex);
  for (const auto& other : streams.others) {
    const auto stream = other.lock();
    if (stream != nullptr && stream->kind() == Kind::blocking) add(*stream);
  }
  return points;
}

std::uint64_t Stream::enqueue(Task task) {
  std::vector<Point> before = predecessors();
  std::unique_lock lock(mutex_);
  if (queued_.load(std::memory_order_relaxed) + 1 - awaited_number_ > prompt_tasks) be_eager();
  WorkerLease worker;
  if (!lazy_ && !has_worker_ && !running_.load(std::memory_order_relaxed)) worker = lease_worker();
  for (Point& point : before) {
    if (kind_ == Kind::blocking) {
      if (point.number <= legacy_awaited_) continue;
      legacy_awaited_ = point.number;
    }
    append([point = std::move(point)] { point.wait(); });
  }
  const std::uint64_t number = append(std::move(task));
  if (worker) {
    assign_worker(std::move(worker), lock);
  } else if (lazy_ && !has_worker_) {
    leave_to_sweeper(lock);
  }
  return number;
}

std::uint64_t Stream::enqueue_short(Task task) {
  if (!done() || !predecessors().empty()) return enqueue(std::move(task));
  task();
  return 0;
}

bool Stream::done() const {
  const std::uint64_t number = queued_.load(std::memory_order_acquire);
  return reached(number) && (kind_ != Kind::legacy || predecessors().empty());
}

void Stream::synchronize() {
  const std::uint64_t number = queued_.load(std::memory_order_acquire);
  if (kind_ == Kind::legacy) {
    for (const Point& point : predecessors()) point.wait();
  }
  wait(number);
}

bool Stream::help(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  // A thread with a time limit cannot run an uninterruptible task, so a worker must run it, and the wait does not
  // count as a prompt one.
  if (last_uninterruptible_ > awaited_number_) {
    if (number == queued_.load(std::memory_order_relaxed)) awaited_number_ = number;
    be_eager();
  } else if (!WaitControl::must_leave()) {
    note_wait(number);
  }
  while (!reached(number) && runnable() && queue_.front().is_interruptible() && !WaitControl::must_leave()) {
    if (!run_first(lock)) break;
    WaitControl::poll();
  }
  const bool done = reached(number);
  ensure_worker(lock);  // for what this helper has not run
  return done;
}

void Stream::wait(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  note_wait(number);
  while (!reached(number)) {
    if (runnable()) {
      run_first(lock);
    } else if (!spin(lock, [&] { return reached(number) || !running_.load(std::memory_order_acquire); })) {
      ++waiting_;
      const auto awaited = [&] { return reached(number) || runnable(); };
      const double max_sleep = WaitControl::max_sleep();
      if (max_sleep < 0) {
        progress_.wait(lock, awaited);
        --waiting_;
        continue;
      }
      progress_.wait_for(lock, std::chrono::duration<double>(max_sleep), awaited);
      --waiting_;
      lock.unlock();
      ncclpy_lock_none(NCCLPY_LOCK_CONTROL, "it lets a wait be interrupted");
      WaitControl::poll();
      lock.lock();
    }
  }
  ensure_worker(lock);  // for what this helper has not run
}

bool Stream::notify_when_done(std::uint64_t number, void (*callback)(void*), void* argument) {
  std::unique_lock lock(mutex_);
  if (reached(number)) return true;
  const auto same = [&](const CompletionCallback& one) {
    return one.number == number && one.callback == callback && one.argument == argument;
  };
  if (std::none_of(callbacks_.begin(), callbacks_.end(), same)) callbacks_.push_back({number, callback, argument});
  try {
    ensure_worker(lock);
  } catch (const std::exception&) {  // no thread, not even for the sweeper: the next caller may find one
  }
  return false;
}

bool Stream::sleep_until(std::uint64_t number, double seconds) {
  // The sleeper has a condition of its own, since every task that ends notifies progress_: a thread that waits for the
  // last of many tasks would be woken by each of them.
  struct {
    Condition wake;
    bool done = false;
  } sleeper;
  const auto callback = [](void* argument) {
    auto& one = *static_cast<decltype(sleeper)*>(argument);
    one.done = true;
    one.wake.notify_one();
  };
  if (notify_when_done(number, callback, &sleeper)) return true;
  std::unique_lock lock(mutex_);
  if (sleeper.wake.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return sleeper.done; })) return true;
  const auto mine = [&](const CompletionCallback& one) { return one.argument == &sleeper; };
  callbacks_.erase(std::remove_if(callbacks_.begin(), callbacks_.end(), mine), callbacks_.end());
  return false;
}

void Stream::notify_completed() {
  for (std::size_t i = callbacks_.size(); i-- > 0;) {
    const CompletionCallback one = callbacks_[i];
    if (!reached(one.number)) continue;
    callbacks_[i] = callbacks_.back();
    callbacks_.pop_back();
    one.callback(one.argument);
  }
}

std::uint64_t Stream::append(Task task) {
  const std::uint64_t number = queued_.load(std::memory_order_relaxed) + 1;
  if (!task.is_interruptible()) last_uninterruptible_ = number;
  queue_.push_back(std::move(task));
  queued_.store(number, std::memory_order_release);
  return number;
}

// Gives the stream a worker. Releases the lock.
void Stream::assign_worker(WorkerLease worker, std::unique_lock<StreamMutex>& lock) {
  has_worker_ = true;
  lock.unlock();
  worker.run(shared_from_this());
}

// Gives the stream a worker if it has tasks and neither a worker nor a caller runs them. Releases the lock.
void Stream::ensure_worker(std::unique_lock<StreamMutex>& lock) {
  if (has_worker_ || !runnable()) return lock.unlock();
  try {
    assign_worker(lease_worker(), lock);
  } catch (const std::exception&) {  // no thread can be started: until one can, waiting callers run the tasks
    leave_to_sweeper(lock);
  }
}

// Adds the stream to the sweeper's list. Releases the lock.
void Stream::leave_to_sweeper(std::unique_lock<StreamMutex>& lock) {
  const bool known = std::exchange(swept_, true);
  lock.unlock();
  if (known) return;
  try {
    sweep_later(shared_from_this());
  } catch (const std::exception&) {  // no thread for the sweeper
    lock.lock();
    swept_ = false;
    lock.unlock();
    throw;
  }
}

// Called when a caller waits for a task. The wait counts even if a worker runs the task: a woken worker may take the
// core from the caller before the caller gets here.
void Stream::note_wait(std::uint64_t number) {
  if (number != queued_.load(std::memory_order_relaxed) || number == awaited_number_) return;
  prompt_waits_ = number - awaited_number_ <= prompt_tasks ? std::min(prompt_waits_ + 1, prompt_waits_needed_) : 0;
  awaited_number_ = number;
  lazy_ = prompt_waits_ >= prompt_waits_needed_;
}

void Stream::nudge() {
  std::unique_lock lock(mutex_);
  ensure_worker(lock);
}

void Stream::close() noexcept {
  try {
    nudge();
  } catch (const std::exception&) {
  }
}

bool Stream::sweep() {
  std::unique_lock lock(mutex_);
  const std::uint64_t queued = queued_.load(), finished = finished_.load();
  const bool stuck = runnable() && finished == finished_at_sweep_ && queued_at_sweep_ > finished;
  swept_ = stuck || queued != queued_at_sweep_ || queued != finished;
  queued_at_sweep_ = queued;
  finished_at_sweep_ = finished;
  if (!stuck) return swept_;
  prompt_waits_needed_ = std::min(2 * prompt_waits_needed_, max_prompt_waits);
  be_eager();
  swept_ = true;  // if no thread can be started now, the next sweep tries again
  ensure_worker(lock);
  return true;
}

void Stream::be_eager() {
  prompt_waits_ = 0;
  lazy_ = false;
}

void Stream::run_tasks() {
  std::unique_lock lock(mutex_);
  do {
    while (runnable()) run_first(lock);
    spin(lock, [this] { return !running_.load() && !reached(queued_.load()); });
  } while (runnable());
  has_worker_ = false;
}

// Runs the first task of the queue, without the lock; runnable() must hold. Returns false if the task was suspended:
// it then stays in the queue.
bool Stream::run_first(std::unique_lock<StreamMutex>& lock) {
  running_.store(true, std::memory_order_relaxed);
  Task& first = queue_.front();
  lock.unlock();
  ncclpy_lock_none(NCCLPY_LOCK_CONTROL, "it runs a task of a stream");
  const bool done = first();
  if (done) first.clear();  // destroys what the task owned before the task counts as done
  lock.lock();
  if (done) {
    queue_.pop_front();
    finished_.store(finished_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    notify_completed();
  }
  running_.store(false, std::memory_order_release);
  if (waiting_ > 0) progress_.notify_all();
  return done;
}

// Waits for a condition for a short time, without the lock. Returns whether it became true.
template <class Condition>
bool Stream::spin(std::unique_lock<StreamMutex>& lock, Condition condition) {
  bool met = false;
  if (spinning.fetch_add(1, std::memory_order_relaxed) < max_spinning) {
    lock.unlock();
    for (int i = 0; i < spin_polls && !(met = condition()); ++i) relax();
    lock.lock();
  }
  spinning.fetch_sub(1, std::memory_order_relaxed);
  return met;
}

std::shared_ptr<Stream> make_private_stream(int device) { return make_stream(device, Stream::Kind::non_blocking); }

CUstream create_stream(int device, Stream::Kind kind) {
  return reinterpret_cast<CUstream>(handles().add(make_stream(device, kind)));
}

std::shared_ptr<Stream> stream_of(CUstream handle, int device) {
  if (!is_default_stream(handle)) return handles().find(reinterpret_cast<std::uint64_t>(handle));
  if (device < 0 || device >= device_count()) return nullptr;
  if (handle != CU_STREAM_PER_THREAD) return device_streams()[device].legacy;
  thread_local ThreadStreams streams;
  return streams.of(device);
}

bool destroy_stream(CUstream handle) {
  const auto stream = handles().remove(reinterpret_cast<std::uint64_t>(handle));
  if (stream == nullptr) return false;
  Capture::give_up(stream);
  stream->close();
  return true;
}

void synchronize_device(int device) {
  DeviceStreams& streams = device_streams()[device];
  std::vector<Point> points{streams.legacy->last()};
  {
    std::lock_guard lock(streams.mutex);
    for (const auto& other : streams.others) {
      if (const auto stream = other.lock()) points.push_back(stream->last());
    }
  }
  for (const Point& point : points) point.wait();
}

}  // namespace ncclpy::host
