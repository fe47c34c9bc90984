// The reduction loops, one instance for each data type and operator. This file is compiled once for each instruction
// set; NCCLPY_KERNELS names the copy. Everything but the entry point has internal linkage, so that the linker cannot
// merge code of different copies. Contraction to fused multiply-add is off: all copies give the same bits.
#include <cstring>
#include <type_traits>

#include "floats.hpp"
#include "nontemporal.hpp"
#include "reduce.hpp"

namespace ncclpy::host {
namespace {

// A block is the part of a result that is reduced at a time. Its size is given as the bytes that its elements have in
// the accumulator. With a small block the accumulator and its inputs stay in the first-level cache. Data from memory
// are better read in longer runs: at the start of each block the hardware prefetcher has to start again.
constexpr size_t small_block = 8 << 10, large_block = 32 << 10;
constexpr size_t large_block_min_bytes = 1 << 20;
// The block of a non-temporal result with one output: the copy to the output reads the block again at once, from the
// first-level cache. With four inputs, blocks of 4 KiB take 7% to 24% longer.
constexpr size_t nontemporal_block = 1 << 10;

template <class Acc>
size_t block_of(size_t count) {
  return (count < large_block_min_bytes / sizeof(Acc) ? small_block : large_block) / sizeof(Acc);
}

// The accumulator of an element type, and the conversions to and from it.
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

// Integers wrap around; C++ defines that for unsigned types only.
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

// As fmax and fmin, which NCCL's kernels use: with one NaN the result is the number.
struct Max {
  template <class A>
  static A apply(A a, A b) {
    return ((a > b) | (b != b)) ? a : b;
  }
};

struct Min {
  template <class A>
  static A apply(A a, A b) {
    return ((a < b) | (b != b)) ? a : b;
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

// Combines two inputs, one of which may be the accumulator. The output may be one of the inputs. Never inlined: all
// callers share one copy of the loop, and the compiler takes half the time.
template <class Op, class First, class Second, class Out>
[[gnu::noinline]] void combine(const First* first, const Second* second, Out* out, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; i++) {
    Element<Out>::store(Op::apply(Element<First>::load(first[i]), Element<Second>::load(second[i])), out[i]);
  }
}

// Like combine, with non-temporal stores to an output aligned to its element size. Used for two inputs, for which
// working block by block takes longer.
template <class Op, class T>
[[gnu::noinline]] void combine_nontemporal(const T* first, const T* second, T* out, size_t count) {
  constexpr size_t line = 64 / sizeof(T);
  const size_t to_line = size_t(-reinterpret_cast<uintptr_t>(out)) % 64 / sizeof(T), head = to_line < count ? to_line : count;
  combine<Op>(first, second, out, head);
  size_t done = head;
  for (; count - done >= line; done += line) {
    alignas(64) T result[line];
    for (size_t i = 0; i < line; i++) {
      Element<T>::store(Op::apply(Element<T>::load(first[done + i]), Element<T>::load(second[done + i])), result[i]);
    }
    store_line_nontemporal(out + done, result);
  }
  combine<Op>(first + done, second + done, out + done, count - done);
}

// Two inputs with one output are combined in one pass; with non-temporal stores this needs an output aligned to its
// element size. Other reductions work block by block: with more than two inputs, all but the last are combined in an
// accumulator, and further outputs are copies of the first. If they use non-temporal stores, each output is a copy of
// a block that stays in the cache.
template <class T, class Op>
void fold(const Reduction& r) {
  using Acc = typename Element<T>::Acc;
  if (r.nontemporal && r.inputs == 2 && r.outputs == 1 && reinterpret_cast<uintptr_t>(r.output[0]) % sizeof(T) == 0) {
    combine_nontemporal<Op>(
      static_cast<const T*>(r.input[0]), static_cast<const T*>(r.input[1]), static_cast<T*>(r.output[0]), r.count);
    return nontemporal_fence();
  }
  const bool stores_directly = !r.nontemporal;
  alignas(64) Acc acc[large_block / sizeof(Acc)];
  constexpr bool same = std::is_same_v<T, Acc>;
  alignas(64) T rounded[same ? 1 : large_block / sizeof(Acc)];
  T* result;
  if constexpr (same) result = acc;
  else result = rounded;
  size_t block = block_of<Acc>(r.count);
  if (r.outputs == 1 && r.nontemporal) block = nontemporal_block / sizeof(Acc);
  else if (r.outputs == 1 && r.inputs == 2) block = r.count;
  for (size_t begin = 0; begin < r.count; begin += block) {
    const size_t n = r.count - begin < block ? r.count - begin : block;
    const auto input = [&](int k) { return static_cast<const T*>(r.input[k]) + begin; };
    T* const out = stores_directly ? static_cast<T*>(r.output[0]) + begin : result;
    if (r.inputs == 2) {
      combine<Op>(input(0), input(1), out, n);
    } else {
      combine<Op>(input(0), input(1), acc, n);
      for (int k = 2; k < r.inputs - 1; k++) combine<Op>(static_cast<const Acc*>(acc), input(k), acc, n);
      combine<Op>(static_cast<const Acc*>(acc), input(r.inputs - 1), out, n);
    }
    for (int k = stores_directly ? 1 : 0; k < r.outputs; k++) {
      copy_out(static_cast<T*>(r.output[k]) + begin, out, n * sizeof(T), r.nontemporal);
    }
  }
  if (r.nontemporal) nontemporal_fence();
}

// Sums and products that wrap around have the same bits for signed and unsigned types: one instance serves both.
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

// An average: the sum, in the accumulator, divided at the end.
template <class T>
void fold_average(const Reduction& r) {
  using E = Element<typename Wrapping<T>::type>;
  using Acc = typename E::Acc;
  using Divided = typename Element<T>::Acc;
  using Wraps = typename Wrapping<T>::type;
  alignas(64) Acc acc[large_block / sizeof(Acc)];
  alignas(64) T result[large_block / sizeof(Acc)];
  const size_t block = block_of<Acc>(r.count);
  for (size_t begin = 0; begin < r.count; begin += block) {
    const size_t n = r.count - begin < block ? r.count - begin : block;
    const auto input = [&](int k) { return static_cast<const Wraps*>(r.input[k]) + begin; };
    if (r.inputs == 1) {
      for (size_t i = 0; i < n; i++) acc[i] = E::load(input(0)[i]);
    } else {
      combine<Sum>(input(0), input(1), acc, n);
      for (int k = 2; k < r.inputs; k++) combine<Sum>(static_cast<const Acc*>(acc), input(k), acc, n);
    }
    for (size_t i = 0; i < n; i++) Element<T>::store(divide(Divided(acc[i]), r.inputs), result[i]);
    for (int k = 0; k < r.outputs; k++) {
      copy_out(static_cast<T*>(r.output[k]) + begin, result, n * sizeof(T), r.nontemporal);
    }
  }
  if (r.nontemporal) nontemporal_fence();
}

// A sum of inputs that are each multiplied by their own scalar first.
template <class T>
void fold_premultiplied(const Reduction& r) {
  using E = Element<T>;
  using Acc = typename E::Acc;
  alignas(64) Acc acc[large_block / sizeof(Acc)];
  alignas(64) T result[large_block / sizeof(Acc)];
  const size_t block = block_of<Acc>(r.count);
  for (size_t begin = 0; begin < r.count; begin += block) {
    const size_t n = r.count - begin < block ? r.count - begin : block;
    for (int k = 0; k < r.inputs; k++) {
      const T* next = static_cast<const T*>(r.input[k]) + begin;
      const Acc scale = scalar_of<T>(r.scalars[k]);
      if (k == 0) {
        for (size_t i = 0; i < n; i++) acc[i] = Prod::apply(E::load(next[i]), scale);
      } else {
        for (size_t i = 0; i < n; i++) acc[i] = Sum::apply(acc[i], Prod::apply(E::load(next[i]), scale));
      }
    }
    for (size_t i = 0; i < n; i++) E::store(acc[i], result[i]);
    for (int k = 0; k < r.outputs; k++) {
      copy_out(static_cast<T*>(r.output[k]) + begin, result, n * sizeof(T), r.nontemporal);
    }
  }
  if (r.nontemporal) nontemporal_fence();
}

template <class T>
void run_operator(const Reduction& r) {
  using Wraps = typename Wrapping<T>::type;
  switch (r.op) {
    case Operator::sum: return fold<Wraps, Sum>(r);
    case Operator::prod: return fold<Wraps, Prod>(r);
    case Operator::max: return fold<T, Max>(r);
    case Operator::min: return fold<T, Min>(r);
    case Operator::avg: return fold_average<T>(r);
    case Operator::premulsum: return fold_premultiplied<Wraps>(r);
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
