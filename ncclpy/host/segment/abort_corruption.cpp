// Ends operations with wrong data, as another rank's abort does on GPUs.
#include "abort_corruption.hpp"

#include <cstring>

#include "base/switches.hpp"

namespace ncclpy::host {
namespace {

// As float32 1.5e16, as int32 1515870810: no value that a test expects.
constexpr int wrong_byte = 0x5a;

}  // namespace

const bool abort_corrupts = is_on("NCCLPY_HOST_ABORT_CORRUPTS");

void count_abandoned(Segment& segment, int rank, uint64_t collectives) {
  segment.slot(rank).abandoned.fetch_add(collectives, std::memory_order_release);
}

bool is_corrupted(Segment& segment, int rank, uint64_t number) {
  if (!abort_corrupts) return false;
  const int nranks = segment.nranks();
  const RankSlot& previous = segment.slot((rank + nranks - 1) % nranks);
  const uint64_t abandoned = previous.abandoned.load(std::memory_order_acquire);
  if (abandoned == 0) return false;
  const uint64_t passed = previous.passed.load(std::memory_order_acquire);
  return passed < number && number <= passed + abandoned;
}

bool take_abandoned_message(std::atomic<uint32_t>& abandoned) {
  if (!abort_corrupts) return false;
  uint32_t left = abandoned.load(std::memory_order_acquire);
  while (left > 0) {
    if (abandoned.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void overwrite_with_garbage(void* memory, size_t bytes) { std::memset(memory, wrong_byte, bytes); }

}  // namespace ncclpy::host
