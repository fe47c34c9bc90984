// Threads add and remove segments beside communicators that are made, make calls, leave and end: a segment is gone
// when no communicator has it registered, each registration is ended, and nothing is lost when memory runs out.
//
//   segments_stress SEED ROUNDS
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ncclpy/memory/segments.hpp"

// In a thread that sets it, one of every `fails_every` allocations fails.
thread_local unsigned fails_every = 0, allocations = 0;

static void* allocate(size_t size) {
  if (fails_every && ++allocations % fails_every == 0) throw std::bad_alloc();
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

constexpr int slots = 24, communicators = 3, devices = 2;
constexpr size_t bytes = 64;

std::atomic<int> refused{0}, gone{0};
std::atomic<bool> device_is_busy{false};

int slot_of(uintptr_t base) { return static_cast<int>(base / bytes) - 16; }
uintptr_t base_of(int slot) { return (slot + 16) * bytes; }

void expect(bool holds, const char* what) {
  if (!holds) {
    std::printf("%s\n", what);
    std::exit(1);
  }
}

struct Communicator {
  std::mutex lock;
  std::unique_ptr<ncclpy::CommSegments> member;
  std::atomic<int> registered[slots] = {};
};
Communicator* all;

bool is_registered(int slot) {
  for (int i = 0; i < communicators; ++i) {
    if (all[i].registered[slot]) return true;
  }
  return false;
}

int add(void*, void* comm, const ncclpy::Segment& segment, long long* range) {
  const int slot = slot_of(segment.base);
  if (slot % 7 == 3) return 5;
  static_cast<Communicator*>(comm)->registered[slot]++;
  *range = slot;
  return 0;
}
void drop(void*, void* comm, long long range) {
  expect(static_cast<Communicator*>(comm)->registered[range]-- > 0, "dropped twice");
}
std::atomic<int> forgotten{0};
bool event_passed(void*) { return !device_is_busy; }
void destroy_event(void*) { forgotten++; }

void free_some(ncclpy::Segments& segments) {
  segments.query_awaited();
  uintptr_t base;
  int device;
  while (segments.next_to_free(&base, &device)) {
    expect(!is_registered(slot_of(base)), "freed while registered");
    segments.freed(true);
    gone++;
  }
}

// Each thread has slots of its own.
void bring_and_take(ncclpy::Segments& segments, int seed, int first, int end) {
  std::mt19937 random(seed);
  std::vector<bool> there(slots);
  fails_every = 0;
  for (int i = 0; i < 600; ++i) {
    const int slot = first + static_cast<int>(random() % (end - first));
    const bool owned = slot % 2;
    const uintptr_t base = base_of(slot);
    if (!there[slot]) {
      uintptr_t other;
      size_t other_bytes;
      fails_every = random() % 4 ? 0 : 1 + random() % 12;
      const auto added = segments.add(base, bytes, slot / 2 % devices, owned, &other, &other_bytes, slot + 1);
      fails_every = 0;
      there[slot] = added == ncclpy::segment_added;
      if (added == ncclpy::segment_no_memory) refused++;
      if (added == ncclpy::segment_overlaps) expect(other == base, "another one's memory");
    } else {
      const uint64_t number = segments.of_pool(slot + 1).at(0).number;
      // Some have a window over them, or their allocator's stream has yet to pass an event.
      const bool held = owned && random() % 3 == 0 && segments.hold(base, number);
      expect(!segments.hold(base, number + 1), "another one was held");
      fails_every = random() % 3 ? 0 : 1;
      if (owned && random() % 3 == 0) segments.hold_until(base, &there);
      fails_every = 1;  // removals need no memory
      expect(segments.remove(base, !owned) == ncclpy::segment_unknown, "somebody else's was taken away");
      uint64_t taken = 0;
      const auto state = segments.remove(base, owned, &taken);
      fails_every = 0;
      expect(state != ncclpy::segment_unknown && taken == number, "it was not there");
      there[slot] = false;
      expect(!held || state == ncclpy::segment_leaving, "it went while it was held");
      if (held) {
        free_some(segments);
        expect(segments.state(base, number) == ncclpy::segment_leaving, "it was freed while it was held");
        segments.let_go(base, number);
      }
      if (!owned && segments.state(base, number) == ncclpy::segment_gone) {
        expect(!is_registered(slot), "gone while registered");
        gone++;
      }
      if (random() % 2) free_some(segments);
    }
  }
  for (int slot = first; slot < end; ++slot) {
    if (there[slot]) segments.remove(base_of(slot), slot % 2);
  }
}

void communicate(ncclpy::Segments& segments, Communicator& communicator, int seed, std::atomic<bool>& enough) {
  std::mt19937 random(seed);
  int event;
  while (!enough) {
    std::lock_guard<std::mutex> hold(communicator.lock);
    ncclpy::CommSegments* member = communicator.member.get();
    if (member == nullptr) {
      auto made = std::make_unique<ncclpy::CommSegments>();
      made->registry = &segments;
      made->device = static_cast<int>(random() % devices);
      made->events[0] = made->events[1] = &event;
      fails_every = random() % 3 ? 0 : 1 + random() % 20;
      const bool joined = segments.join(made.get());
      fails_every = 0;
      if (joined) communicator.member = std::move(made);
      if (!joined) refused++;
      continue;
    }
    fails_every = 1;
    const unsigned move = random() % 40;
    if (move == 0) {  // a close; or an abort, which ends registrations too
      if (random() % 2) {
        segments.deregister_all(*member, &communicator);
      } else {
        for (auto& each : communicator.registered) each = 0;
      }
      segments.leave(member);
      communicator.member.reset();
    } else if (move < 3) {
      segments.note_capture_of_all(*member);
    } else if (move < 6) {
      member->lacks_event = 1;
    } else if (move < 25) {
      if (ncclpy_hook_is_wanted(member)) segments.register_new(*member, &communicator);
      member->has_event = 1;
      member->lacks_event = 0;
    } else {
      if (segments.can_leave(member)) segments.deregister_leaving(*member, &communicator);
    }
    fails_every = 0;
    if (move == 30) device_is_busy = !device_is_busy;
  }
}

void round_of(int seed) {
  ncclpy::Segments segments({add, drop, event_passed, destroy_event});
  const auto made = std::make_unique<Communicator[]>(communicators);
  all = made.get();
  std::atomic<bool> enough{false};
  std::vector<std::thread> busy, visitors;
  for (int i = 0; i < communicators; ++i) {
    busy.emplace_back([&, i] { communicate(segments, all[i], seed + 10 + i, enough); });
  }
  for (int i = 0; i < 2; ++i) {
    visitors.emplace_back([&, i] { bring_and_take(segments, seed + i, i * slots / 2, (i + 1) * slots / 2); });
  }
  visitors.emplace_back([&] {
    for (int i = 0; i < 600; ++i) {
      segments.counters();
      (void)segments.live(nullptr);
      free_some(segments);
    }
  });
  for (auto& thread : visitors) thread.join();
  enough = true;
  for (auto& thread : busy) thread.join();
  for (int i = 0; i < communicators; ++i) {
    Communicator& communicator = all[i];
    if (communicator.member == nullptr) continue;
    segments.deregister_all(*communicator.member, &communicator);
    segments.leave(communicator.member.get());
  }
  device_is_busy = false;
  free_some(segments);
  const auto counters = segments.counters();
  expect(!segments.has_leaving() && counters.segments == 0 && counters.leaving == 0, "something has stayed");
  expect(counters.registrations == 0, "registrations were not counted down");
  for (int slot = 0; slot < slots; ++slot) expect(!is_registered(slot), "a registration has no end");
}

// An abort need not wait for a thread in the middle of a registration or a deregistration.
ncclpy::Segments* aborted_in;
ncclpy::CommSegments* aborted;

void abort_inside() { aborted_in->leave(aborted); }
int add_and_abort(void*, void*, const ncclpy::Segment& segment, long long*) {
  if (segment.number == 2) abort_inside();
  return 0;
}
void drop_and_abort(void*, void*, long long) { abort_inside(); }

void abort_while_inside(int count) {
  ncclpy::Segments segments({add_and_abort, drop_and_abort, event_passed, destroy_event});
  auto made = std::make_unique<ncclpy::CommSegments>();
  made->registry = aborted_in = &segments, aborted = made.get();
  uintptr_t other;
  size_t other_bytes;
  for (int i = 0; i < count; ++i) segments.add(base_of(i), bytes, 0, false, &other, &other_bytes);
  expect(segments.join(aborted), "no space");
  segments.register_new(*aborted, nullptr);
  for (int i = 0; i < count; ++i) segments.remove(base_of(i), false);
  segments.deregister_leaving(*aborted, nullptr);
  const auto counters = segments.counters();
  expect(!segments.has_leaving() && counters.registrations == 0, "an aborted communicator has kept something");
}

// Several threads remove the segment at one address, where others are added: each segment is removed by one thread.
void take_away_at_once() {
  ncclpy::Segments segments({add, drop, event_passed, destroy_event});
  std::vector<uint64_t> taken[3];
  std::atomic<uint64_t> added{0};
  std::vector<std::thread> threads;
  for (auto& mine : taken) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20000; ++i) {
        uintptr_t other;
        size_t other_bytes;
        if (segments.add(base_of(0), bytes, 0, false, &other, &other_bytes) == ncclpy::segment_added) added++;
        uint64_t number = 0;
        if (segments.remove(base_of(0), false, &number) != ncclpy::segment_unknown) mine.push_back(number);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::set<uint64_t> all_taken;
  for (const auto& mine : taken) all_taken.insert(mine.begin(), mine.end());
  expect(all_taken.size() == added, "taken by two, or by none");
  expect(*all_taken.begin() == 1 && *all_taken.rbegin() == added, "another's number");
}

}  // namespace

int main(int, char** arguments) {
  const int seed = std::atoi(arguments[1]), rounds = std::atoi(arguments[2]);
  abort_while_inside(1);
  abort_while_inside(3);
  take_away_at_once();
  for (int i = 0; i < rounds; ++i) round_of(seed + 100 * i);
  expect(forgotten > rounds, "events are to be met");
  std::printf("%d gone, %d without memory\n", gone.load(), refused.load());
  return 0;
}
