// Trying, and remembering.
#include "ways.hpp"

#include <algorithm>
#include <utility>

namespace ncclpy::host {
namespace {

// How often in a row a way is tried. The first one finds caches as the other way has left them, and does not count. What is so
// much that caches do not matter is known at the second time.
constexpr int tries_of(int size) { return size < 22 ? 3 : 2; }
// So often in a row the better way is taken, at least and at most, before the other one is tried.
constexpr double fewest = 100, most = 3000;
// At first less often: what has been learnt then may be what it takes to find pages. And before the first try: a program of a
// few operations is to lose nothing by it.
int at_first(int rows) { return rows < 5 ? 8 << 2 * rows : int(most); }
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
  const bool before = way;
  trying = !trying;
  if (trying) {
    way = !way;
    left = tries_of(size);
  } else if (costs[0] > 0 && costs[1] > 0) {
    way = costs[1] < costs[0];
    const double worth = 50 * tries_of(size) * (costs[!way] / costs[way] - 1);
    left = std::min(int(std::clamp(worth, fewest, most)), at_first(rows++));
  } else {  // none could be measured to the end, or one alone
    way = costs[0] > 0 || costs[1] > 0 ? costs[1] > 0 : prefers;
    left = int(fewest);
  }
  settling = way != before;
}

bool Ways::pulls(Collective kind, size_t bytes, bool prefers) {
  Known* known = find(kind, bytes);
  if (known == nullptr) {
    known_.push_back({kind, size_class(bytes), prefers, prefers, at_first(0)});
    known = &known_.back();
  }
  if (known->left == 0) known->go_on();
  known->left--;
  return known->way;
}

void Ways::took(Collective kind, size_t bytes, bool pulled, double seconds) {
  Known* known = find(kind, bytes);
  if (known == nullptr || known->way != pulled) return;  // it could not be as was wanted
  const bool first = known->trying && known->left == tries_of(known->size) - 2;  // that counts, of those that try
  if (std::exchange(known->settling, false)) return;
  // One that was held up, by another program say, counts for little; several in a row do not.
  double& cost = known->costs[pulled];
  const double now = seconds / double(bytes);
  if (cost == 0 || first || now < cost) cost = now;
  else if (!known->trying) cost += (std::min(now, 2 * cost) - cost) / 8;
  if (!known->trying && known->costs[!pulled] > 0 && cost > too_bad * known->costs[!pulled]) known->left = 0;
}

}  // namespace ncclpy::host
