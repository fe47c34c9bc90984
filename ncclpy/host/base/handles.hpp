// Checked handles: a table from the opaque values that callers hold to the objects behind them.
//
// A handle holds an index and a generation, never an address. So a handle that was destroyed, that belongs to another
// library or that was never made is recognised, where a pointer would make the program crash. A look-up locks only the
// slot.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "mutex.hpp"

namespace ncclpy::host {

template <class Object>
class HandleTable {
 public:
  // `tag` (1 to 127) is the highest byte of every handle, so that a handle of one kind is not mistaken for one of
  // another kind.
  explicit HandleTable(std::uint8_t tag) : tag_(tag) {}

  std::uint64_t add(std::shared_ptr<Object> object) {
    const std::uint32_t index = take_index();
    Slot& slot = chunks_[index / chunk_size].load(std::memory_order_acquire)[index % chunk_size];
    std::lock_guard lock(slot.mutex);
    slot.object = std::move(object);
    return std::uint64_t{tag_} << 56 | slot.generation << index_bits | index;
  }

  // Returns nullptr if there is no such object.
  std::shared_ptr<Object> find(std::uint64_t handle) {
    Slot* slot = slot_of(handle);
    if (slot == nullptr) return nullptr;
    std::lock_guard lock(slot->mutex);
    return slot->generation == generation_of(handle) ? slot->object : nullptr;
  }

  // All objects that have a handle.
  std::vector<std::shared_ptr<Object>> objects() {
    std::uint32_t used;
    {
      std::lock_guard lock(mutex_);
      used = used_;
    }
    std::vector<std::shared_ptr<Object>> found;
    for (std::uint32_t index = 0; index < used; index++) {
      Slot& slot = chunks_[index / chunk_size].load(std::memory_order_acquire)[index % chunk_size];
      std::lock_guard lock(slot.mutex);
      if (slot.object != nullptr) found.push_back(slot.object);
    }
    return found;
  }

  // Finds the object and invalidates the handle. Returns nullptr if there is no such object.
  std::shared_ptr<Object> remove(std::uint64_t handle) {
    Slot* slot = slot_of(handle);
    if (slot == nullptr) return nullptr;
    std::shared_ptr<Object> object;
    {
      std::lock_guard lock(slot->mutex);
      if (slot->generation != generation_of(handle) || slot->object == nullptr) return nullptr;
      object = std::move(slot->object);
      slot->object = nullptr;
      slot->generation = (slot->generation + 1) & generations;
    }
    std::lock_guard lock(mutex_);
    free_.push_back(static_cast<std::uint32_t>(handle & (chunk_size * chunk_count - 1)));
    return object;
  }

 private:
  static constexpr int index_bits = 20;
  static constexpr std::uint32_t chunk_size = 1024, chunk_count = 1024;
  static constexpr std::uint64_t generations = (std::uint64_t{1} << (56 - index_bits)) - 1;

  struct Slot {
    SpinMutex<NCCLPY_LOCK_HANDLES> mutex;
    std::uint64_t generation = 0;
    std::shared_ptr<Object> object;
  };

  static std::uint64_t generation_of(std::uint64_t handle) { return handle >> index_bits & generations; }

  Slot* slot_of(std::uint64_t handle) {
    if (handle >> 56 != tag_) return nullptr;
    const std::uint32_t index = handle & (chunk_size * chunk_count - 1);
    Slot* chunk = chunks_[index / chunk_size].load(std::memory_order_acquire);
    return chunk == nullptr ? nullptr : chunk + index % chunk_size;
  }

  std::uint32_t take_index() {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const std::uint32_t index = free_.back();
      free_.pop_back();
      return index;
    }
    if (used_ == chunk_size * chunk_count) throw std::bad_alloc();
    if (used_ % chunk_size == 0) {
      free_.reserve(used_ + chunk_size);  // remove() never has to allocate
      chunks_[used_ / chunk_size].store(new Slot[chunk_size], std::memory_order_release);
    }
    return used_++;
  }

  const std::uint8_t tag_;
  std::atomic<Slot*> chunks_[chunk_count] = {};
  Mutex<NCCLPY_LOCK_HANDLES> mutex_;  // guards free_ and used_
  std::vector<std::uint32_t> free_;
  std::uint32_t used_ = 0;
};

}  // namespace ncclpy::host
