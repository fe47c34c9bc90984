// SHA-256 and HMAC (FIPS 180-4, RFC 2104), with which both ends prove that they know the token.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace ncclpy::store {

constexpr size_t kDigest = 32;

std::string sha256(std::string_view data);
std::string hmac(std::string_view key, std::string_view message);

// Compares in a time that does not depend on where the two differ.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace ncclpy::store
