// The arithmetic of all collectives: n inputs, one result, stored to any number of places.
//
// An element is always accumulated in rank order, 16- and 8-bit floats in float32 over all ranks with one rounding at
// the end, so that a result depends neither on who computes it nor on the size of the pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/abi.hpp"

namespace ncclpy::host {

// The operators as the data path knows them; PreMulSum multiplies input k by scalars[k] first.
enum class Operator : uint32_t { sum, prod, max, min, avg, premulsum };

// One reduction of `count` elements, of two inputs and more; avg and premulsum take one as well. `scalars` (bits of the data type,
// one a rank) is read for premulsum only.
struct Reduction {
  ncclDataType_t dtype;
  Operator op;
  int inputs;
  const void* const* input;
  int outputs;
  void* const* output;
  size_t count;
  const uint64_t* scalars;
  bool nontemporal = false;  // the outputs are part of so much that nobody finds them in a cache, see nontemporal.hpp
};

// The copies of the loops, one for each instruction set, that this processor runs; the fastest is the last.
using Kernels = void (*)(const Reduction&);
std::vector<Kernels> usable_kernels();

// By the fastest. An output may be one of the inputs; otherwise they do not overlap.
void reduce(const Reduction& reduction);

// Bytes of one element; 0 for a value that is no data type.
size_t size_of(ncclDataType_t dtype);

}  // namespace ncclpy::host
