// Ranks with crossing operations: threads that bring them, a thread per rank that takes frames and launches, with
// pauses, and queries in between; then an end, with or without draining. All ranks get the same operations in the same
// order, and each operation that all have brought runs once.
//
//   control_stress SEED ROUNDS
#include <sys/socket.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ncclpy/coordinator/native/control.hpp"

using namespace ncclpy::coordinator;

namespace {

constexpr int ranks = 3, bringing = 2, names = 40;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

struct Line {
  int above = -1, below = -1;
};

Line connect() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) fail("no socketpair");
  return {ends[0], ends[1]};
}

// Rank 0 is the root; ranks 1 and 2 are its children.
std::shared_ptr<Control> make(uint32_t rank, const std::vector<Line>& lines, double silence) {
  Place place;
  place.rank = rank;
  place.size = ranks;
  place.root = rank == 0;
  std::vector<int> children;
  Peer parent;
  if (rank == 0) {
    for (uint32_t child = 1; child < ranks; ++child) {
      Bits below;
      below.add(child);
      place.children.push_back({child, below});
      children.push_back(lines[child].above);
    }
  } else {
    parent = {0, lines[rank].below};
  }
  Options options;
  options.cache = 16;  // fewer entries than names
  options.silence = silence;
  auto made = std::make_shared<Control>(place, options, parent, children);
  if (!made->start()) fail("no thread");
  return made;
}

std::string name_of(int thread, int i) { return "n" + std::to_string(thread) + "/" + std::to_string(i % names); }

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  long total = 0, torn = 0;
  for (int round = 0; round < rounds; ++round) {
    std::mt19937 random(seed + static_cast<unsigned>(round));
    const bool tears = random() % 3 == 0;
    const int operations = 200;
    std::vector<Line> lines(ranks);
    for (int rank = 1; rank < ranks; ++rank) lines[static_cast<size_t>(rank)] = connect();
    std::vector<std::shared_ptr<Control>> controls;
    // The plane's own thread takes over after a fifth of a second without a waiting thread, or never.
    for (uint32_t rank = 0; rank < ranks; ++rank) controls.push_back(make(rank, lines, random() % 2 ? 1.2 : 30.0));
    std::vector<std::vector<std::string>> ran(ranks);
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {  // the launching thread
        std::mt19937 mine(seed * 7 + rank);
        std::vector<Record> records;
        for (;;) {
          const auto next = controls[rank]->next(records, 1e18);
          if (next == Control::Next::over) return;
          if (next == Control::Next::nothing) fail("nothing came, for ever");
          bool launches = false;
          for (const Record& record : records) {
            if (record.kind == Kind::run) {
              ran[rank].push_back(record.key);
              launches = true;
            }
          }
          if (mine() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine() % 3000));
          if (mine() % 400 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
          if (launches) controls[rank]->launched(0);
        }
      });
      for (int thread = 0; thread < bringing; ++thread) {
        threads.emplace_back([&, rank, thread] {
          std::mt19937 mine(seed * 31 + rank * 7 + static_cast<unsigned>(thread));
          for (int i = 0; i < operations; ++i) {
            Brought brought;
            do {
              if (mine() % 2 || !controls[rank]->try_bring(0, name_of(thread, i), "f", "", true, brought))
                brought = controls[rank]->bring(0, name_of(thread, i), "f", "", true);
              if (brought == Brought::twice) std::this_thread::yield();  // the name is still in flight
            } while (brought == Brought::twice);
            if (brought != Brought::taken) {
              if (!tears) fail("an operation was refused");
              return;
            }
            if (mine() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine() % 300));
            if (mine() % 32 == 0) (void)controls[rank]->have(0, name_of(thread, i));
            if (mine() % 64 == 0) (void)controls[rank]->counters();
          }
        });
      }
    }
    if (tears) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
      controls[random() % ranks]->shut_down(false, "torn");
      ++torn;
    }
    // Launching threads end with the session, which is drained once everything has been brought.
    for (size_t i = 0; i < threads.size(); ++i)
      if (i % (1 + bringing) != 0) threads[i].join();
    if (!tears) controls[random() % ranks]->shut_down(true, "done");
    for (size_t i = 0; i < threads.size(); i += 1 + bringing) threads[i].join();
    for (size_t i = 0; i < ranks; ++i) controls[(i + seed) % ranks]->close(i % 2 == 0);
    for (int rank = 1; rank < ranks; ++rank) {
      auto &a = ran[0], &b = ran[static_cast<size_t>(rank)];
      const size_t both = std::min(a.size(), b.size());
      if (!tears && (a.size() != b.size() || a.size() != size_t{bringing} * operations)) fail("some have not run");
      for (size_t i = 0; i < both; ++i)
        if (a[i] != b[i]) fail("the ranks were told of different orders");
    }
    total += static_cast<long>(ran[0].size());
  }
  std::printf("%ld operations %ld torn\n", total, torn);
  return 0;
}
