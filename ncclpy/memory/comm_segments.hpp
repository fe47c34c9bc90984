// A segment, and a communicator's list of the segments of its device; `segments.hpp` changes both.
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
  bool owned;            // whether ncclpy frees it
  uint64_t pool = 0;     // the number of its pool, 0 for none
  bool leaving = false;
  bool given_back = false;  // by its allocator: no graph that may use it is launched again
  uint64_t number = 0;   // in the order of addition, from 1
  size_t holders = 0;    // communicators that may use it, windows, and events that the device has yet to pass
};

struct SegmentCalls {
  // Registers a segment, under the communicator's lock. Returns NCCL's result code, and in `range` what `drop` needs.
  int (*add)(void* ranges, void* comm, const Segment& segment, long long* range);
  void (*drop)(void* ranges, void* comm, long long range);
  bool (*event_passed)(void* event);  // whether the device has passed the event
  void (*destroy_event)(void* event);
};

enum SegmentState { segment_unknown, segment_leaving, segment_gone };
enum SegmentAdded { segment_added, segment_overlaps, segment_no_memory };

constexpr int segment_refusals = 16;

struct SegmentCounters {
  size_t segments, bytes;                // live ones
  size_t leaving, leaving_bytes;         // taken away, but not gone yet
  size_t registrations;                  // at present
  uint64_t added, dropped, lost;         // registrations ever made and dropped; memory that could not be freed
  uint64_t refused[segment_refusals];    // registrations that NCCL has refused, by its result; [0] for larger ones
};

class Segments;

// A communicator's part in the registry.
struct CommSegments : ncclpy_precall_hook {
  enum State { pending, registering, held, refused };
  struct Entry {
    std::shared_ptr<Segment> segment;
    State state;
    long long range;
  };

  Segments* registry;
  void* ranges;  // the `Registrations` of its communicator
  int device;
  uint64_t captured_to = 0;                // graphs may use segments with numbers up to this one
  std::map<uint64_t, Entry> entries;
  std::set<uint64_t> to_register;
  std::vector<uint64_t> to_leave, fenced;
  int fence = -1;                          // index of the event that must be passed before `fenced` can leave, or -1

  // What threads of an allocator use without the GIL. `weak` is a weak reference to the communicator's handle.
  // `references` counts the references to this object, its `HookKeeper`'s among them. `ending` is the state of an
  // abort made to free memory, and `ended_for` the memory's address. `left_behind` means that the abort was given up,
  // since it cannot end a call that a thread is in.
  enum Ending { not_ended, is_ending, has_ended, left_behind };
  ncclpy_weak_handle* weak = nullptr;
  void* comm = nullptr;                        // used after the communicator was dropped, which revokes `weak`
  std::atomic_flag dropped_lock = ATOMIC_FLAG_INIT;  // replaces the lock of a communicator that was dropped
  std::atomic<int> references{1};
  std::atomic<int> ending{not_ended};
  std::atomic<uintptr_t> ended_for{0};
};

}  // namespace ncclpy
