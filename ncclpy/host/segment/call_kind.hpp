// What a rank has called and is doing, in a word that every process of the communicator can read.
#pragma once

#include <cstdint>

#include "base/abi.hpp"

namespace ncclpy::host {

struct Operation;

enum class CallKind : uint8_t {
  none,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  send,
  recv,
  put,
  signal,
  wait_signal,
  split,
  shrink,
  grow,
  suspend,
  resume,
  register_window,
  kinds
};

// NCCL's name, without "nccl".
const char* name_of(CallKind kind);
CallKind kind_of(const Operation& operation);

// The n-th deed of its kind on a communicator, to tell one from another. 0 is none. People are not told it: they know
// operations by the numbers of who makes the calls, which count otherwise.
constexpr uint64_t call_word(CallKind kind, uint32_t number) { return uint64_t(number) << 8 | uint64_t(kind); }
constexpr CallKind kind_in(uint64_t word) { return CallKind(word & 0xff); }
constexpr uint32_t number_in(uint64_t word) { return uint32_t(word >> 8); }

// What a rank may be waited for at: the exchanges of split and the like, and the operations on streams.
enum Side : uint32_t { control_side, data_side, sides };

}  // namespace ncclpy::host
