// Memory of the host engine: CPU memory with the virtual device that it belongs to.
#pragma once

#include <cstddef>
#include <memory>

namespace ncclpy::host {

struct Allocation {
  void* base = nullptr;  // nullptr: memory that was not allocated here
  std::size_t bytes = 0;
  int device = -1;      // of pinned memory: the device that was current at the allocation
  bool pinned = false;  // host memory (cuMemHostAlloc)
  int descriptor = -1;  // of memory that other processes of the user can map, else -1
};

// Device memory, aligned to at least 512 bytes, with undefined contents; nullptr if the machine does not have that
// much.
void* allocate(std::size_t bytes, int device);
// Like allocate, but the memory is zero, and other processes of the user can map it. The same as allocate if no memfd
// can be made, for example because no descriptor is free.
void* allocate_shared(std::size_t bytes, int device);
// Host memory of cuMemHostAlloc.
void* allocate_pinned(std::size_t bytes, int device);
// Frees what allocate or allocate_shared or, with `pinned`, allocate_pinned returned; the result of hold_allocation()
// keeps the memory longer. Returns false, and does nothing, if `base` is no such pointer.
bool deallocate(void* base, bool pinned = false);

// The allocation that contains an address; `base` is nullptr for memory that was not allocated here.
Allocation allocation_of(const void* address);

// Keeps the memory of the allocation that contains an address mapped, even after it is deallocated; nullptr for memory
// that was not allocated here.
std::shared_ptr<void> hold_allocation(const void* address);

// The machine's memory, in bytes.
std::size_t total_memory();
std::size_t free_memory();

}  // namespace ncclpy::host
