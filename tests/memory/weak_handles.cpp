// A weak handle that is revoked while a thread has it pinned: its process waits for the unpin, a child of a fork does not.
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "ncclpy/core/handles/precall_hook.h"

int main() {
  ncclpy_weak_handle* weak = ncclpy_weak_handle_new(nullptr);
  std::atomic<bool> within{false}, enough{false}, left{false};
  std::thread visitor([&] {
    within = ncclpy_weak_handle_pin(weak) != 0;
    while (!enough) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    left = true;
    ncclpy_weak_handle_unpin(weak);
  });
  while (!within) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);
    ncclpy_weak_handle_revoke(weak);
    _exit(ncclpy_weak_handle_pin(weak));  // it is revoked all the same; its hook has it still
  }
  int status = -1;
  waitpid(child, &status, 0);
  enough = true;
  ncclpy_weak_handle_revoke(weak);
  const bool waited = left;
  visitor.join();
  ncclpy_weak_handle_free(weak);
  std::printf("child %d waited %d\n", status, waited);
  return 0;
}
