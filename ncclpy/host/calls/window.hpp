// Windows: memory of every rank that the other ranks may write to, registered by all of them together.
#pragma once

#include <memory>
#include <vector>

#include "comm/comm.hpp"
#include "comm/put_gate.hpp"

namespace ncclpy::host {

struct Window {
  // One rank's part of the window, as this process accesses it.
  struct Part {
    char* base = nullptr;
    size_t bytes = 0;
    void* mapping = nullptr;  // of another process's memory; unmapped with the window
    size_t mapped = 0;        // bytes of the mapping
    std::shared_ptr<PutGate> gate;
  };

  ~Window();

  void* user = nullptr;
  int flags = 0;
  std::shared_ptr<const MemoryUse> memory_use;  // with NCCLPY_HOST_CHECKS=1, of this rank's memory
  std::vector<Part> parts;
};

// Finds a window of this communicator by its handle, or returns an error.
ncclResult_t find_window(Comm& comm, ncclWindow_t handle, const char* function, std::shared_ptr<Window>* window);

// Finds a window of any communicator, or returns nullptr: the callers are not given a communicator.
std::shared_ptr<Window> window_behind(ncclWindow_t handle);

// Keeps the other ranks of this process from writing into this rank's parts of windows. Returns when no rank writes
// any more.
void close_parts(Comm& comm);

// Whether the memory lies in a symmetric window of the communicator.
bool in_symmetric_window(Comm& comm, const void* memory, size_t bytes);

}  // namespace ncclpy::host
