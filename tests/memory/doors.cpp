// A door that is shut while a thread is within: its process waits until that has left, a child of a fork for nobody.
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "ncclpy/core/handles/tenant.h"

int main() {
  ncclpy_door* door = ncclpy_door_new(nullptr);
  std::atomic<bool> within{false}, enough{false}, left{false};
  std::thread visitor([&] {
    within = ncclpy_door_enter(door) != 0;
    while (!enough) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    left = true;
    ncclpy_door_leave(door);
  });
  while (!within) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);
    ncclpy_door_shut(door);
    _exit(ncclpy_door_enter(door));  // it is shut all the same; its tenant has it still
  }
  int status = -1;
  waitpid(child, &status, 0);
  enough = true;
  ncclpy_door_shut(door);
  const bool waited = left;
  visitor.join();
  ncclpy_door_free(door);
  std::printf("child %d waited %d\n", status, waited);
  return 0;
}
