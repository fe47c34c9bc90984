// Allocations and the map that finds the one an address lies in.
#include "memory.hpp"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

namespace ncclpy::host {
namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLarge = std::size_t{64} << 20;  // from here on, the machine is asked first whether it has it

struct Allocations {
  std::shared_mutex mutex;
  std::map<std::uintptr_t, Allocation> by_base;
  // All allocations ever made lie between these: most foreign addresses are told apart without the lock.
  std::atomic<std::uintptr_t> lowest{UINTPTR_MAX}, highest{0};
};

Allocations& allocations() {
  static auto* const all = new Allocations;  // never destroyed: used until the process is gone
  return *all;
}

void* allocate_tagged(std::size_t bytes, int device, bool pinned) {
  if (bytes > total_memory() || (bytes >= kLarge && bytes > free_memory())) return nullptr;
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* base = nullptr;
  if (posix_memalign(&base, alignment, rounded) != 0) return nullptr;
  if (bytes >= kHugePage) madvise(base, bytes, MADV_HUGEPAGE);  // a wish: smaller pages do as well
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  Allocations& all = allocations();
  std::lock_guard lock(all.mutex);
  try {
    all.by_base.emplace(address, Allocation{base, bytes, device, pinned});
  } catch (...) {
    std::free(base);
    throw;
  }
  if (address < all.lowest.load()) all.lowest.store(address);
  if (address + bytes > all.highest.load()) all.highest.store(address + bytes);
  return base;
}

}  // namespace

void* allocate(std::size_t bytes, int device) { return allocate_tagged(bytes, device, false); }

void* allocate_pinned(std::size_t bytes, int device) { return allocate_tagged(bytes, device, true); }

bool deallocate(void* base, bool pinned) {
  Allocations& all = allocations();
  {
    std::lock_guard lock(all.mutex);
    const auto found = all.by_base.find(reinterpret_cast<std::uintptr_t>(base));
    if (found == all.by_base.end() || found->second.pinned != pinned) return false;
    all.by_base.erase(found);
  }
  std::free(base);
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
  return at - found->first < found->second.bytes ? found->second : Allocation{};
}

int device_of(const void* address) {
  const Allocation found = allocation_of(address);
  return found.pinned ? -1 : found.device;
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
  struct sysinfo machine = {};  // no /proc: what is not even used for caches
  sysinfo(&machine);
  return std::size_t{machine.freeram} * machine.mem_unit;
}

}  // namespace ncclpy::host
