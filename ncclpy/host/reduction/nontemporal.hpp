// Stores that go past the caches, to memory. An ordinary store reads a cache line first, which large results throw out again
// before anybody reads them: without that a result that comes from memory and goes there moves a third less.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ncclpy::host {

// Of so many bytes, all of a rank's result, little is in a cache when it is complete.
constexpr size_t nontemporal_min_bytes = 8 << 20;

// One cache line, to where one begins.
static inline void store_line_nontemporal(void* to, const void* from) {
#ifdef __SSE2__
  __m128i line[4];
  std::memcpy(line, from, sizeof line);
  for (int i = 0; i < 4; i++) _mm_stream_si128(static_cast<__m128i*>(to) + i, line[i]);
#else
  std::memcpy(to, from, 64);
#endif
}

// As memcpy; `nontemporal_fence` is to follow before another thread is told of it. Internal to each file that uses it, and
// calling nothing that is not, as one is compiled for several instruction sets.
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

// To memory that is part of so much, or not.
[[gnu::noinline]] static inline void copy_out(void* to, const void* from, size_t bytes, bool nontemporal) {
  if (nontemporal) copy_nontemporal(to, from, bytes);
  else std::memcpy(to, from, bytes);
}

// These stores keep no order with others, also not with one that tells of them.
static inline void nontemporal_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace ncclpy::host
