// The thread that watches processes: by pidfd where the kernel has them (Linux 5.3). It polls ten times a second while
// a process has no pidfd or a rank has yet to join.
#include "watch.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "base/background.hpp"
#include "base/mutex.hpp"
#include "process.hpp"
#include "segment.hpp"

namespace ncclpy::host {
namespace {

constexpr int poll_interval_ms = 100;

struct Process {
  int32_t pid;
  uint64_t start;
  int descriptor;  // a pidfd, or -1
  bool dead;
  bool wanted;  // the current scan has found a rank of the process to watch
};

class Watcher {
 public:
  void add(const std::shared_ptr<Segment>& segment, DeathCallback on_death) {
    std::lock_guard lock(mutex_);
    if (wakeup_ < 0) wakeup_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // without an eventfd the thread polls
    if (!started_) {
      on_death_ = on_death;  // before the thread that reads it starts
      run_in_background("ncclpy-watch", [this] { run(); });
    }
    started_ = true;
    segments_.push_back(segment);
    wake();
  }

  // Makes the thread stop watching the processes of a segment that was destroyed.
  void segment_gone() {
    std::lock_guard lock(mutex_);
    wake();
  }

 private:
  void wake() {
    const uint64_t one = 1;
    // A write fails only if the counter is full, which wakes the thread as well.
    if (wakeup_ >= 0 && write(wakeup_, &one, sizeof one) < 0) return;
  }

  std::vector<std::shared_ptr<Segment>> segments() {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Segment>> found;
    for (size_t i = segments_.size(); i-- > 0;) {
      if (auto segment = segments_[i].lock()) found.push_back(std::move(segment));
      else segments_.erase(segments_.begin() + long(i));
    }
    return found;
  }

  int wakeup() {
    std::lock_guard lock(mutex_);
    return wakeup_;
  }

  void run() {
    for (;;) {
      const int wakeup = this->wakeup();
      const bool again = scan() || wakeup < 0;
      std::vector<pollfd> polled{{wakeup, POLLIN, 0}};  // poll ignores negative descriptors
      for (const Process& process : processes_) {
        if (process.descriptor >= 0) polled.push_back({process.descriptor, POLLIN, 0});
      }
      poll(polled.data(), polled.size(), again ? poll_interval_ms : -1);
      uint64_t count;
      while (wakeup >= 0 && read(wakeup, &count, sizeof count) > 0) {
      }
    }
  }

  // Updates the list of processes and reports the dead ones. Returns whether to scan again soon, because ranks have
  // yet to join or because a process has no pidfd.
  bool scan() {
    bool again = false;
    const auto all = segments();
    for (Process& process : processes_) process.wanted = false;
    for (const auto& segment : all) {
      again = !segment->complete() || again;
      for (int rank = 0; rank < segment->nranks(); rank++) {
        const RankSlot& slot = segment->slot(rank);
        if (!slot.present.load(std::memory_order_acquire) || segment->is_local(rank)) continue;
        if (slot.closed.load(std::memory_order_acquire) || slot.dead.load(std::memory_order_acquire)) continue;
        if (check(slot)) segment->mark_dead(rank);
      }
      if (const int rank = segment->first_dead(); rank >= 0) on_death_(*segment, rank);
    }
    for (size_t i = processes_.size(); i-- > 0;) {
      if (processes_[i].wanted) {
        again = again || (processes_[i].descriptor < 0 && !processes_[i].dead);
        continue;
      }
      if (processes_[i].descriptor >= 0) close(processes_[i].descriptor);
      processes_.erase(processes_.begin() + long(i));
    }
    return again;
  }

  // Returns whether the process of the slot has ended.
  bool check(const RankSlot& slot) {
    Process* process = nullptr;
    for (Process& known : processes_) {
      if (known.pid == slot.pid && known.start == slot.start) process = &known;
    }
    if (process == nullptr) {
      process = &processes_.emplace_back(Process{slot.pid, slot.start, -1, false, true});
    }
    process->wanted = true;
    if (process->descriptor < 0) {  // tried again at each scan if no pidfd could be opened
      process->descriptor = int(syscall(SYS_pidfd_open, slot.pid, 0));
      // Between the rank's arrival and this moment its pid may have been reused by another process.
      process->dead = has_ended(slot.pid, slot.start);
    }
    if (!process->dead) process->dead = ended(*process);
    return process->dead;
  }

  static bool ended(const Process& process) {
    if (process.descriptor < 0) return has_ended(process.pid, process.start);
    pollfd one = {process.descriptor, POLLIN, 0};
    return poll(&one, 1, 0) > 0 && (one.revents & POLLIN) != 0;
  }

  // Guards the fields below, except on_death_, which is set before the thread starts, and processes_, which only the
  // thread uses.
  Mutex<NCCLPY_LOCK_WATCH> mutex_;
  int wakeup_ = -1;
  DeathCallback on_death_ = nullptr;
  bool started_ = false;
  std::vector<std::weak_ptr<Segment>> segments_;
  std::vector<Process> processes_;
};

Watcher& watcher() {
  static auto* const the = new Watcher;
  return *the;
}

}  // namespace

void watch_others(const std::shared_ptr<Segment>& segment, DeathCallback on_death) {
  if (segment->is_watched()) return;
  for (int rank = 0; rank < segment->nranks(); rank++) {
    if (!segment->slot(rank).present.load(std::memory_order_acquire) || segment->is_local(rank)) continue;
    if (!segment->set_watched([] { watcher().segment_gone(); })) return;
    watcher().add(segment, on_death);
    return;
  }
}

}  // namespace ncclpy::host
