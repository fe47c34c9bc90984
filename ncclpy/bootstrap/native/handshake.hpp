// The handshake of a client and a server, before the first frame. Each proves to the other that it knows the token
// without sending it. Each sends a nonce, which makes every proof different, so an intercepted proof is useless.
//
//   client: "NCCLPYST" version:u16 0:u16 heartbeat:u32 (ms) nonce:32
//   server: "NCCLPYST" version:u16 token?:u16 heartbeat:u32 nonce:32
//   client: HMAC(token, "client" + both greetings)
//   server: verdict:u32, HMAC(token, "server" + both greetings), lease:u64
//
// The client's part is in handshake.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "frame.hpp"
#include "sha256.hpp"

namespace ncclpy::store {

constexpr std::string_view kMagic = "NCCLPYST";
constexpr uint16_t kVersion = 1;
constexpr size_t kNonce = 32;
constexpr size_t kGreeting = 8 + 2 + 2 + 4 + kNonce;

enum class Verdict : uint32_t { welcome = 0, wrong_token = 1 };

// Why bytes cannot be the beginning of a greeting; "" if they can.
inline std::string wrong_greeting(std::string_view bytes) {
  const size_t known = bytes.size() < kMagic.size() ? bytes.size() : kMagic.size();
  if (bytes.substr(0, known) != kMagic.substr(0, known)) return "it does not speak the protocol of ncclpy's stores";
  if (bytes.size() < 10) return "";
  const unsigned version = static_cast<unsigned char>(bytes[8]) | static_cast<unsigned char>(bytes[9]) << 8;
  if (version != kVersion) {
    return "it speaks version " + std::to_string(version) + " of the protocol, this server version " +
           std::to_string(kVersion);
  }
  return "";
}

inline std::string server_greeting(bool token, uint32_t heartbeat, std::string_view nonce) {
  char numbers[8] = {static_cast<char>(kVersion & 0xff), static_cast<char>(kVersion >> 8), token};
  put_u32(numbers + 4, heartbeat);
  return std::string(kMagic).append(numbers, sizeof numbers).append(nonce);
}

inline std::string proof(std::string_view role, std::string_view token, std::string_view greetings) {
  return hmac(token, std::string(role).append(greetings));
}

}  // namespace ncclpy::store
