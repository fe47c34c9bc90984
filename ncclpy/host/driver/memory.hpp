// Memory of the host engine: CPU memory that remembers which virtual device it belongs to.
#pragma once

#include <cstddef>
#include <memory>

namespace ncclpy::host {

struct Allocation {
  void* base = nullptr;  // nullptr: memory that was not allocated here
  std::size_t bytes = 0;
  int device = -1;       // of pinned memory: the device that was current
  bool pinned = false;   // host memory (cuMemHostAlloc), not a device's
  int descriptor = -1;   // of memory that other processes of the user can map
};

// Device memory, aligned to 512 bytes; nullptr if the machine has not that much. Contents are undefined.
void* allocate(std::size_t bytes, int device);
// As allocate, and other processes can map it; if the process has no descriptor left for it, as allocate.
void* allocate_shared(std::size_t bytes, int device);
// Host memory of cuMemHostAlloc.
void* allocate_pinned(std::size_t bytes, int device);
// Give back what allocate (or allocate_pinned) returned; false, and nothing done, if `base` is not such a pointer.
bool deallocate(void* base, bool pinned = false);

// The allocation that contains an address; its base is nullptr for memory that was not allocated here.
Allocation allocation_of(const void* address);

// What keeps that allocation's memory where it is, also once it is deallocated; nullptr for memory not allocated here.
std::shared_ptr<void> hold_allocation(const void* address);

// The machine's memory, in bytes.
std::size_t total_memory();
std::size_t free_memory();

}  // namespace ncclpy::host
