// The thread that watches processes, by pidfd where the kernel has them (Linux 5.3), else by looking ten times a second.
#include "watch.hpp"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <system_error>
#include <vector>

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

class Watcher {
 public:
  void add(const std::shared_ptr<Segment>& segment) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (news_ < 0) {
      const int news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
      if (news < 0) throw std::system_error(errno, std::generic_category(), "eventfd for the watch over other ranks");
      try {
        run_in_background("ncclpy-watch", [this, news] { live(news); });
      } catch (...) {
        close(news);
        throw;
      }
      news_ = news;
    }
    segments_.push_back(segment);
    ring();
  }

  void forget() {
    std::lock_guard<std::mutex> lock(mutex_);
    ring();
  }

 private:
  void ring() {
    const uint64_t one = 1;
    // A full counter is news as well.
    if (news_ >= 0 && write(news_, &one, sizeof one) < 0) return;
  }

  std::vector<std::shared_ptr<Segment>> segments() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Segment>> found;
    for (size_t i = segments_.size(); i-- > 0;) {
      if (auto segment = segments_[i].lock()) found.push_back(std::move(segment));
      else segments_.erase(segments_.begin() + long(i));
    }
    return found;
  }

  void live(int news) {
    for (;;) {
      const bool again = look();
      std::vector<pollfd> polled{{news, POLLIN, 0}};
      for (const Process& process : processes_) {
        if (process.descriptor >= 0) polled.push_back({process.descriptor, POLLIN, 0});
      }
      poll(polled.data(), polled.size(), again ? look_every_ms : -1);
      uint64_t count;
      while (read(news, &count, sizeof count) > 0) {
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
      const int descriptor = int(syscall(SYS_pidfd_open, slot.pid, 0));
      // Between the rank's arrival and this moment its pid may have become another process's.
      const bool dead = start_of_process(slot.pid) != slot.start;
      process = &processes_.emplace_back(Process{slot.pid, slot.start, descriptor, dead, true});
    }
    process->wanted = true;
    if (!process->dead) process->dead = ended(*process);
    return process->dead;
  }

  static bool ended(const Process& process) {
    if (process.descriptor < 0) return start_of_process(process.pid) != process.start;
    pollfd one = {process.descriptor, POLLIN, 0};
    return poll(&one, 1, 0) > 0;
  }

  std::mutex mutex_;  // guards what follows; processes_ belongs to the thread
  int news_ = -1;
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

uint64_t start_of_process(int32_t pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return 0;
  const ssize_t length = read(descriptor, text, sizeof text - 1);
  close(descriptor);
  if (length <= 0) return 0;
  text[length] = 0;
  // The second field, the program's name in parentheses, may hold anything; the state is the third, the start the 22nd.
  const char* at = strrchr(text, ')');
  if (at == nullptr || at[1] == 0 || at[2] == 'Z' || at[2] == 'X') return 0;
  unsigned long long start = 0;
  if (sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &start) != 1)
    return 0;
  return start;
}

}  // namespace ncclpy::host
