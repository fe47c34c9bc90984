// An element of a stream's queue: a move-only function without arguments. Small functions are stored in place, so that
// queueing a copy, an event or a callback allocates nothing; unlike std::function, a task may own what cannot be
// copied.
//
// If a task's function returns false, a thread with a time limit (WaitControl) has suspended the task, which must be
// called again. Such a thread runs interruptible tasks only.
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
        if (action == Action::call) return run(*held);
        if (action == Action::move) new (target) Function(std::move(*held));
        held->~Function();
        return true;
      };
    } else {
      new (storage_) Function*(new Function(std::forward<F>(function)));
      act_ = [](Action action, void* self, void* target) {
        Function* held = *std::launder(static_cast<Function**>(self));
        if (action == Action::call) return run(*held);
        if (action == Action::move) new (target) Function*(held);
        if (action == Action::destroy) delete held;
        return true;
      };
    }
  }
  // A task that waits for nothing, or that can be suspended while it waits.
  template <class F>
  static Task interruptible(F&& function) {
    Task task(std::forward<F>(function));
    task.interruptible_ = true;
    return task;
  }
  Task(Task&& other) noexcept : act_(std::exchange(other.act_, nullptr)), interruptible_(other.interruptible_) {
    if (act_ != nullptr) act_(Action::move, other.storage_, storage_);
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  Task& operator=(Task&&) = delete;
  ~Task() { clear(); }
  // Destroys the function. The task must not be called afterwards.
  void clear() {
    if (act_ != nullptr) std::exchange(act_, nullptr)(Action::destroy, storage_, nullptr);
  }

  bool operator()() { return act_(Action::call, storage_, nullptr); }
  bool is_interruptible() const { return interruptible_; }

 private:
  template <class Function>
  static bool run(Function& function) {
    if constexpr (std::is_same_v<decltype(function()), bool>) {
      return function();
    } else {
      function();
      return true;
    }
  }

  enum class Action { call, move, destroy };  // move destroys the source
  static constexpr std::size_t in_place_bytes = 56;

  alignas(std::max_align_t) unsigned char storage_[in_place_bytes];
  bool (*act_)(Action, void* self, void* target);
  bool interruptible_ = false;
};

}  // namespace ncclpy::host
