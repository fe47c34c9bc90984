// Segments: memory that is registered on each communicator of its device, and how a segment is taken away again.
//
// Allocators add and remove segments, perhaps without the GIL, and under a lock of their own. A thread that is in a
// call on a communicator may be waiting for this lock, so nothing here waits for a communicator. A new segment is put
// into the list of each communicator of its device, and registered by that communicator's next call. A segment that was
// removed is `leaving` until all communicators have deregistered it: any thread that can take a communicator's lock
// does that, once the operations issued until then are done. The mutex here is held only briefly, and never over a
// call of NCCL.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include "ncclpy/memory/comm_segments.hpp"
#include "ordered_mutex.h"

namespace ncclpy {

class Segments {
 public:
  explicit Segments(const SegmentCalls& calls) : calls_(calls) { ncclpy_mutex_init(&mutex_, NCCLPY_LOCK_SEGMENTS); }

  // Adds a segment. On an overlap the other segment's address and size go to `other`.
  SegmentAdded add(uintptr_t base, size_t bytes, int device, bool owned, uintptr_t* other, size_t* other_bytes,
                   uint64_t pool = 0) noexcept {
    const Hold hold(mutex_);
    try {
      auto next = by_base_.lower_bound(base);
      const Segment* found = nullptr;
      if (next != by_base_.end() && next->first - base < bytes) found = next->second.get();
      if (next != by_base_.begin() && found == nullptr) {
        const Segment& before = *std::prev(next)->second;
        if (base - before.base < before.bytes) found = &before;
      }
      if (found != nullptr) {
        *other = found->base;
        *other_bytes = found->bytes;
        return segment_overlaps;
      }
      if (owned) to_free_.reserve(grown_capacity(to_free_, by_base_.size() + 1));
      auto segment = std::make_shared<Segment>(Segment{base, bytes, device, owned, pool});
      segment->number = ++numbers_;
      by_base_.emplace(base, segment);
      try {
        for (CommSegments* member : members_) {
          if (member->device == device) add_pending(*member, segment);
        }
      } catch (...) {
        for (CommSegments* member : members_) remove_pending(*member, segment->number);
        by_base_.erase(base);
        throw;
      }
      return segment_added;
    } catch (...) {
      return segment_no_memory;
    }
  }

  // Begins to take a segment away; `owned` says whether ncclpy frees it. The segment is gone at once if no operation
  // can have used it. segment_unknown if no such segment begins at `base`, or it is leaving already. To learn later
  // whether the segment is gone, pass its number to state(): another segment may begin at its address by then.
  SegmentState remove(uintptr_t base, bool owned, uint64_t* number = nullptr) noexcept {
    const Hold hold(mutex_);
    const auto found = by_base_.find(base);
    if (found == by_base_.end() || found->second->leaving || found->second->owned != owned) {
      return segment_unknown;
    }
    if (number != nullptr) *number = found->second->number;
    return begin_leaving(found);
  }

  // As remove(), for an allocator that is about to free memory of its own: operations that were issued may still use
  // the segment, but no graph that uses it is launched again. Returns the segment's number, even if it is leaving
  // already; 0 if it is gone, or unknown, or ncclpy's own.
  uint64_t give_back(uintptr_t base) noexcept {
    const Hold hold(mutex_);
    const auto found = by_base_.find(base);
    if (found == by_base_.end() || found->second->owned) return 0;
    const uint64_t number = found->second->number;
    found->second->given_back = true;
    if (found->second->leaving) return number;
    return begin_leaving(found) == segment_gone ? 0 : number;
  }

  // Whether the range is exactly a segment that is not leaving, or lies within such a segment of ncclpy's own.
  bool has(uintptr_t base, size_t bytes, int device) noexcept {
    const Hold hold(mutex_);
    auto next = by_base_.upper_bound(base);
    if (next == by_base_.begin()) return false;
    const Segment& one = *std::prev(next)->second;
    if (one.leaving || one.device != device) return false;
    return one.owned ? base - one.base + bytes <= one.bytes : one.base == base && one.bytes == bytes;
  }

  // Lists the communicators that may use a segment, each with a new reference, which free_member() drops. False if
  // memory is out.
  bool holders(uint64_t number, std::vector<CommSegments*>* found) noexcept {
    const Hold hold(mutex_);
    found->clear();
    try {
      found->reserve(members_.size());
    } catch (...) {
      return false;
    }
    for (CommSegments* member : members_) {
      const auto entry = member->entries.find(number);
      if (entry == member->entries.end() || entry->second.state == CommSegments::pending) continue;
      ++member->references;
      found->push_back(member);
    }
    return true;
  }

  // Deregisters a segment at a communicator that was dropped without close, if the communicator's operations are done.
  // No thread calls such a communicator or takes its lock any more, but NCCL's communicator was not destroyed.
  void deregister_dropped(CommSegments& member, uint64_t number) noexcept {
    if (member.lacks_event || !calls_.event_passed(member.events[0]) || !calls_.event_passed(member.events[1])) return;
    if (member.dropped_lock.test_and_set()) return;
    {
      const Hold hold(mutex_);
      for (auto* list : {&member.to_leave, &member.fenced}) {
        list->erase(std::remove(list->begin(), list->end(), number), list->end());
      }
    }
    deregister(member, member.comm, number);
    member.dropped_lock.clear();
  }

  // Makes a window a holder of an owned segment, as communicators are, until let_go(); false if the segment is leaving
  // or gone.
  bool hold(uintptr_t base, uint64_t number) noexcept {
    const Hold hold(mutex_);
    const auto found = by_base_.find(base);
    if (found == by_base_.end() || found->second->number != number || found->second->leaving) return false;
    ++found->second->holders;
    return true;
  }
  void let_go(uintptr_t base, uint64_t number) noexcept {
    const Hold hold(mutex_);
    const auto found = by_base_.find(base);
    if (found != by_base_.end() && found->second->number == number) drop_holder(*found->second);
  }

  // Makes an event a holder of an owned segment until the device has passed the event; query_awaited() finds that out,
  // and destroys the event. Called right before remove(). False if memory is out, or if no owned segment that is not
  // leaving begins at `base`.
  bool hold_until(uintptr_t base, void* event) noexcept {
    const Hold hold(mutex_);
    const auto found = by_base_.find(base);
    if (found == by_base_.end() || found->second->leaving || !found->second->owned) return false;
    try {
      awaited_.push_back({found->second, event});
    } catch (...) {
      return false;
    }
    ++found->second->holders;
    return true;
  }

  // Checks the events of hold_until(), without the mutex, since a call of the driver may block.
  void query_awaited() noexcept {
    std::list<Awaited> asked, over;
    {
      const Hold hold(mutex_);
      asked.swap(awaited_);
    }
    for (auto one = asked.begin(); one != asked.end();) {
      const auto next = std::next(one);
      if (calls_.event_passed(one->event)) over.splice(over.end(), asked, one);
      one = next;
    }
    {
      const Hold hold(mutex_);
      awaited_.splice(awaited_.end(), asked);
      for (const Awaited& one : over) drop_holder(*one.segment);
    }
    for (const Awaited& one : over) calls_.destroy_event(one.event);
  }

  // Destroys a communicator's events; called when `references` is 0, as a thread with a reference may query them.
  void forget_events(CommSegments& member) noexcept {
    for (void*& event : member.events) {
      if (event != nullptr) calls_.destroy_event(event);
      event = nullptr;
    }
  }

  // Whether a segment is leaving or gone; segment_unknown if it was not taken away.
  SegmentState state(uintptr_t base, uint64_t number) noexcept {
    const Hold hold(mutex_);
    const auto found = by_base_.find(base);
    if (found == by_base_.end() || found->second->number != number) return segment_gone;
    return found->second->leaving ? segment_leaving : segment_unknown;
  }

  // A communicator joins: present segments are put into its list, later ones will be. False if memory is out.
  bool join(CommSegments* member) noexcept {
    const Hold hold(mutex_);
    try {
      members_.push_back(member);
      for (const auto& [base, segment] : by_base_) {
        if (segment->device == member->device && !segment->leaving) add_pending(*member, segment);
      }
      return true;
    } catch (...) {
      if (!members_.empty() && members_.back() == member) members_.pop_back();
      member->entries.clear();
      member->to_register.clear();
      return false;
    }
  }

  // A communicator has ended, by a close or an abort, and with it all its operations and registrations.
  void leave(CommSegments* member) noexcept {
    const Hold hold(mutex_);
    const auto found = std::find(members_.begin(), members_.end(), member);
    if (found == members_.end()) return;
    members_.erase(found);
    for (auto& [number, entry] : member->entries) {
      if (entry.state == CommSegments::held) --registrations_;
      if (entry.state != CommSegments::pending) drop_holder(*entry.segment);
    }
    // A thread may still be in register_new() or deregister(), if the abort has not made its call of NCCL return yet:
    // it finds the lists empty, and returns.
    member->entries.clear();
    member->to_register.clear();
    member->to_leave.clear();
    member->fenced.clear();
    ncclpy_hook_set_wanted(member, 0);
  }

  // Registers new segments before the communicator's next call. This function and the next three are called under the
  // communicator's lock.
  void register_new(CommSegments& member, void* comm) noexcept {
    ncclpy_hook_set_wanted(&member, 0);
    while (register_one(member, comm)) {
    }
  }

  // Notes that a call was captured; its graph may use all present segments.
  void note_capture_of_all(CommSegments& member) noexcept {
    const Hold hold(mutex_);
    member.captured_to = numbers_;
  }

  // Deregisters segments that are to leave and are not used any more.
  void deregister_leaving(CommSegments& member, void* comm) noexcept {
    // With `lacks_event`, NCCL may still work in the background for a call that has returned.
    while (!member.lacks_event && begin_fence(member)) {
      if (member.fence >= 0 && !calls_.event_passed(member.events[member.fence])) return;
      member.fence = -1;
      uint64_t number;
      while (take_fenced(member, &number)) deregister(member, comm, number);
    }
  }

  // Deregisters everything: the communicator is about to be destroyed, and none of its operations is running.
  void deregister_all(CommSegments& member, void* comm) noexcept {
    while (true) {
      uint64_t number;
      {
        const Hold hold(mutex_);
        while (!member.entries.empty() && member.entries.begin()->second.state == CommSegments::pending) {
          remove_pending(member, member.entries.begin()->first);
        }
        if (member.entries.empty()) return;
        number = member.entries.begin()->first;
      }
      deregister(member, comm, number);
    }
  }

  // Takes out an owned segment without holders, for the caller to free; false if there is none.
  bool next_to_free(uintptr_t* base, int* device) noexcept {
    const Hold hold(mutex_);
    if (to_free_.empty()) return false;
    const std::shared_ptr<Segment> segment = to_free_.back();
    to_free_.pop_back();
    by_base_.erase(segment->base);
    *base = segment->base;
    *device = segment->device;
    return true;
  }

  // Whether a segment can leave this communicator once the communicator's issued operations are done.
  bool can_leave(const CommSegments* member) noexcept {
    const Hold hold(mutex_);
    return !member->fenced.empty() || std::any_of(member->to_leave.begin(), member->to_leave.end(),
                                                    [=](uint64_t number) { return !is_kept(*member, number); });
  }
  // Whether any segment is leaving.
  bool has_leaving() noexcept {
    const Hold hold(mutex_);
    return leaving_ != 0;
  }

  // Counts a segment from next_to_free() as gone; `succeeded` says whether it was freed, or is lost.
  void freed(bool succeeded) noexcept {
    const Hold hold(mutex_);
    --leaving_;
    if (!succeeded) ++lost_;
  }

  SegmentCounters counters() noexcept {
    const Hold hold(mutex_);
    SegmentCounters all = {0, 0, 0, 0, registrations_, added_, dropped_, lost_, {}};
    std::copy(std::begin(refused_), std::end(refused_), all.refused);
    for (const auto& [base, segment] : by_base_) {
      ++(segment->leaving ? all.leaving : all.segments);
      (segment->leaving ? all.leaving_bytes : all.bytes) += segment->bytes;
    }
    return all;
  }

  // Live segments of a pool, in order of addition.
  std::vector<Segment> of_pool(uint64_t pool) {
    const Hold hold(mutex_);
    std::vector<Segment> found;
    for (const auto& [base, segment] : by_base_) {
      if (segment->pool == pool && !segment->leaving) found.push_back(*segment);
    }
    std::sort(found.begin(), found.end(), [](const Segment& a, const Segment& b) { return a.number < b.number; });
    return found;
  }

  // Live segments; with `member`, those that its communicator has registered.
  std::vector<Segment> live(const CommSegments* member) {
    const Hold hold(mutex_);
    std::vector<Segment> found;
    for (const auto& [base, segment] : by_base_) {
      if (segment->leaving) continue;
      if (member != nullptr) {
        const auto entry = member->entries.find(segment->number);
        if (entry == member->entries.end() || entry->second.state != CommSegments::held) continue;
      }
      found.push_back(*segment);
    }
    return found;
  }

 private:
  struct Awaited {
    std::shared_ptr<Segment> segment;
    void* event;
  };

  class Hold {
   public:
    explicit Hold(ncclpy_mutex& mutex) : mutex_(mutex) { ncclpy_mutex_lock(&mutex_); }
    ~Hold() { ncclpy_mutex_unlock(&mutex_); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    ncclpy_mutex& mutex_;
  };

  void add_pending(CommSegments& member, const std::shared_ptr<Segment>& segment) {
    // Reserves space in both lists for all segments of the communicator, so that leaving needs no memory.
    const size_t space = member.entries.size() + 1;
    member.to_leave.reserve(grown_capacity(member.to_leave, space));
    member.fenced.reserve(grown_capacity(member.fenced, space));
    member.entries.emplace(segment->number, CommSegments::Entry{segment, CommSegments::pending, 0});
    member.to_register.insert(segment->number);
    ncclpy_hook_set_wanted(&member, 1);
  }

  template <class Item>
  static size_t grown_capacity(const std::vector<Item>& list, size_t space) {
    return space <= list.capacity() ? list.capacity() : std::max(space, 2 * list.capacity());
  }

  // Removes a pending entry.
  void remove_pending(CommSegments& member, uint64_t number) noexcept {
    member.to_register.erase(number);
    member.entries.erase(number);
  }

  // Whether a graph that may be launched again may use the segment.
  static bool is_kept(const CommSegments& member, uint64_t number) noexcept {
    if (number > member.captured_to) return false;
    const auto found = member.entries.find(number);
    return found != member.entries.end() && !found->second.segment->given_back;
  }

  SegmentState begin_leaving(std::map<uintptr_t, std::shared_ptr<Segment>>::iterator found) noexcept {
    const std::shared_ptr<Segment> segment = found->second;
    segment->leaving = true;
    ++leaving_;
    for (CommSegments* member : members_) {
      const auto entry = member->entries.find(segment->number);
      if (entry == member->entries.end()) continue;
      if (entry->second.state == CommSegments::pending) {
        remove_pending(*member, segment->number);
      } else if (entry->second.state != CommSegments::registering) {  // else register_one() adds it
        member->to_leave.push_back(segment->number);  // there is space: see add_pending()
      }
    }
    return segment->holders == 0 ? finish_leaving(found) : segment_leaving;
  }

  void drop_holder(Segment& segment) noexcept {
    if (--segment.holders == 0 && segment.leaving) finish_leaving(by_base_.find(segment.base));
  }

  SegmentState finish_leaving(std::map<uintptr_t, std::shared_ptr<Segment>>::iterator found) noexcept {
    if (!found->second->owned) {
      by_base_.erase(found);
      --leaving_;
      return segment_gone;
    }
    to_free_.push_back(found->second);  // its address stays in use until it is freed; there is space: see add()
    return segment_gone;
  }

  // Registers one segment. False if there was nothing to register, or the communicator was aborted meanwhile.
  bool register_one(CommSegments& member, void* comm) noexcept {
    std::shared_ptr<Segment> segment;
    uint64_t number;
    {
      const Hold hold(mutex_);
      if (member.to_register.empty()) return false;
      number = *member.to_register.begin();
      member.to_register.erase(member.to_register.begin());
      CommSegments::Entry& entry = member.entries.find(number)->second;
      entry.state = CommSegments::registering;
      segment = entry.segment;
      ++segment->holders;
    }
    long long range = 0;
    const int result = calls_.add(member.ranges, comm, *segment, &range);
    const Hold hold(mutex_);
    const auto found = member.entries.find(number);
    if (found == member.entries.end()) return false;  // aborted meanwhile
    CommSegments::Entry& entry = found->second;
    entry.range = range;
    // Calls may use a segment even if NCCL has refused to register it, so the communicator is a holder of it.
    entry.state = result == 0 ? CommSegments::held : CommSegments::refused;
    if (result == 0) {
      ++added_, ++registrations_;
    } else if (result > 0 && result < segment_refusals) {
      ++refused_[result];
    } else {
      ++refused_[0];
    }
    if (segment->leaving) member.to_leave.push_back(number);
    return true;
  }

  // Moves segments that can leave to `fenced`: they are deregistered when the device has passed the fence, an event
  // behind the issued operations. False if there are none.
  bool begin_fence(CommSegments& member) noexcept {
    const Hold hold(mutex_);
    if (!member.fenced.empty()) return true;
    // A segment that graphs may use stays as long as the communicator, unless its allocator has given it back.
    auto& list = member.to_leave;
    const auto first =
        std::partition(list.begin(), list.end(), [&](uint64_t number) { return is_kept(member, number); });
    member.fenced.insert(member.fenced.end(), first, list.end());
    list.erase(first, list.end());
    if (!member.fenced.empty() && member.has_event) {  // else nothing was issued since the last fence was passed
      member.fence = member.current;
      member.current ^= 1;
      member.has_event = 0;
    }
    return !member.fenced.empty();
  }

  // Takes one segment at a time: the list may be reallocated meanwhile, when a new segment needs space in it.
  bool take_fenced(CommSegments& member, uint64_t* number) noexcept {
    const Hold hold(mutex_);
    if (member.fenced.empty()) return false;
    *number = member.fenced.back();
    member.fenced.pop_back();
    return true;
  }

  void deregister(CommSegments& member, void* comm, uint64_t number) noexcept {
    long long range;
    bool held;
    {
      const Hold hold(mutex_);
      const auto found = member.entries.find(number);
      if (found == member.entries.end()) return;
      range = found->second.range;
      held = found->second.state == CommSegments::held;
    }
    if (held) calls_.drop(member.ranges, comm, range);
    const Hold hold(mutex_);
    const auto found = member.entries.find(number);
    if (found == member.entries.end()) return;  // aborted meanwhile
    const std::shared_ptr<Segment> segment = found->second.segment;
    if (held) --registrations_, ++dropped_;
    member.entries.erase(found);
    drop_holder(*segment);
  }

  const SegmentCalls calls_;
  ncclpy_mutex mutex_;
  std::map<uintptr_t, std::shared_ptr<Segment>> by_base_;
  std::vector<CommSegments*> members_;
  std::vector<std::shared_ptr<Segment>> to_free_;
  std::list<Awaited> awaited_;
  uint64_t numbers_ = 0;
  size_t registrations_ = 0;
  size_t leaving_ = 0;
  uint64_t added_ = 0, dropped_ = 0, lost_ = 0;
  uint64_t refused_[segment_refusals] = {};
};

// Makes a communicator's part, which has yet to join; NULL if memory is out.
inline CommSegments* new_member(Segments* registry, void* ranges, int device) {
  auto* member = new (std::nothrow) CommSegments{};
  if (member == nullptr) return nullptr;
  member->registry = registry;
  member->ranges = ranges;
  member->device = device;
  member->run = [](ncclpy_precall_hook* precall_hook, void* comm) {
    auto* one = static_cast<CommSegments*>(precall_hook);
    one->registry->register_new(*one, comm);
  };
  member->note_capture = [](ncclpy_precall_hook* precall_hook) {
    auto* one = static_cast<CommSegments*>(precall_hook);
    one->registry->note_capture_of_all(*one);
  };
  member->note_ended = [](ncclpy_precall_hook* precall_hook) {
    auto* one = static_cast<CommSegments*>(precall_hook);
    one->registry->leave(one);
  };
  return member;
}

// Drops one reference to a communicator's part, and frees the part with the last one.
inline void free_member(CommSegments* member) {
  if (--member->references != 0) return;
  member->registry->forget_events(*member);
  ncclpy_weak_handle_free(member->weak);
  delete member;
}

}  // namespace ncclpy
