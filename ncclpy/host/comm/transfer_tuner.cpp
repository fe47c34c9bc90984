// Chooses by the measured costs of both transports, which are tried in turn.
#include "transfer_tuner.hpp"

#include <algorithm>
#include <utility>

namespace ncclpy::host {
namespace {

// The number of collectives in one trial, by size class. The first collective finds the caches as the other transport
// left them and does not count; of the others one is enough for sizes beyond the caches (more than 2 MiB).
constexpr int trials_of(int size) { return size < 22 ? 3 : 2; }
// The least and most collectives for which the better transport is used before the other one is tried.
constexpr double fewest = 100, most = 3000;
// The most collectives for each of the first choices: few, since the first measurements may be those of page faults.
// at_first(0) collectives precede the first trial, which a program of a few operations should never reach.
int at_first(int choices) { return choices < 5 ? 8 << 2 * choices : int(most); }
// A transport that has become slower than the other one's last measurement by this factor is given up at once.
constexpr double max_slowdown = 1.25;

// The exponent of the smallest power of two that is at least `bytes`.
int size_class(size_t bytes) { return bytes < 2 ? 0 : 64 - __builtin_clzll(bytes - 1); }

}  // namespace

TransferTuner::Entry* TransferTuner::find(Collective kind, size_t bytes) {
  const int size = size_class(bytes);
  for (Entry& one : entries_) {
    if (one.kind == kind && one.size == size) return &one;
  }
  return nullptr;
}

void TransferTuner::Entry::choose_next() {
  const bool before = uses_cma;
  on_trial = !on_trial;
  if (on_trial) {
    uses_cma = !uses_cma;
    remaining = trials_of(size);
  } else if (costs[0] > 0 && costs[1] > 0) {
    uses_cma = costs[1] < costs[0];
    // After so many collectives a trial of the worse transport costs a fiftieth of the time.
    const double worth = 50 * trials_of(size) * (costs[!uses_cma] / costs[uses_cma] - 1);
    remaining = std::min(int(std::clamp(worth, fewest, most)), at_first(choices++));
  } else {  // at most one was measured
    uses_cma = costs[0] > 0 || costs[1] > 0 ? costs[1] > 0 : prefers;
    remaining = int(fewest);
  }
  settling = uses_cma != before;
}

bool TransferTuner::choose_cma(Collective kind, size_t bytes, bool prefers) {
  Entry* entry = find(kind, bytes);
  if (entry == nullptr) {
    entries_.push_back({kind, size_class(bytes), prefers, prefers, at_first(0)});
    entry = &entries_.back();
  }
  if (entry->remaining == 0) entry->choose_next();
  entry->remaining--;
  return entry->uses_cma;
}

void TransferTuner::record(Collective kind, size_t bytes, bool cma, double seconds) {
  Entry* entry = find(kind, bytes);
  if (entry == nullptr || entry->uses_cma != cma) return;  // the ranks could not use the choice
  // the first collective of the trial that counts
  const bool first = entry->on_trial && entry->remaining == trials_of(entry->size) - 2;
  if (std::exchange(entry->settling, false)) return;
  // A single slow collective, held up by another program for example, changes the cost little; several in a row change
  // it.
  double& cost = entry->costs[cma];
  const double now = seconds / double(bytes);
  if (cost == 0 || first || now < cost) cost = now;
  else if (!entry->on_trial) cost += (std::min(now, 2 * cost) - cost) / 8;
  if (!entry->on_trial && entry->costs[!cma] > 0 && cost > max_slowdown * entry->costs[!cma]) entry->remaining = 0;
}

}  // namespace ncclpy::host
