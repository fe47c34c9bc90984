// Trying, and remembering.
#include "ways.hpp"

#include <algorithm>
#include <utility>

namespace ncclpy::host {
namespace {

// How often in a row a way is tried. The first one finds caches as the other way has left them, and does not count.
constexpr int tries = 3;
// So often in a row the better way is taken, at least and at most, before the other one is tried.
constexpr double fewest = 100, most = 3000;
// A way that has become so much worse than the other one was is not taken to the end of its row.
constexpr double too_bad = 1.25;

int size_class(size_t bytes) { return bytes < 2 ? 0 : 64 - __builtin_clzll(bytes - 1); }

}  // namespace

Ways::Known* Ways::find(Collective kind, size_t bytes) {
  const int size = size_class(bytes);
  for (Known& one : known_) {
    if (one.kind == kind && one.size == size) return &one;
  }
  return nullptr;
}

void Ways::Known::go_on() {
  const bool before = way, both_known = seconds[0] > 0 && seconds[1] > 0;
  trying = !(trying && both_known);
  if (trying) {
    way = !way;
    left = tries;
  } else {
    way = seconds[1] < seconds[0];
    const double loss = seconds[!way] / seconds[way] - 1;
    left = int(std::clamp(50 * tries * loss, fewest, most));
  }
  settling = way != before;
}

bool Ways::pulls(Collective kind, size_t bytes, bool prefers) {
  Known* known = find(kind, bytes);
  if (known == nullptr) {
    known_.push_back({kind, size_class(bytes), prefers, tries, true});
    known = &known_.back();
  }
  if (known->left == 0) known->go_on();
  known->left--;
  return known->way;
}

void Ways::took(Collective kind, size_t bytes, bool pulled, double seconds) {
  Known* known = find(kind, bytes);
  if (known == nullptr || known->way != pulled) return;  // it could not be as was wanted
  if (std::exchange(known->settling, false)) return;
  // One that was held up, by another program say, counts for little; several in a row do not.
  double& mean = known->seconds[pulled];
  mean = mean == 0 ? seconds : (mean + std::min(seconds, 2 * mean)) / 2;
  if (!known->trying && mean > too_bad * known->seconds[!pulled]) known->left = 0;
}

}  // namespace ncclpy::host
