// A library that follows torch's caching allocator for ncclpy. It is built against the installed torch when it is
// first needed, knows only two functions of ncclpy, by their addresses, and stays loaded: torch cannot detach the
// tracker. Torch calls the tracker under the allocator's lock of one device, with or without the GIL. No Python runs
// here, and no thread waits under the mutex below.
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// See ncclpy/memory/registry.pyx.
enum TakenIn { taken_in, known, refused };
using TakeIn = int (*)(uintptr_t base, size_t bytes, int device);
using TakeOut = int (*)(uintptr_t base, int device, double timeout);

enum Count { followed, expandable, not_followed, ended, kept, counts };

struct State {
  std::mutex mutex;
  bool attached = false;  // the tracker is attached; it cannot be detached
  bool open = false;  // new segments are taken in; freed ones are always taken out
  bool looking_back = false;  // from before the tracker is attached until all earlier segments are in the registry
  bool lost_track = false;  // a segment that was freed while looking back could not be put into `gone`
  TakeIn take_in = nullptr;
  TakeOut take_out = nullptr;
  double timeout = 0;
  std::map<uintptr_t, int> ours;  // segments that were taken in from here, with their devices
  std::set<uintptr_t> gone;  // segments that were freed while looking back: a snapshot may still have them
  uint64_t count[counts] = {};
};

State& state() {
  static auto* one = new State;  // never freed: the allocator calls as long as the process lives
  return *one;
}

using Hold = std::lock_guard<std::mutex>;

// Adds a segment to the registry, and counts the result; called under the mutex.
int take_in(State& one, uintptr_t base, size_t bytes, int device) {
  bool noted = false;
  try {
    noted = one.ours.emplace(base, device).second;
  } catch (const std::bad_alloc&) {
    ++one.count[not_followed];
    return refused;
  }
  const int result = one.take_in(base, bytes, device);
  if (result == taken_in) {
    ++one.count[followed];
  } else if (noted) {  // the registry has not added it: it may be memory of ncclpy itself, in a pool of torch
    one.ours.erase(base);
  }
  if (result == refused) ++one.count[not_followed];
  return result;
}

void segment_allocated(uintptr_t base, size_t bytes, int device) {
  State& one = state();
  const Hold hold(one.mutex);
  if (one.open) take_in(one, base, bytes, device);
}

void segment_freed(uintptr_t base, int device) {
  State& one = state();
  TakeOut take_out;
  double timeout;
  {
    const Hold hold(one.mutex);
    one.ours.erase(base);
    if (one.looking_back) {
      try {
        one.gone.insert(base);
      } catch (const std::bad_alloc&) {
        one.lost_track = true;
      }
    }
    take_out = one.take_out;
    timeout = one.timeout;
  }
  const int result = take_out(base, device, timeout);  // waits
  if (result == 0) return;
  {
    const Hold hold(one.mutex);
    ++one.count[result > 0 ? ended : kept];
  }
  if (result < 0) {  // the allocator frees the segment after this call, and keeps it if this call throws
    char words[200];
    std::snprintf(words, sizeof words,
                  "ncclpy: the memory at 0x%llx is not freed: a communicator still uses it after %g s, and could not be "
                  "aborted either",
                  static_cast<unsigned long long>(base), timeout);
    throw std::runtime_error(words);
  }
}

void follow(const allocator::TraceEntry& entry) {
  const auto base = static_cast<uintptr_t>(entry.addr_);
  switch (entry.action_) {
    case allocator::TraceEntry::SEGMENT_ALLOC:
      return segment_allocated(base, static_cast<size_t>(entry.size_), static_cast<int>(entry.device_));
    case allocator::TraceEntry::SEGMENT_FREE:
      return segment_freed(base, static_cast<int>(entry.device_));
    case allocator::TraceEntry::SEGMENT_MAP: {  // an expandable segment grows by pages, a registration cannot
      State& one = state();
      const Hold hold(one.mutex);
      if (one.open) ++one.count[expandable];
      return;
    }
    default:
      return;
  }
}

}  // namespace

extern "C" {

// Begins to follow, and to look back; the first call that succeeds attaches the tracker. Returns 0, or 1 with the
// error in `words`.
int ncclpy_torch_open(uintptr_t take_in, uintptr_t take_out, double timeout, char* words, size_t space) {
  State& one = state();
  bool attached;
  {
    const Hold hold(one.mutex);
    one.take_in = reinterpret_cast<TakeIn>(take_in);
    one.take_out = reinterpret_cast<TakeOut>(take_out);
    one.timeout = timeout;
    one.open = one.looking_back = true;
    attached = one.attached;
  }
  if (attached) return 0;
  try {
    allocator::attachAllocatorTraceTracker(&follow);  // takes the allocator's locks
  } catch (const std::exception& error) {
    std::snprintf(words, space, "%s", error.what());
    const Hold hold(one.mutex);
    one.open = one.looking_back = false;
    return 1;
  }
  const Hold hold(one.mutex);
  one.attached = true;
  return 0;
}

// Takes in a segment of a snapshot made after ncclpy_torch_open(), unless it was or may have been freed meanwhile.
// Returns 0 taken in, 1 known, 2 refused, 3 perhaps freed, or ncclpy_torch_close() was called.
int ncclpy_torch_was_there(uintptr_t base, size_t bytes, int device) {
  State& one = state();
  const Hold hold(one.mutex);
  if (!one.open || one.lost_track || one.gone.count(base) != 0) return 3;
  return take_in(one, base, bytes, device);
}

// Called when all segments of the snapshot were passed to ncclpy_torch_was_there().
void ncclpy_torch_looked_back() {
  State& one = state();
  const Hold hold(one.mutex);
  one.looking_back = one.lost_track = false;
  one.gone.clear();
}

// From now on takes in no segment; segments that were taken in are still taken out when they are freed.
void ncclpy_torch_close() {
  State& one = state();
  const Hold hold(one.mutex);
  one.open = one.looking_back = one.lost_track = false;
  one.gone.clear();
}

// Returns the number of segments that this library has taken in, and writes the first `space` of them.
size_t ncclpy_torch_ours(uintptr_t* bases, int* devices, size_t space) {
  State& one = state();
  const Hold hold(one.mutex);
  size_t i = 0;
  for (const auto& [base, device] : one.ours) {
    if (i == space) break;
    bases[i] = base;
    devices[i++] = device;
  }
  return one.ours.size();
}

// Forgets a segment that was taken out of the registry.
void ncclpy_torch_let_go(uintptr_t base) {
  State& one = state();
  const Hold hold(one.mutex);
  one.ours.erase(base);
}

void ncclpy_torch_counts(uint64_t* count) {
  State& one = state();
  const Hold hold(one.mutex);
  for (int i = 0; i < counts; ++i) count[i] = one.count[i];
}

}  // extern "C"
