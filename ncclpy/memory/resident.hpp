// A segment, and a communicator's part in those of its device; `segments.hpp` moves one through the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "ncclpy/core/handles/precall_hook.h"

namespace ncclpy {

struct Segment {
  uintptr_t base;
  size_t bytes;
  int device;
  bool owned;            // ours to free
  uint64_t pool = 0;     // whose it is; 0 if it is no pool's
  bool leaving = false;
  bool given_back = false;  // by its allocator: no graph that may use it is launched again
  uint64_t number = 0;   // segments are counted as they come
  size_t holders = 0;    // communicators whose operations may use it, windows, and what its device has yet to come past
};

struct SegmentCalls {
  // Have a segment registered, a result code of NCCL's; `range` is what `drop` gives back. Under the communicator's lock.
  int (*add)(void* ranges, void* comm, const Segment& segment, long long* range);
  void (*drop)(void* ranges, void* comm, long long range);
  bool (*over)(void* event);  // whether the device has come past it
  void (*forget)(void* event);
};

enum SegmentState { segment_unknown, segment_leaving, segment_gone };
enum SegmentAdded { segment_added, segment_overlaps, segment_no_memory };

constexpr int segment_refusals = 16;

struct SegmentCounters {
  size_t segments, bytes;                // live ones
  size_t leaving, leaving_bytes;         // quarantined
  size_t registrations;                  // at this moment
  uint64_t added, dropped, lost;         // registrations since the beginning; memory that could not be freed
  uint64_t refused[segment_refusals];    // those that NCCL has refused, by its result
};

class Segments;

// A communicator's part.
struct Resident : ncclpy_precall_hook {
  enum State { pending, registering, held, refused };
  struct Entry {
    std::shared_ptr<Segment> segment;
    State state;
    long long range;
  };

  Segments* home;
  void* ranges;  // what its communicator has registered
  int device;
  uint64_t captured_to = 0;                // those up to it may be used by graphs
  std::map<uint64_t, Entry> entries;
  std::set<uint64_t> to_register;
  std::vector<uint64_t> to_leave, fenced;
  int fence = -1;                          // the event behind which `fenced` can go

  // For threads of an allocator, without the GIL: the way to its handle; what needs this besides its keeper; and how
  // far its abort has come, if memory that it uses was to be freed, with that memory.
  enum Ending { not_ended, is_ending, has_ended, left_behind };
  ncclpy_weak_handle* weak = nullptr;
  void* comm = nullptr;                        // once that is revoked, and its communicator dropped
  std::atomic_flag visited = ATOMIC_FLAG_INIT;  // in place of its lock then
  std::atomic<int> kept{1};
  std::atomic<int> ending{not_ended};
  std::atomic<uintptr_t> ended_for{0};
};

}  // namespace ncclpy
