// A move-only function without arguments: what a stream queues. Small ones are stored in place, so that queueing a
// copy, an event or a callback allocates nothing; unlike std::function it may own what cannot be copied.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace ncclpy::host {

class Task {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, Task>>>
  Task(F&& function) {
    using Function = std::decay_t<F>;
    if constexpr (sizeof(Function) <= in_place_bytes && alignof(Function) <= alignof(std::max_align_t) &&
                  std::is_nothrow_move_constructible_v<Function>) {
      new (storage_) Function(std::forward<F>(function));
      act_ = [](Action action, void* self, void* target) {
        Function* held = std::launder(static_cast<Function*>(self));
        if (action == Action::call) (*held)();
        if (action == Action::move) new (target) Function(std::move(*held));
        if (action != Action::call) held->~Function();
      };
    } else {
      new (storage_) Function*(new Function(std::forward<F>(function)));
      act_ = [](Action action, void* self, void* target) {
        Function* held = *std::launder(static_cast<Function**>(self));
        if (action == Action::call) (*held)();
        if (action == Action::move) new (target) Function*(held);
        if (action == Action::destroy) delete held;
      };
    }
  }
  Task(Task&& other) noexcept : act_(std::exchange(other.act_, nullptr)) {
    if (act_ != nullptr) act_(Action::move, other.storage_, storage_);
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  Task& operator=(Task&&) = delete;
  ~Task() {
    if (act_ != nullptr) act_(Action::destroy, storage_, nullptr);
  }

  void operator()() { act_(Action::call, storage_, nullptr); }

 private:
  enum class Action { call, move, destroy };  // move leaves nothing behind
  static constexpr std::size_t in_place_bytes = 56;

  alignas(std::max_align_t) unsigned char storage_[in_place_bytes];
  void (*act_)(Action, void* self, void* target);
};

}  // namespace ncclpy::host
