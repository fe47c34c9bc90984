// Frames: the messages between a store's server and its clients after the handshake. The reasons for the protocol are
// in docs/decisions/038-store-server.md.
//
// A frame is a header of 24 bytes and a body. Numbers are little-endian:
//
//   length u64   of the body
//   id     u64   of the request, or of the request that this answers
//   op     u8    the operation
//   status u8    of an answer
//   0      6     reserved: a frame that has anything else here is refused
//
// A body is a list of fields, each with its kind: 'i' and 8 bytes, or 'b', a length u32 and that many bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace ncclpy::store {

constexpr size_t kHeader = 24;
// Most keys of one multi_get: its answer has a field for each key, also for a key without a value in this answer.
constexpr int64_t kMaxTogether = 1 << 16;

// Each operation, with the fields of its request -> the fields of its answer. `has?` is 1 if the field after it has a
// value, and 0 if the value is absent. `microseconds` is the time to wait; below 0: without limit.
enum class Op : uint8_t {
  set = 1,          // key, value, ephemeral            ->
  get = 2,          // key, microseconds                -> value
  add = 3,          // key, number                      -> sum
  compare_set = 4,  // key, has?, expected, has?, desired -> swapped, has?, value
  append = 5,       // key, value                       ->
  wait = 6,         // microseconds, count, keys        ->
  check = 7,        // count, keys                      -> all there?
  erase = 8,        // key                              -> was there?
  keys = 9,         // prefix                           -> count, keys
  gather = 10,      // name, rank, size, microseconds, value -> size, values (left out if all values are empty)
  watch = 11,       // prefix                           -> ; afterwards, for each change, a `change` with this id
  unwatch = 12,     // id of the watch                  ->
  cancel = 13,      // id of a request                  no answer, neither to this nor to that request
  ping = 14,        //                                  ->
  goodbye = 15,     //                                  -> ; then the server closes the connection
  multi_get = 16,   // microseconds, count, keys        -> number of keys without a value in this answer; for each key
                    //                                     its value, 0 (absent) or 1 (did not fit: ask again)
  multi_set = 17,   // count, keys each with its value  ->
  // Sent only by the server.
  change = 18,  // key, has?, value
  farewell = 19,  // why: the server ends; with the status `late`, the lease of this client alone has ended
};

enum class Status : uint8_t {
  ok = 0,
  // The deadline has passed. Of wait and get: count of absent keys, these keys. Of multi_get: as `ok`. Of gather:
  // count of missing ranks, how many of them are listed, these ranks, ranks that have left.
  late = 1,
  refused = 2,  // why, as text
};

inline void put_u32(char* at, uint32_t value) {
  for (int i = 0; i < 4; i++) at[i] = static_cast<char>(value >> (8 * i));
}

inline void put_u64(char* at, uint64_t value) {
  for (int i = 0; i < 8; i++) at[i] = static_cast<char>(value >> (8 * i));
}

inline uint32_t get_u32(const char* at) {
  uint32_t value = 0;
  for (int i = 0; i < 4; i++) value |= static_cast<uint32_t>(static_cast<unsigned char>(at[i])) << (8 * i);
  return value;
}

inline uint64_t get_u64(const char* at) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++) value |= static_cast<uint64_t>(static_cast<unsigned char>(at[i])) << (8 * i);
  return value;
}

struct Header {
  uint64_t length = 0;
  uint64_t id = 0;
  Op op{};
  Status status{};

  void put(char* at) const {
    put_u64(at, length);
    put_u64(at + 8, id);
    at[16] = static_cast<char>(op);
    at[17] = static_cast<char>(status);
    std::memset(at + 18, 0, 6);
  }

  // Returns false if these 24 bytes are no header.
  bool get(const char* at) {
    length = get_u64(at);
    id = get_u64(at + 8);
    op = static_cast<Op>(at[16]);
    status = static_cast<Status>(at[17]);
    for (int i = 18; i < 24; i++) {
      if (at[i] != 0) return false;
    }
    return op >= Op::set && op <= Op::farewell && status <= Status::refused;
  }
};

// Writes the fields of a body.
class Writer {
 public:
  Writer& integer(int64_t value) {
    char field[9] = {'i'};
    put_u64(field + 1, static_cast<uint64_t>(value));
    body.append(field, sizeof field);
    return *this;
  }

  // Writes the kind and the length of a field of bytes; the caller sends the bytes themselves.
  Writer& announce(size_t length) {
    char field[5] = {'b'};
    put_u32(field + 1, static_cast<uint32_t>(length));
    body.append(field, sizeof field);
    return *this;
  }

  Writer& bytes(std::string_view value) {
    announce(value.size());
    body.append(value);
    return *this;
  }

  std::string body;
};

// Reads the fields of a body. Each call returns false if the next field is of another kind or incomplete.
class Reader {
 public:
  explicit Reader(std::string_view body = {}) : rest_(body) {}

  bool integer(int64_t& value) {
    if (rest_.size() < 9 || rest_[0] != 'i') return false;
    value = static_cast<int64_t>(get_u64(rest_.data() + 1));
    rest_.remove_prefix(9);
    return true;
  }

  bool bytes(std::string_view& value) {
    if (rest_.size() < 5 || rest_[0] != 'b') return false;
    const size_t length = get_u32(rest_.data() + 1);
    if (rest_.size() - 5 < length) return false;
    value = rest_.substr(5, length);
    rest_.remove_prefix(5 + length);
    return true;
  }

  // A count of fields that follow, each of at least 5 bytes; false if the rest of the body has no space for them.
  bool count(int64_t& value) { return integer(value) && value >= 0 && value <= static_cast<int64_t>(rest_.size() / 5); }

  // The kind of the next field; 0 at the end.
  char kind() const { return rest_.empty() ? '\0' : rest_[0]; }
  bool end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

}  // namespace ncclpy::store
