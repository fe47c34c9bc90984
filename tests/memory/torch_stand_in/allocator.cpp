// A stand-in for torch's allocator: segments of pages, and trackers that are called under its lock, before memory is
// given back. A tracker that throws keeps the memory.
#include <sys/mman.h>

#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <vector>

#include "c10/cuda/CUDACachingAllocator.h"

namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

struct Segment {
  size_t bytes;
  int device;
};

std::mutex lock;
std::map<uintptr_t, Segment> segments;
std::vector<allocator::AllocatorTraceTracker> trackers;

void tell(allocator::TraceEntry::Action action, uintptr_t base, const Segment& segment) {
  const allocator::TraceEntry entry{action, static_cast<int8_t>(segment.device), base, segment.bytes};
  for (const auto& tracker : trackers) tracker(entry);
}

}  // namespace

void allocator::attachAllocatorTraceTracker(AllocatorTraceTracker tracker) {
  const std::lock_guard<std::mutex> hold(lock);
  trackers.push_back(std::move(tracker));
}

extern "C" {

// Allocates at an address, or anywhere if that is 0. Returns 0 without memory.
uintptr_t fake_allocate(uintptr_t at, size_t bytes, int device) {
  const std::lock_guard<std::mutex> hold(lock);
  void* base = mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED_NOREPLACE : 0), -1, 0);
  if (base == MAP_FAILED) return 0;
  const Segment segment{bytes, device};
  segments[reinterpret_cast<uintptr_t>(base)] = segment;
  tell(allocator::TraceEntry::SEGMENT_ALLOC, reinterpret_cast<uintptr_t>(base), segment);
  return reinterpret_cast<uintptr_t>(base);
}

// Returns 0; 1 if a tracker has refused, with its words; 2 if no segment begins there.
int fake_free(uintptr_t base, char* words, size_t space) {
  const std::lock_guard<std::mutex> hold(lock);
  const auto found = segments.find(base);
  if (found == segments.end()) return 2;
  try {
    tell(allocator::TraceEntry::SEGMENT_FREE, base, found->second);
  } catch (const std::exception& error) {
    std::snprintf(words, space, "%s", error.what());
    return 1;
  }
  munmap(reinterpret_cast<void*>(base), found->second.bytes);
  segments.erase(found);
  return 0;
}

// Reports that memory of another allocator, such as a pool's own, is allocated or freed.
void fake_tell(int action, uintptr_t base, size_t bytes, int device) {
  const std::lock_guard<std::mutex> hold(lock);
  tell(static_cast<allocator::TraceEntry::Action>(action), base, Segment{bytes, device});
}

size_t fake_snapshot(uintptr_t* bases, size_t* bytes, int* devices, size_t space) {
  const std::lock_guard<std::mutex> hold(lock);
  size_t i = 0;
  for (const auto& [base, segment] : segments) {
    if (i == space) break;
    bases[i] = base;
    bytes[i] = segment.bytes;
    devices[i++] = segment.device;
  }
  return i;
}

size_t fake_trackers() {
  const std::lock_guard<std::mutex> hold(lock);
  return trackers.size();
}

}  // extern "C"
