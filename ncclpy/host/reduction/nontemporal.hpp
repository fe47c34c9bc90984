// Non-temporal stores, which bypass the caches. An ordinary store first reads its cache line from memory. For a result
// that is too large for the caches this read is useless; without it a copy from memory to memory moves a third less
// data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ncclpy::host {

// If a rank's whole result has at least this size, little of it would still be in a cache when it is complete.
constexpr size_t nontemporal_min_bytes = 8 << 20;

// Stores one cache line to the aligned address `to`.
static inline void store_line_nontemporal(void* to, const void* from) {
#ifdef __SSE2__
  __m128i line[4];
  std::memcpy(line, from, sizeof line);
  for (int i = 0; i < 4; i++) _mm_stream_si128(static_cast<__m128i*>(to) + i, line[i]);
#else
  std::memcpy(to, from, 64);
#endif
}

// Copies like memcpy. A nontemporal_fence() must follow before another thread is told of the data. This has internal
// linkage and calls no external function, since files that include it are compiled for several instruction sets.
static inline void copy_nontemporal(void* to, const void* from, size_t bytes) {
#ifdef __SSE2__
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const size_t to_line = size_t(-reinterpret_cast<uintptr_t>(target)) % 64, head = to_line < bytes ? to_line : bytes;
  std::memcpy(target, source, head);
  target += head, source += head, bytes -= head;
  for (; bytes >= 64; bytes -= 64, target += 64, source += 64) store_line_nontemporal(target, source);
  std::memcpy(target, source, bytes);
#else
  std::memcpy(to, from, bytes);
#endif
}

// Copies by copy_nontemporal() if `nontemporal`, else by memcpy.
[[gnu::noinline]] static inline void copy_out(void* to, const void* from, size_t bytes, bool nontemporal) {
  if (nontemporal) copy_nontemporal(to, from, bytes);
  else std::memcpy(to, from, bytes);
}

// Orders non-temporal stores before later stores, such as the one that tells another thread of the data.
static inline void nontemporal_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace ncclpy::host
