// The arithmetic of all collectives: a reduction of n inputs to one result, which is stored to one or more outputs.
//
// An element is always accumulated in rank order, 16- and 8-bit floats in float32 over all ranks with one rounding at
// the end. So a result depends neither on the rank that computes it nor on the size of the pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/abi.hpp"

namespace ncclpy::host {

// The reduction operators; PreMulSum multiplies input k by scalars[k] first.
enum class Operator : uint32_t { sum, prod, max, min, avg, premulsum };

// One reduction of `count` elements of two or more inputs; for avg and premulsum, one input is enough. `scalars` (bits
// of the data type, one for each rank) is read for premulsum only.
struct Reduction {
  ncclDataType_t dtype;
  Operator op;
  int inputs;
  const void* const* input;
  int outputs;
  void* const* output;
  size_t count;
  const uint64_t* scalars;
  bool nontemporal = false;  // the outputs are part of a result that no cache holds, see nontemporal.hpp
};

// The copies of the loops, one for each instruction set, that this processor can run; the fastest is the last.
using Kernels = void (*)(const Reduction&);
std::vector<Kernels> usable_kernels();

// Runs the fastest copy. An output may be one of the inputs; otherwise they must not overlap.
void reduce(const Reduction& reduction);

// Bytes of one element; 0 for an invalid data type.
size_t size_of(ncclDataType_t dtype);

}  // namespace ncclpy::host
