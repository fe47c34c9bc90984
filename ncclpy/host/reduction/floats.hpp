// 16- and 8-bit floats to float32 and back, rounded to nearest even, without branches, so that loops over them
// vectorise.
//
// Overflow and NaN are those of ml_dtypes: float16, bfloat16 and float8_e5m2 overflow to infinity; float8_e4m3fn has
// no infinity and overflows to NaN.
#pragma once

#include <cstdint>
#include <cstring>

namespace ncclpy::host {
namespace {  // internal linkage: each instruction set's copy of the kernels has its own

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct BFloat16 {
  uint16_t bits;
};

// An IEEE-like float with EXPONENT and MANTISSA bits. FINITE: no infinity, only the all-ones pattern is NaN (e4m3fn).
template <class Bits, int EXPONENT, int MANTISSA, bool FINITE>
struct SmallFloat {
  Bits bits;
};

using Float16 = SmallFloat<uint16_t, 5, 10, false>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, false>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, true>;

inline float to_float(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }

inline void from_float(float value, BFloat16& out) {
  uint32_t bits = bits_of(value);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uint32_t quiet = ((bits >> 16) & 0x8000) | 0x7fc0;
  out.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

template <class Bits, int E, int M, bool FINITE>
inline float to_float(SmallFloat<Bits, E, M, FINITE> x) {
  constexpr int bias = (1 << (E - 1)) - 1;
  constexpr uint32_t width = E + M;
  constexpr uint32_t magnitude_mask = (1u << width) - 1;
  constexpr uint32_t infinity = FINITE ? magnitude_mask : ((1u << E) - 1) << M;
  uint32_t raw = x.bits;
  uint32_t magnitude = raw & magnitude_mask;
  uint32_t sign = (raw & ~magnitude_mask) << (31 - width);
  // With its bits moved to float32's positions the value is too small by a factor of 2^(127 - bias). The product is
  // exact, subnormals included.
  float scaled = float_of(magnitude << (23 - M)) * float_of(uint32_t(127 + 127 - bias) << 23);
  uint32_t bits = bits_of(scaled);
  uint32_t special = FINITE ? 0x7fc00000u : 0x7f800000u | ((magnitude & ((1u << M) - 1)) << (23 - M));
  bits = magnitude >= infinity ? special : bits;
  return float_of(bits | sign);
}

template <class Bits, int E, int M, bool FINITE>
inline void from_float(float value, SmallFloat<Bits, E, M, FINITE>& out) {
  constexpr int bias = (1 << (E - 1)) - 1;
  constexpr uint32_t width = E + M;
  constexpr uint32_t infinity = FINITE ? (1u << width) - 1 : ((1u << E) - 1) << M;
  constexpr uint32_t nan = FINITE ? (1u << width) - 1 : infinity | (1u << (M - 1));
  constexpr int shift = 23 - M;
  uint32_t bits = bits_of(value);
  uint32_t sign = (bits >> (31 - width)) & (1u << width);
  uint32_t magnitude = bits & 0x7fffffff;
  // Normal results: rebias, then round the dropped bits to nearest even. A carry into the exponent is correct.
  uint32_t rebased = magnitude - (uint32_t(127 - bias) << 23);
  uint32_t normal = (rebased + ((1u << (shift - 1)) - 1) + ((rebased >> shift) & 1)) >> shift;
  // Subnormal results: adding a number with a last bit of the same weight as the result's last bit makes the FPU round
  // to nearest even.
  constexpr uint32_t magic = uint32_t(127 - bias + 1 + shift) << 23;
  uint32_t subnormal = bits_of(float_of(magnitude) + float_of(magic)) - magic;
  uint32_t result = magnitude < (uint32_t(127 - bias + 1) << 23) ? subnormal : normal;
  result = result > infinity ? infinity : result;
  result = magnitude > 0x7f800000 ? nan : result;
  out.bits = Bits(result | sign);
}

}  // namespace
}  // namespace ncclpy::host
