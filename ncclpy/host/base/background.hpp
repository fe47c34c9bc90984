// Threads of the engine's own: for jobs that may wait for other ranks, and one for what never waits.
#pragma once

#include <functional>
#include <vector>

namespace ncclpy::host {

// Runs `work` on a new thread that nobody joins; `name` is for debuggers. Throws std::system_error if there can be no
// more threads.
void run_in_background(const char* name, std::function<void()> work);

// Runs short pieces of work that never wait, one after the other, in the order of the calls.
void run_soon(std::function<void()> work);

// Runs all of them at the same time and returns when they are done; the last one on the calling thread. Throws
// std::system_error, with none of them run, if there can be no more threads.
void run_together(std::vector<std::function<void()>> works);

}  // namespace ncclpy::host
