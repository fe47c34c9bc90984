// The thread that watches processes, by pidfd where the kernel has them (Linux 5.3), else by looking ten times a second.
#include "watch.hpp"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "../driver/mutex.hpp"
#include "background.hpp"
#include "comm.hpp"

namespace ncclpy::host {
namespace {

constexpr int look_every_ms = 100;

struct Process {
  int32_t pid;
  uint64_t start;
  int descriptor;  // a pidfd, or -1
  bool dead;
  bool wanted;
};

struct Sight {
  enum { alive, ended, unclear } what;
  uint64_t start;
};

// What /proc says of a process; that it cannot be read is no word about the process.
Sight look_at_process(int32_t pid) {
  // This needs no descriptor, and no right to look into the process.
  if (pid <= 0 || (kill(pid, 0) != 0 && errno == ESRCH)) return {Sight::ended, 0};
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return {Sight::unclear, 0};
  const ssize_t length = read(descriptor, text, sizeof text - 1);
  close(descriptor);
  if (length <= 0) return {Sight::unclear, 0};
  text[length] = 0;
  // The second field, the program's name in parentheses, may hold anything; the state is the third, the start the 22nd.
  const char* at = strrchr(text, ')');
  if (at == nullptr || at[1] == 0) return {Sight::unclear, 0};
  if (at[2] == 'Z' || at[2] == 'X') return {Sight::ended, 0};
  unsigned long long start = 0;
  if (sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &start) != 1)
    return {Sight::unclear, 0};
  return {Sight::alive, start};
}

class Watcher {
 public:
  void add(const std::shared_ptr<Segment>& segment) {
    std::lock_guard lock(mutex_);
    if (news_ < 0) news_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // without one the thread looks again and again
    if (!started_) run_in_background("ncclpy-watch", [this] { live(); });
    started_ = true;
    segments_.push_back(segment);
    ring();
  }

  void forget() {
    std::lock_guard lock(mutex_);
    ring();
  }

 private:
  void ring() {
    const uint64_t one = 1;
    // A full counter is news as well.
    if (news_ >= 0 && write(news_, &one, sizeof one) < 0) return;
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

  int news() {
    std::lock_guard lock(mutex_);
    return news_;
  }

  void live() {
    for (;;) {
      const int news = this->news();
      const bool again = look() || news < 0;
      std::vector<pollfd> polled{{news, POLLIN, 0}};  // poll passes over a descriptor below 0
      for (const Process& process : processes_) {
        if (process.descriptor >= 0) polled.push_back({process.descriptor, POLLIN, 0});
      }
      poll(polled.data(), polled.size(), again ? look_every_ms : -1);
      uint64_t count;
      while (news >= 0 && read(news, &count, sizeof count) > 0) {
      }
    }
  }

  // Brings the list of processes up to date and reports the dead. Whether to look again soon, because ranks are still
  // to come or because a process can only be watched by looking.
  bool look() {
    bool again = false;
    const auto all = segments();
    for (Process& process : processes_) process.wanted = false;
    for (const auto& segment : all) {
      again = !segment->complete() || again;
      for (int rank = 0; rank < segment->nranks(); rank++) {
        const RankSlot& slot = segment->slot(rank);
        if (!slot.present.load(std::memory_order_acquire) || segment->is_local(rank)) continue;
        if (slot.left.load(std::memory_order_acquire) || slot.dead.load(std::memory_order_acquire)) continue;
        if (look_at(slot)) segment->bury(rank);
      }
      if (const int rank = segment->first_dead(); rank >= 0) break_comms(*segment, rank);
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

  // Whether the process of the slot has ended.
  bool look_at(const RankSlot& slot) {
    Process* process = nullptr;
    for (Process& known : processes_) {
      if (known.pid == slot.pid && known.start == slot.start) process = &known;
    }
    if (process == nullptr) {
      process = &processes_.emplace_back(Process{slot.pid, slot.start, -1, false, true});
    }
    process->wanted = true;
    if (process->descriptor < 0) {  // also if there was none to be had before
      process->descriptor = int(syscall(SYS_pidfd_open, slot.pid, 0));
      // Between the rank's arrival and this moment its pid may have become another process's.
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

  Mutex<NCCLPY_LOCK_WATCH> mutex_;  // guards what follows; processes_ belongs to the thread
  int news_ = -1;
  bool started_ = false;
  std::vector<std::weak_ptr<Segment>> segments_;
  std::vector<Process> processes_;
};

Watcher& watcher() {
  static auto* const the = new Watcher;
  return *the;
}

}  // namespace

void watch(const std::shared_ptr<Segment>& segment) { watcher().add(segment); }

void forget_segments() { watcher().forget(); }

uint64_t start_of_this_process() {
  // Asked for once in a process and in each fork of it: later there may be no descriptor for it.
  static std::atomic<int32_t> asked{0};
  static std::atomic<uint64_t> known{0};
  const int32_t pid = getpid();
  if (asked.load(std::memory_order_acquire) == pid) return known.load(std::memory_order_relaxed);
  const Sight sight = look_at_process(pid);
  if (sight.what != Sight::alive) return 0;
  known.store(sight.start, std::memory_order_relaxed);
  asked.store(pid, std::memory_order_release);
  return sight.start;
}

bool has_ended(int32_t pid, uint64_t start) {
  const Sight sight = look_at_process(pid);
  if (sight.what == Sight::unclear) return false;
  return sight.what == Sight::ended || (start != 0 && sight.start != start);
}

}  // namespace ncclpy::host
