// The part of torch's caching allocator that its trace hooks use, by torch's names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace c10::cuda::CUDACachingAllocator {

struct TraceEntry {
  enum Action { ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT, OOM };
  Action action_;
  int8_t device_;
  size_t addr_;
  size_t size_;
};

using AllocatorTraceTracker = std::function<void(const TraceEntry&)>;

void attachAllocatorTraceTracker(AllocatorTraceTracker tracker);

}  // namespace c10::cuda::CUDACachingAllocator
