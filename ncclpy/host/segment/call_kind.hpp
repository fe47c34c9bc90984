// The call that a rank has made or executes, as one word that every process of the communicator can read.
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

// NCCL's name of the call, without "nccl".
const char* name_of(CallKind kind);
CallKind kind_of(const Operation& operation);

// The word of a call that is the `number`-th of its kind on a communicator. 0: no call. The number is not shown to
// users, since the operation numbers of ncclpy and torch count differently.
constexpr uint64_t call_word(CallKind kind, uint32_t number) { return uint64_t(number) << 8 | uint64_t(kind); }
constexpr CallKind kind_in(uint64_t word) { return CallKind(word & 0xff); }
constexpr uint32_t number_in(uint64_t word) { return uint32_t(word >> 8); }

// Where the other ranks can wait for a rank: in the exchanges of split and other control calls (control_side), and in
// the operations on streams (data_side).
enum Side : uint32_t { control_side, data_side, sides };

}  // namespace ncclpy::host
