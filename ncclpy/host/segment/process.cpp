// What /proc says about processes.
#include "process.hpp"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <atomic>

namespace ncclpy::host {
namespace {

struct ProcessStatus {
  enum { alive, ended, unknown } state;
  uint64_t start;
};

// Reads the state of a process from /proc; `unknown` if /proc cannot be read.
ProcessStatus read_status(int32_t pid) {
  // kill needs no descriptor, and no right to inspect the process.
  if (pid <= 0 || (kill(pid, 0) != 0 && errno == ESRCH)) return {ProcessStatus::ended, 0};
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return {ProcessStatus::unknown, 0};
  const ssize_t length = read(descriptor, text, sizeof text - 1);
  close(descriptor);
  if (length <= 0) return {ProcessStatus::unknown, 0};
  text[length] = 0;
  // The second field, the program's name in parentheses, may contain any character; the state is field 3, the start
  // time field 22.
  const char* at = strrchr(text, ')');
  if (at == nullptr || at[1] == 0) return {ProcessStatus::unknown, 0};
  if (at[2] == 'Z' || at[2] == 'X') return {ProcessStatus::ended, 0};
  unsigned long long start = 0;
  if (sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &start) != 1)
    return {ProcessStatus::unknown, 0};
  return {ProcessStatus::alive, start};
}

}  // namespace

uint64_t start_of_this_process() {
  // Read once in each process and in each fork of it: later there may be no free descriptor for /proc.
  static std::atomic<int32_t> asked{0};
  static std::atomic<uint64_t> known{0};
  const int32_t pid = getpid();
  if (asked.load(std::memory_order_acquire) == pid) return known.load(std::memory_order_relaxed);
  const ProcessStatus status = read_status(pid);
  if (status.state != ProcessStatus::alive) return 0;
  known.store(status.start, std::memory_order_relaxed);
  asked.store(pid, std::memory_order_release);
  return status.start;
}

bool has_ended(int32_t pid, uint64_t start) {
  const ProcessStatus status = read_status(pid);
  if (status.state == ProcessStatus::unknown) return false;
  return status.state == ProcessStatus::ended || (start != 0 && status.start != start);
}

}  // namespace ncclpy::host
