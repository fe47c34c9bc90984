#include "wait_control.hpp"

#include <algorithm>
#include <chrono>

namespace ncclpy::host {

thread_local WaitControl* WaitControl::current = nullptr;

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

WaitControl::WaitControl(double seconds)
    : tick_(nullptr), argument_(nullptr), outer_(current), due_(now() + seconds), expired_(seconds <= 0) {
  current = this;
}

double WaitControl::max_sleep() {
  // If the limit has passed and the thread still waits, it cannot leave because other ranks count on it; such a wait
  // ends soon, so it needs no limit.
  return current == nullptr || current->expired_ ? -1 : std::clamp(current->due_ - now(), 0.0, 1.0);
}

bool WaitControl::has_time_limit() { return current != nullptr && current->tick_ == nullptr; }
bool WaitControl::must_leave() { return current != nullptr && current->expired_; }

void WaitControl::poll() {
  if (current == nullptr || now() < current->due_) return;
  WaitControl* const mine = current;
  if (mine->tick_ == nullptr) {
    mine->expired_ = true;
    return;
  }
  current = nullptr;  // the callback may wait, and must not be called again from that wait
  const double seconds = mine->tick_(mine->argument_);
  // Negative: the wait should end. The wait ends once the awaited tasks have ended; until then the callback is called
  // every 50 ms.
  mine->due_ = now() + (seconds < 0 ? 0.05 : seconds);
  current = mine;
}

}  // namespace ncclpy::host
