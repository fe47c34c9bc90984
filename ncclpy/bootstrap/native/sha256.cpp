#include "sha256.hpp"

#include <cstdint>
#include <cstring>

namespace ncclpy::store {
namespace {

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

uint32_t rotate_right(uint32_t x, int bits) { return (x >> bits) | (x << (32 - bits)); }

void compress(uint32_t (&state)[8], const unsigned char* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; i++) {
    w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
           uint32_t{block[4 * i + 3]};
  }
  for (int i = 16; i < 64; i++) {
    const uint32_t a = rotate_right(w[i - 15], 7) ^ rotate_right(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t b = rotate_right(w[i - 2], 17) ^ rotate_right(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  uint32_t s[8];
  std::memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; i++) {
    const uint32_t e = rotate_right(s[4], 6) ^ rotate_right(s[4], 11) ^ rotate_right(s[4], 25);
    const uint32_t t = s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRounds[i] + w[i];
    const uint32_t a = rotate_right(s[0], 2) ^ rotate_right(s[0], 13) ^ rotate_right(s[0], 22);
    const uint32_t u = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    for (int j = 7; j > 0; j--) s[j] = s[j - 1];
    s[4] += t;
    s[0] = t + u;
  }
  for (int i = 0; i < 8; i++) state[i] += s[i];
}

}  // namespace

std::string sha256(std::string_view data) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string padded(data);
  padded.push_back('\x80');
  while (padded.size() % 64 != 56) padded.push_back('\0');
  const uint64_t bits = uint64_t{data.size()} * 8;
  for (int i = 7; i >= 0; i--) padded.push_back(static_cast<char>(bits >> (8 * i)));
  for (size_t at = 0; at < padded.size(); at += 64) {
    compress(state, reinterpret_cast<const unsigned char*>(padded.data()) + at);
  }
  std::string digest;
  for (uint32_t word : state) {
    for (int i = 3; i >= 0; i--) digest.push_back(static_cast<char>(word >> (8 * i)));
  }
  return digest;
}

std::string hmac(std::string_view key, std::string_view message) {
  std::string block = key.size() > 64 ? sha256(key) : std::string(key);
  block.resize(64, '\0');
  std::string inner = block, outer = block;
  for (char& each : inner) each ^= 0x36;
  for (char& each : outer) each ^= 0x5c;
  return sha256(outer + sha256(inner.append(message)));
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char differ = 0;
  for (size_t i = 0; i < a.size(); i++) differ |= static_cast<unsigned char>(a[i] ^ b[i]);
  return differ == 0;
}

}  // namespace ncclpy::store
