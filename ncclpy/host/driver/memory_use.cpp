// The registry of all uses.
#include "memory_use.hpp"

#include <cstdio>
#include <mutex>
#include <set>

#include "base/mutex.hpp"
#include "base/switches.hpp"

namespace ncclpy::host {

namespace {

struct Registry {
  Mutex<NCCLPY_LOCK_MEMORY_USE> mutex;
  std::set<const MemoryUse*> uses;
};

Registry& registry() {
  static auto* const one = new Registry;  // never destroyed: threads may run while the process exits
  return *one;
}

}  // namespace

const bool checks = is_on("NCCLPY_HOST_CHECKS");

thread_local std::string last_free_refusal;

std::string Range::text() const {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%zu bytes at %p", bytes, base);
  return buffer;
}

MemoryUse::MemoryUse(Kind kind, std::vector<Range> ranges, std::string description, std::function<bool()> ended)
    : kind_(kind), ranges_(std::move(ranges)), description_(std::move(description)), ended_(std::move(ended)) {
  std::lock_guard lock(registry().mutex);
  registry().uses.insert(this);
}

MemoryUse::~MemoryUse() {
  std::lock_guard lock(registry().mutex);
  registry().uses.erase(this);
}

std::string MemoryUse::conflict(const Allocation& allocation, bool waits_for_copies) {
  std::lock_guard lock(registry().mutex);
  for (const MemoryUse* use : registry().uses) {
    if (use->kind_ == copies && waits_for_copies) continue;
    for (const Range& range : use->ranges_) {
      if (!range.overlaps(allocation.base, allocation.bytes) || (use->ended_ && use->ended_())) continue;
      return "memory that is still needed, " + Range{allocation.base, allocation.bytes}.text() + " on device " +
             std::to_string(allocation.device) + ": " + use->description_ + " " + range.text() +
             (use->kind_ == registered ? "; deregister it first" : " and is not done; wait for it first");
    }
  }
  return "";
}

}  // namespace ncclpy::host
