// One thread begins and ends operations, as threads with the GIL do; others read the operations under way. Whatever
// they read belongs together, and never goes back.
//
//   oplog_stress SEED ROUNDS
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "engine/oplog.h"

namespace {

constexpr int reader_count = 2;
constexpr int operation_count = 2000;

[[noreturn]] void fail(const char* what, uint64_t number) {
  std::fprintf(stderr, "%s: %llu\n", what, static_cast<unsigned long long>(number));
  std::_Exit(1);
}

ncclpy_op operation(uint64_t number, int pair) {
  return {number, 3 * number, ncclpy_bits_of(static_cast<double>(number)), 0, number ^ 0x5555, 2 * number + pair};
}

void check(const ncclpy_op& found, bool done) {
  const uint64_t number = found.sequence;
  if (found.count != 3 * number || (found.call & ~NCCLPY_BLOCKED_ON_INPUT) != (number ^ 0x5555) ||
      found.op_and_root / 2 != number || ncclpy_moment_of(found.began) != static_cast<double>(number)) {
    fail("it is torn", number);
  }
  if (done && ncclpy_moment_of(found.done) != static_cast<double>(number) + 0.5) fail("its end is torn", number);
}

}  // namespace

int main(int, char** argv) {
  std::mt19937 random(static_cast<unsigned>(std::atoi(argv[1])));
  std::atomic<long> reads{0}, waits{0};
  for (int round = 0; round < std::atoi(argv[2]); round++) {
    ncclpy_oplog* oplog = ncclpy_oplog_new();
    std::atomic<bool> over{false};
    std::vector<std::thread> others;
    for (int i = 0; i < reader_count; i++) {
      others.emplace_back([&] {
        uint64_t current = 0, finished = 0;
        while (!over) {
          ncclpy_status found;
          if (!ncclpy_oplog_read(oplog, &found)) {
            waits++;
            continue;
          }
          reads++;
          if (found.has_current) {
            check(found.current, false);
            // Pairs are reported only while there is no collective.
            if (found.current.op_and_root % 2 == 0) {
              if (found.current.sequence < current) fail("what runs goes back", found.current.sequence);
              current = found.current.sequence;
            }
          }
          if (found.has_finished && found.finished.op_and_root % 2 == 0) {
            check(found.finished, true);
            if (found.finished.sequence < finished) fail("what is done goes back", found.finished.sequence);
            finished = found.finished.sequence;
          }
        }
      });
    }
    std::deque<std::pair<uint64_t, ncclpy_note*>> running;
    std::deque<ncclpy_note*> pairs;
    uint64_t begun = 0, failed = 0;
    size_t most = 0;
    const auto end = [&](size_t which) {
      const auto [number, note] = running[which];
      running.erase(running.begin() + static_cast<long>(which));
      const bool done = random() % 8 != 0;
      failed += !done;
      ncclpy_oplog_end(oplog, 0, note, done, static_cast<double>(number) + 0.5);
    };
    while (begun < operation_count || !running.empty()) {
      if (begun < operation_count && random() % 5 < 3) {
        const ncclpy_op what = operation(begun, 0);
        running.emplace_back(begun++, ncclpy_oplog_begin(oplog, 0, &what));
        most = std::max(most, running.size());
        if (random() % 16 == 0) {
          const ncclpy_op pair = operation(begun, 1);
          pairs.push_back(ncclpy_oplog_begin(oplog, 1, &pair));
        }
      } else if (!running.empty()) {
        // A few end out of order; and one stays under way while all others begin and end.
        const size_t least = round % 2 && begun < operation_count && running.size() > 1;
        end(random() % 3 != 0 ? least : least + random() % (running.size() - least));
      }
      if (!running.empty()) ncclpy_oplog_set_blocked(oplog, running[random() % running.size()].second, random() % 2);
      if (pairs.size() > 20) {
        ncclpy_oplog_end(oplog, 1, pairs.front(), 0, 0);
        pairs.pop_front();
      }
    }
    over = true;
    for (auto& each : others) each.join();
    ncclpy_status found;
    if (!ncclpy_oplog_read(oplog, &found) || (found.has_current && found.current.op_and_root % 2 == 0)) {
      fail("something runs when all is over", begun);
    }
    if (failed == 0 || oplog->lists[0].finished_order == 0 || oplog->lists[0].first != nullptr) fail("ended", failed);
    size_t memory = 0;
    for (const auto* notes = oplog->notes; notes != nullptr; notes = notes->before) memory += NCCLPY_NOTES_PER_BLOCK;
    if (memory > most + 21 + NCCLPY_NOTES_PER_BLOCK) fail("memory is used again, but not for", memory);
    ncclpy_oplog_use(oplog);
    ncclpy_oplog_leave(oplog);
    ncclpy_oplog_leave(oplog);
  }
  std::printf("%ld %ld\n", reads.load(), waits.load());
}
