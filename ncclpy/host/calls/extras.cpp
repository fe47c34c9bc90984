// Exports of the host engine besides the functions of NCCL and of the driver: faults, window access, stragglers.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "comm/stragglers.hpp"
#include "driver/memory.hpp"
#include "faults/fault.hpp"
#include "launch/group.hpp"
#include "window.hpp"

using namespace ncclpy::host;

namespace {

// While this object exists, a rank's part of a window stays accessible.
struct WindowHold {
  std::shared_ptr<Window> window;  // with the mappings of other processes' memory
  std::shared_ptr<void> memory;    // of ncclMemAlloc, of this process
};

}  // namespace

extern "C" {

// Replaces the plan and forgets past faults; NULL or "" removes the plan. Hangs in progress continue. After an error
// the old plan stays in force.
__attribute__((visibility("default"))) ncclResult_t ncclpyHostSetFaults(const char* text) {
  return guarded("ncclpyHostSetFaults", [&] { return set_faults(text); });
}

// The injected faults (ncclpyHostFaultsFired), and the rules that have injected none (ncclpyHostFaultsUnfired), one a
// line. A text is valid until the calling thread calls the same function again.
__attribute__((visibility("default"))) const char* ncclpyHostFaultsFired(void) {
  thread_local std::string text;
  text = faults_fired();
  return text.c_str();
}

__attribute__((visibility("default"))) const char* ncclpyHostFaultsUnfired(void) {
  thread_local std::string text;
  text = faults_unfired();
  return text.c_str();
}

// Keeps the pointer of ncclGetPeerDevicePointer for a rank valid until ncclpyHostReleaseWindow, also after the window
// is deregistered and, for a rank of this process, after ncclMemFree. Returns NULL if there is no such window or rank.
__attribute__((visibility("default"))) void* ncclpyHostHoldWindow(ncclWindow_t handle, int rank) {
  WindowHold* hold = nullptr;
  guarded("ncclpyHostHoldWindow", [&] {
    const std::shared_ptr<Window> window = window_behind(handle);
    if (window == nullptr || rank < 0 || size_t(rank) >= window->parts.size()) return ncclSuccess;
    const Window::Part& part = window->parts[size_t(rank)];
    hold = new WindowHold{window, part.mapping != nullptr ? nullptr : hold_allocation(part.base)};
    return ncclSuccess;
  });
  return hold;
}

__attribute__((visibility("default"))) void ncclpyHostReleaseWindow(void* hold) {
  delete static_cast<WindowHold*>(hold);
}

// Writes which ranks have arrived where `comm` waits and which have not, truncated to `size` bytes including the
// terminating zero. Returns the length of the whole text, 0 if the communicator waits for nothing. Never waits, even
// if other threads are stuck in the communicator.
__attribute__((visibility("default"))) size_t ncclpyHostStragglers(ncclComm_t handle, char* buffer, size_t size) {
  const std::string before = last_error();
  std::string text;
  guarded("ncclpyHostStragglers", [&] {
    std::shared_ptr<Comm> comm;
    NCCLPY_TRY(look_up(handle, "ncclpyHostStragglers", &comm));
    text = straggler_report(*comm);
    return ncclSuccess;
  });
  set_last_error(before);
  if (size > 0) {
    const size_t n = std::min(size - 1, text.size());
    std::memcpy(buffer, text.data(), n);
    buffer[n] = '\0';
  }
  return text.size();
}
}
