// The engine's background threads: for jobs that may wait for other ranks, and one thread for work that never waits.
#pragma once

#include <functional>
#include <vector>

namespace ncclpy::host {

// Runs `work` on a new detached thread; `name` is for debuggers. Throws std::system_error if no thread can be started.
void run_in_background(const char* name, std::function<void()> work);

// Queues `work`, which must be short and must not wait. One thread of the process runs such work, in the order of the
// calls. Throws std::system_error if that thread cannot be started.
void run_soon(std::function<void()> work);

// Runs all `works` concurrently, the last one on the calling thread, and returns when all are done. Throws
// std::system_error, with none of them run, if a thread cannot be started.
void run_together(std::vector<std::function<void()>> works);

}  // namespace ncclpy::host
