// Threads that launch on random lanes, some by pushing and some by borrowing: each launch runs once, no lane runs two
// at a time, and any two launches run in one order on all lanes that they share.
//
//   lanes_stress SEED ROUNDS
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine/lanes.hpp"

namespace {

constexpr int lane_count = 4;
constexpr int thread_count = 4;
constexpr int launch_count = 400;

struct Launch;

// One lane's part of a launch.
struct Part {
  ncclpy::Job job;  // first, so that it is the part's address
  Launch* launch;
  int lane;
};

struct Launch {
  int number;
  std::vector<int> lanes;
  std::vector<Part> parts;
  Part whole;
  std::atomic<int> remaining{0};
};

// The launches that ran on each lane, in order. Only the lanes guard it; the sanitizer checks that.
std::vector<int> ran[lane_count];
bool inside[lane_count];
std::atomic<int> by_callers{0}, passed_on{0};
ncclpy::Lanes* lanes;

void run(int lane, int number) {
  if (inside[lane]) {
    std::printf("two at a time on lane %d\n", lane);
    std::exit(1);
  }
  inside[lane] = true;
  if (number % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));  // other threads launch meanwhile
  ran[lane].push_back(number);
  inside[lane] = false;
}

void run_part(ncclpy::Job* job) {
  Part* part = reinterpret_cast<Part*>(job);
  run(part->lane, part->launch->number);
  part->launch->remaining--;
}

// Runs a launch for which lanes were borrowed, on its first lane after all.
void run_whole(ncclpy::Job* job) {
  Launch* launch = reinterpret_cast<Part*>(job)->launch;
  for (int lane : launch->lanes) run(lane, launch->number);
  lanes->give_back(launch->lanes.data() + 1, launch->lanes.size() - 1);
  launch->remaining--;
}

void start(Launch& launch, std::mt19937& random) {
  if (random() % 2 && lanes->borrow(launch.lanes.data(), launch.lanes.size())) {
    launch.remaining = 1;
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (random() % 4) {
      for (int lane : launch.lanes) run(lane, launch.number);
      lanes->give_back(launch.lanes.data(), launch.lanes.size());
      launch.remaining--;
      by_callers++;
    } else {
      launch.whole = {{nullptr, run_whole}, &launch, 0};
      lanes->pass_on(&launch.whole.job, launch.lanes.data());
      passed_on++;
    }
    return;
  }
  std::vector<ncclpy::Job*> jobs;
  launch.remaining = static_cast<int>(launch.lanes.size());
  for (int lane : launch.lanes) launch.parts.push_back({{nullptr, run_part}, &launch, lane});
  for (Part& part : launch.parts) jobs.push_back(&part.job);
  lanes->push(jobs.data(), launch.lanes.data(), jobs.size());
}

// Whether each launch ran once on each of its lanes.
bool is_complete(const std::vector<std::unique_ptr<Launch>>& launches) {
  std::vector<std::vector<int>> found(launches.size());
  for (int lane = 0; lane < lane_count; lane++)
    for (int number : ran[lane]) found[number].push_back(lane);
  for (auto& launch : launches)
    if (found[launch->number] != launch->lanes) return false;
  return true;
}

// Whether one order of all launches agrees with the order on every lane.
bool is_in_order() {
  constexpr int all_launches = thread_count * launch_count;
  std::vector<std::vector<int>> next(all_launches);
  std::vector<int> before(all_launches, 0), ready;
  size_t all = 0;
  for (auto& lane : ran)
    for (size_t i = 0; i + 1 < lane.size(); i++) {
      next[lane[i]].push_back(lane[i + 1]);
      before[lane[i + 1]]++;
    }
  for (int i = 0; i < all_launches; i++)
    if (before[i] == 0) ready.push_back(i);
  while (!ready.empty()) {
    const int one = ready.back();
    ready.pop_back();
    all++;
    for (int other : next[one])
      if (--before[other] == 0) ready.push_back(other);
  }
  return all == all_launches;
}

bool round(unsigned seed) {
  std::vector<std::unique_ptr<Launch>> launches;
  std::vector<std::thread> threads;
  for (int i = 0; i < thread_count * launch_count; i++) {
    launches.push_back(std::make_unique<Launch>());
    launches.back()->number = i;
  }
  for (auto& lane : ran) lane.clear();
  for (int t = 0; t < thread_count; t++) {
    threads.emplace_back([&, t] {
      std::mt19937 random(seed * thread_count + t);
      for (int i = 0; i < launch_count; i++) {
        Launch& launch = *launches[t * launch_count + i];
        for (int lane = 0; lane < lane_count; lane++)
          if (random() % 3 == 0) launch.lanes.push_back(lane);
        if (launch.lanes.empty()) launch.lanes.push_back(static_cast<int>(random() % lane_count));
        start(launch, random);
        // Now and then let the lanes fall asleep, so that several are borrowed at once.
        while (random() % 8 == 0 && launch.remaining) std::this_thread::yield();
        if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& launch : launches)
    while (launch->remaining) std::this_thread::yield();
  for (int lane = 0; lane < lane_count; lane++)
    while (!lanes->is_idle(lane)) std::this_thread::yield();
  return is_complete(launches) && is_in_order();
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = static_cast<unsigned>(std::atoi(argv[1]));
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 1;
  lanes = new ncclpy::Lanes(lane_count, 50e-6);
  for (int lane = 0; lane < lane_count; lane++)
    if (!lanes->ensure_started(lane)) return 2;
  for (int i = 0; i < rounds; i++) {
    if (!round(seed + static_cast<unsigned>(i))) {
      std::printf("seed %u: a launch is missing, or the lanes did not keep one order\n", seed + static_cast<unsigned>(i));
      return 1;
    }
  }
  std::printf("ok: %d by callers, %d passed on\n", by_callers.load(), passed_on.load());
}
