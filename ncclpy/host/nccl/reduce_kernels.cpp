// The reduction loops, one instance for each data type and operator. This file is compiled once for each instruction
// set, with NCCLPY_KERNELS naming the copy; everything but its entry point has internal linkage, so that no copy's code
// can be taken for another's. Contraction to fused multiply-add is off: all copies give the same bits.
#include <cstring>
#include <type_traits>

#include "floats.hpp"
#include "past_caches.hpp"
#include "reduce.hpp"

namespace ncclpy::host {
namespace {

// Bytes of the accumulator: so much is reduced at a time. With a small one, it and its inputs stay in the first-level
// cache. What comes from memory is better read in longer runs: at the begin of each the processor has yet to read ahead.
constexpr size_t small_block = 8 << 10, large_block = 32 << 10;
constexpr size_t least_of_large_blocks = 1 << 20;

// What an element is accumulated in, and how it gets there and back.
template <class T>
struct Element {
  using Acc = T;
  static Acc load(T x) { return x; }
  static void store(Acc a, T& out) { out = a; }
};

template <class T>
struct SmallElement {
  using Acc = float;
  static Acc load(T x) { return to_float(x); }
  static void store(Acc a, T& out) { from_float(a, out); }
};

template <>
struct Element<BFloat16> : SmallElement<BFloat16> {};
template <>
struct Element<Float16> : SmallElement<Float16> {};
template <>
struct Element<Float8E4M3> : SmallElement<Float8E4M3> {};
template <>
struct Element<Float8E5M2> : SmallElement<Float8E5M2> {};

// Integers wrap around; that is only defined for unsigned ones.
struct Sum {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;
      return A(U(U(a) + U(b)));
    } else {
      return a + b;
    }
  }
};

struct Prod {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;
      return A(U(U(a) * U(b)));
    } else {
      return a * b;
    }
  }
};

// As fmax and fmin, which NCCL's kernels use: a NaN loses against a number.
struct Max {
  template <class A>
  static A apply(A a, A b) {
    return (a > b) | (b != b) ? a : b;
  }
};

struct Min {
  template <class A>
  static A apply(A a, A b) {
    return (a < b) | (b != b) ? a : b;
  }
};

template <class A>
A divide(A a, int n) {
  if constexpr (std::is_floating_point_v<A>) return a / A(n);
  else if constexpr (std::is_signed_v<A>) return A(int64_t(a) / n);
  else return A(uint64_t(a) / uint64_t(n));
}

template <class T>
typename Element<T>::Acc scalar_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return Element<T>::load(value);
}

// The commonest case, two inputs and one output, takes no accumulator. The output may be one of the inputs.
template <class T, class Op>
void combine(const T* first, const T* second, T* out, size_t count) {
  using E = Element<T>;
#pragma GCC ivdep
  for (size_t i = 0; i < count; i++) E::store(Op::apply(E::load(first[i]), E::load(second[i])), out[i]);
}

// The same, past the caches.
template <class T, class Op>
void combine_past_caches(const T* first, const T* second, T* out, size_t count) {
  constexpr size_t line = 64 / sizeof(T);
  const size_t to_line = size_t(-reinterpret_cast<uintptr_t>(out)) % 64 / sizeof(T), head = to_line < count ? to_line : count;
  combine<T, Op>(first, second, out, head);
  size_t done = head;
  for (; count - done >= line; done += line) {
    alignas(64) T result[line];
    combine<T, Op>(first + done, second + done, result, line);
    copy_line_past_caches(out + done, result);
  }
  combine<T, Op>(first + done, second + done, out + done, count - done);
  finish_past_caches();
}

template <class T>
bool is_aligned(const void* at) {
  return reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0;
}

template <class T, class Op, bool SCALE>
void run(const Reduction& r) {
  using E = Element<T>;
  using Acc = typename E::Acc;
  if constexpr (!SCALE) {
    if (r.inputs == 2 && r.outputs == 1 && r.op != Operator::avg && is_aligned<T>(r.output[0])) {
      const auto combined = r.past_caches ? combine_past_caches<T, Op> : combine<T, Op>;
      return combined(static_cast<const T*>(r.input[0]), static_cast<const T*>(r.input[1]), static_cast<T*>(r.output[0]), r.count);
    }
  }
  alignas(64) Acc acc[large_block / sizeof(Acc)];
  const size_t block = (r.count < least_of_large_blocks / sizeof(Acc) ? small_block : large_block) / sizeof(Acc);
  for (size_t begin = 0; begin < r.count; begin += block) {
    const size_t n = r.count - begin < block ? r.count - begin : block;
    const T* first = static_cast<const T*>(r.input[0]) + begin;
    if constexpr (SCALE) {
      const Acc scale = scalar_of<T>(r.scalars[0]);
      for (size_t i = 0; i < n; i++) acc[i] = Prod::apply(E::load(first[i]), scale);
    } else if (r.inputs > 1) {  // the first two at once: one pass through the accumulator less
      const T* second = static_cast<const T*>(r.input[1]) + begin;
      for (size_t i = 0; i < n; i++) acc[i] = Op::apply(E::load(first[i]), E::load(second[i]));
    } else {
      for (size_t i = 0; i < n; i++) acc[i] = E::load(first[i]);
    }
    for (int k = SCALE ? 1 : 2; k < r.inputs; k++) {
      const T* next = static_cast<const T*>(r.input[k]) + begin;
      if constexpr (SCALE) {
        const Acc scale = scalar_of<T>(r.scalars[k]);
        for (size_t i = 0; i < n; i++) acc[i] = Op::apply(acc[i], Prod::apply(E::load(next[i]), scale));
      } else {
        for (size_t i = 0; i < n; i++) acc[i] = Op::apply(acc[i], E::load(next[i]));
      }
    }
    if (r.op == Operator::avg) {
      for (size_t i = 0; i < n; i++) acc[i] = divide(acc[i], r.inputs);
    }
    if constexpr (std::is_same_v<T, Acc>) {
      for (int k = 0; k < r.outputs; k++) copy_out(static_cast<T*>(r.output[k]) + begin, acc, n * sizeof(T), r.past_caches);
    } else {
      alignas(64) T result[large_block / sizeof(Acc)];
      for (size_t i = 0; i < n; i++) E::store(acc[i], result[i]);
      for (int k = 0; k < r.outputs; k++) copy_out(static_cast<T*>(r.output[k]) + begin, result, n * sizeof(T), r.past_caches);
    }
  }
  if (r.past_caches) finish_past_caches();
}

// Sums and products that wrap around have the same bits with and without a sign: one instance serves both.
template <class T>
struct Wrapping {
  using type = T;
};
template <>
struct Wrapping<int8_t> {
  using type = uint8_t;
};
template <>
struct Wrapping<int32_t> {
  using type = uint32_t;
};
template <>
struct Wrapping<int64_t> {
  using type = uint64_t;
};

template <class T>
void run_operator(const Reduction& r) {
  using Wraps = typename Wrapping<T>::type;
  switch (r.op) {
    case Operator::sum: return run<Wraps, Sum, false>(r);
    case Operator::prod: return run<Wraps, Prod, false>(r);
    case Operator::max: return run<T, Max, false>(r);
    case Operator::min: return run<T, Min, false>(r);
    case Operator::avg: return run<T, Sum, false>(r);
    case Operator::premulsum: return run<Wraps, Sum, true>(r);
  }
}

}  // namespace

void NCCLPY_KERNELS(const Reduction& r) {
  switch (r.dtype) {
    case ncclInt8: return run_operator<int8_t>(r);
    case ncclUint8: return run_operator<uint8_t>(r);
    case ncclInt32: return run_operator<int32_t>(r);
    case ncclUint32: return run_operator<uint32_t>(r);
    case ncclInt64: return run_operator<int64_t>(r);
    case ncclUint64: return run_operator<uint64_t>(r);
    case ncclFloat16: return run_operator<Float16>(r);
    case ncclFloat32: return run_operator<float>(r);
    case ncclFloat64: return run_operator<double>(r);
    case ncclBfloat16: return run_operator<BFloat16>(r);
    case ncclFloat8e4m3: return run_operator<Float8E4M3>(r);
    case ncclFloat8e5m2: return run_operator<Float8E5M2>(r);
    case ncclNumTypes: return;
  }
}

}  // namespace ncclpy::host
