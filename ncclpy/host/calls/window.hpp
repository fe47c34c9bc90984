// Windows: memory of every rank that the others may write to, registered by all of them together.
#pragma once

#include <memory>
#include <vector>

#include "comm/comm.hpp"
#include "comm/put_gate.hpp"

namespace ncclpy::host {

struct Window {
  // A rank's part of the window, as this process reaches it.
  struct Part {
    char* base = nullptr;
    size_t bytes = 0;
    void* mapping = nullptr;  // of another process's memory; to be unmapped with the window
    size_t mapped = 0;
    std::shared_ptr<PutGate> gate;
  };

  ~Window();

  void* user = nullptr;
  int flags = 0;
  std::shared_ptr<const MemoryUse> memory_use;  // with checks, on this rank's memory
  std::vector<Part> parts;
};

// The window behind a handle of this communicator, or an error.
ncclResult_t find_window(Comm& comm, ncclWindow_t handle, const char* function, std::shared_ptr<Window>* window);

// The same in whichever communicator, or nullptr: the functions that find it so are given no communicator.
std::shared_ptr<Window> window_behind(ncclWindow_t handle);

// Returns when no other rank writes into this one's parts any more, nor will.
void close_parts(Comm& comm);

// Whether the memory lies in a symmetric window of the communicator.
bool in_symmetric_window(Comm& comm, const void* memory, size_t bytes);

}  // namespace ncclpy::host
