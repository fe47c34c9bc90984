// Lanes: threads with first-in-first-out queues that make the calls of launches. All lanes keep one order of launches.
//
// A lane's thread never takes the GIL, so it never waits for Python code. A thread that wants to make the calls of a
// launch itself borrows the lanes at the launch's place in the order; jobs that are pushed meanwhile wait until the
// thread gives the lanes back.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "native.h"
#include "ordered_mutex.h"

namespace ncclpy {

using Job = ncclpy_job;

// One lane. Lanes live as long as the process, as their threads do.
class Lane {
 public:
  // `spin` is how long the thread stays awake for the next job, in seconds: launches arrive in bursts. The thread
  // calls `begin` first.
  Lane(double spin, void (*begin)()) : spin_(spin), begin_(begin) { ncclpy_mutex_init(&mutex_, NCCLPY_LOCK_LIST); }

  // Returns false when no thread can be started.
  bool start() {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    // Signals go to the program's threads: Python's handlers need the main one. A crash must reach its handler.
    sigfillset(&all);
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, number);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&thread, &attributes, &Lane::main, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (!failed) pthread_setname_np(thread, "ncclpy-lane");
    return !failed;
  }

  void push(Job* job) {
    job->next = nullptr;
    ncclpy_mutex_lock(&mutex_);
    (last_ != nullptr ? last_->next : first_) = job;
    last_ = job;
    const bool taken = taken_;
    ncclpy_mutex_unlock(&mutex_);
    if (!taken) announce();  // else the thread that has taken the lane looks for more jobs when it is done
  }

  // Lets the calling thread make the lane's calls, if the lane is idle; returns whether it was idle.
  bool borrow() {
    ncclpy_mutex_lock(&mutex_);
    const bool idle = !taken_ && first_ == nullptr;
    if (idle) taken_ = true;
    ncclpy_mutex_unlock(&mutex_);
    return idle;
  }

  // Ends a borrowing, in any thread; the lane runs `job`, if given, before all that was pushed meanwhile.
  void give_back(Job* job = nullptr) {
    ncclpy_mutex_lock(&mutex_);
    if (job != nullptr) {
      job->next = first_;
      first_ = job;
      if (last_ == nullptr) last_ = job;
    }
    taken_ = false;
    const bool more = first_ != nullptr;
    ncclpy_mutex_unlock(&mutex_);
    if (more) announce();
  }

  bool is_asleep() const { return ncclpy_load(&asleep_); }

  bool is_idle() {
    ncclpy_mutex_lock(&mutex_);
    const bool idle = !taken_ && first_ == nullptr;
    ncclpy_mutex_unlock(&mutex_);
    return idle;
  }

 private:
  static void* main(void* lane) {
    static_cast<Lane*>(lane)->serve();
    return nullptr;
  }

  void serve() {
    ncclpy_sharp_timers();
    if (begin_ != nullptr) begin_();
    for (;;) {
      const int seen = ncclpy_load(&announced_);
      Job* job = take(false);
      if (job != nullptr) {
        do {
          job->run(job);
          job = take(true);
        } while (job != nullptr);
        continue;
      }
      const double until = ncclpy_now() + spin_;
      int spins = 0;
      while (ncclpy_load(&announced_) == seen && ((++spins & 63) != 0 || ncclpy_now() < until)) ncclpy_relax();
      if (ncclpy_load(&announced_) != seen) continue;
      ncclpy_swap(&asleep_, 1);
      if (ncclpy_load(&announced_) == seen) ncclpy_sleep_on(&announced_, seen, 3600);
      ncclpy_swap(&asleep_, 0);
    }
  }

  // Takes the next job, and the lane with it; nothing if another thread has taken the lane. `has_lane`: whether this
  // thread has the lane already. If there is no job, the lane becomes free.
  Job* take(bool has_lane) {
    Job* job = nullptr;
    ncclpy_mutex_lock(&mutex_);
    if (has_lane || !taken_) {
      job = first_;
      if (job != nullptr) {
        first_ = job->next;
        if (first_ == nullptr) last_ = nullptr;
      }
      taken_ = job != nullptr;
    }
    ncclpy_mutex_unlock(&mutex_);
    return job;
  }

  void announce() {
    ncclpy_add(&announced_, 1);
    if (ncclpy_load(&asleep_)) ncclpy_wake(&announced_);
  }

  ncclpy_mutex mutex_;   // guards the next three
  Job* first_ = nullptr;
  Job* last_ = nullptr;
  bool taken_ = false;   // a job runs, or a thread has borrowed the lane
  int announced_ = 0;    // atomic futex; counts announcements of jobs
  int asleep_ = 0;       // atomic
  const double spin_;
  void (*const begin_)();
};

// All lanes of the process.
class Lanes {
 public:
  explicit Lanes(int count, double spin, void (*begin)() = nullptr) : spin_(spin), begin_(begin), lanes_(count) {
    ncclpy_mutex_init(&order_, NCCLPY_LOCK_ORDER);
  }

  int count() const { return static_cast<int>(lanes_.size()); }

  // Starts a lane's thread at its first use; must not be called concurrently. Returns false if that fails.
  bool ensure_started(int number) {
    if (lanes_[number] != nullptr) return true;
    std::unique_ptr<Lane> lane(new (std::nothrow) Lane(spin_, begin_));
    if (lane == nullptr || !lane->start()) return false;
    lanes_[number] = std::move(lane);
    return true;
  }

  // Pushes jobs to their lanes, which must have been started. The jobs take the next place in the one order of all
  // launches, pushed or borrowed.
  void push(Job* const* jobs, const int* numbers, size_t count) {
    ncclpy_mutex_lock(&order_);
    pushed_at_ = ncclpy_now();
    for (size_t i = 0; i < count; i++) lanes_[numbers[i]]->push(jobs[i]);
    ncclpy_mutex_unlock(&order_);
  }

  // Borrows some lanes, each named once; all of them or none.
  //
  // A single lane is borrowed whenever it is idle. Several lanes are faster than one thread, so they are borrowed only
  // when they sleep and nothing was launched for `spin`: waking them takes longer than making all calls here.
  bool borrow(const int* numbers, size_t count) {
    size_t taken = 0;
    ncclpy_mutex_lock(&order_);
    const double moment = ncclpy_now();
    if (count == 1 || moment - pushed_at_ >= spin_) {
      while (taken < count && (count == 1 || lanes_[numbers[taken]]->is_asleep()) && lanes_[numbers[taken]]->borrow())
        taken++;
      if (taken == count) pushed_at_ = moment;
    }
    ncclpy_mutex_unlock(&order_);
    if (taken == count) return true;
    give_back(numbers, taken);
    return false;
  }

  void give_back(const int* numbers, size_t count) {
    for (size_t i = 0; i < count; i++) lanes_[numbers[i]]->give_back();
  }

  // Returns the borrowed lanes by pushing a job to the first of them; the job gives the others back.
  void pass_on(Job* job, const int* numbers) { lanes_[numbers[0]]->give_back(job); }

  bool is_idle(int number) { return lanes_[number] == nullptr || lanes_[number]->is_idle(); }

 private:
  ncclpy_mutex order_;     // guards the order of launches, and pushed_at_
  double pushed_at_ = 0;   // when something was last pushed or borrowed
  const double spin_;
  void (*const begin_)();
  std::vector<std::unique_ptr<Lane>> lanes_;  // changed by ensure_started() only, under the GIL
};

}  // namespace ncclpy
