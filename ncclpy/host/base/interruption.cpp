#include "interruption.hpp"

#include <algorithm>
#include <chrono>

namespace ncclpy::host {

thread_local Interruption* Interruption::current = nullptr;

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Interruption::Interruption(double seconds)
    : tick_(nullptr), argument_(nullptr), outer_(current), due_(now() + seconds), over_(seconds <= 0) {
  current = this;
}

double Interruption::patience() {
  // Its time may be over where it could not leave, as the others count on it: so what it waits for ends soon.
  return current == nullptr || current->over_ ? -1 : std::clamp(current->due_ - now(), 0.0, 1.0);
}

bool Interruption::has_time() { return current != nullptr && current->tick_ == nullptr; }
bool Interruption::wants_out() { return current != nullptr && current->over_; }

void Interruption::attend() {
  if (current == nullptr || now() < current->due_) return;
  Interruption* const mine = current;
  if (mine->tick_ == nullptr) {
    mine->over_ = true;
    return;
  }
  current = nullptr;  // what is called may wait itself, and must not be called again by that
  const double seconds = mine->tick_(mine->argument_);
  mine->due_ = now() + (seconds < 0 ? 0.05 : seconds);  // negative: to be left; what runs here has to end first
  current = mine;
}

}  // namespace ncclpy::host
