// Allocations, and the map that finds the allocation of an address.
#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/mutex.hpp"

namespace ncclpy::host {
namespace {

constexpr std::size_t alignment = 512;
constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t large_bytes = std::size_t{64} << 20;  // from this size on the free memory is checked first

struct Entry {
  Allocation allocation;
  std::shared_ptr<void> memory;  // its last owner frees the memory
};

struct Allocations {
  SharedMutex<NCCLPY_LOCK_ALLOCATIONS> mutex;
  std::map<std::uintptr_t, Entry> by_base;
  // All allocations ever made lie between these bounds: most foreign addresses are rejected without the lock.
  std::atomic<std::uintptr_t> lowest{UINTPTR_MAX}, highest{0};
};

Allocations& allocations() {
  static auto* const all = new Allocations;  // never destroyed: threads may run while the process exits
  return *all;
}

bool too_much(std::size_t bytes) { return bytes > total_memory() || (bytes >= large_bytes && bytes > free_memory()); }

void free_allocation(const Allocation& gone) {
  if (gone.descriptor < 0) {
    std::free(gone.base);
  } else {
    munmap(gone.base, gone.bytes);
    close(gone.descriptor);
  }
}

// Registers memory and takes ownership of it, even if this throws.
void register_allocation(const Allocation& made) {
  std::shared_ptr<void> memory(made.base, [made](void*) { free_allocation(made); });
  const auto address = reinterpret_cast<std::uintptr_t>(made.base);
  Allocations& all = allocations();
  std::lock_guard lock(all.mutex);
  all.by_base.emplace(address, Entry{made, std::move(memory)});
  if (address < all.lowest.load()) all.lowest.store(address);
  if (address + made.bytes > all.highest.load()) all.highest.store(address + made.bytes);
}

void* allocate_aligned(std::size_t bytes, int device, bool pinned) {
  if (too_much(bytes)) return nullptr;
  const std::size_t unit = bytes >= huge_page ? huge_page : alignment;
  const std::size_t rounded = (bytes + unit - 1) / unit * unit;
  void* base = nullptr;
  if (posix_memalign(&base, unit, rounded) != 0) return nullptr;
  if (bytes >= huge_page) madvise(base, bytes, MADV_HUGEPAGE);  // a hint: smaller pages work as well
  register_allocation({base, bytes, device, pinned});
  return base;
}

}  // namespace

void* allocate(std::size_t bytes, int device) { return allocate_aligned(bytes, device, false); }

void* allocate_shared(std::size_t bytes, int device) {
  if (too_much(bytes)) return nullptr;
  const int descriptor = memfd_create("ncclpy-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return allocate(bytes, device);
  void* base = MAP_FAILED;
  // Sealed: other processes map the memory, and no process may truncate it under them.
  if (fchmod(descriptor, 0600) == 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 &&
      fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
    base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) {
    close(descriptor);
    return nullptr;
  }
  register_allocation({base, bytes, device, false, descriptor});
  return base;
}

void* allocate_pinned(std::size_t bytes, int device) { return allocate_aligned(bytes, device, true); }

bool deallocate(void* base, bool pinned) {
  Allocations& all = allocations();
  std::shared_ptr<void> gone;  // freed after the lock is released
  std::lock_guard lock(all.mutex);
  const auto found = all.by_base.find(reinterpret_cast<std::uintptr_t>(base));
  if (found == all.by_base.end() || found->second.allocation.pinned != pinned) return false;
  gone = std::move(found->second.memory);
  all.by_base.erase(found);
  return true;
}

Allocation allocation_of(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  Allocations& all = allocations();
  if (at < all.lowest.load(std::memory_order_acquire) || at >= all.highest.load(std::memory_order_acquire)) return {};
  std::shared_lock lock(all.mutex);
  auto found = all.by_base.upper_bound(at);
  if (found == all.by_base.begin()) return {};
  --found;
  const Allocation& one = found->second.allocation;
  return at - found->first < one.bytes ? one : Allocation{};
}

std::shared_ptr<void> hold_allocation(const void* address) {
  const Allocation found = allocation_of(address);
  if (found.base == nullptr) return nullptr;
  Allocations& all = allocations();
  std::shared_lock lock(all.mutex);
  const auto entry = all.by_base.find(reinterpret_cast<std::uintptr_t>(found.base));
  return entry == all.by_base.end() ? nullptr : entry->second.memory;
}

std::size_t total_memory() {
  static const std::size_t total = [] {
    struct sysinfo machine = {};
    sysinfo(&machine);
    return std::size_t{machine.totalram} * machine.mem_unit;
  }();
  return total;
}

std::size_t free_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) return kib << 10;
  }
  struct sysinfo machine = {};  // without /proc: free memory, not counting caches
  sysinfo(&machine);
  return std::size_t{machine.freeram} * machine.mem_unit;
}

}  // namespace ncclpy::host
