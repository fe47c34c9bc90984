// Control frames as bytes: numbers in groups of seven bits, text after its length, sets as runs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ncclpy::coordinator {

// Bytes that are not a valid control frame, from another rank.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Writer {
 public:
  void number(uint64_t value) {
    while (value >= 0x80) {
      bytes_.push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    bytes_.push_back(static_cast<char>(value));
  }
  void text(std::string_view text) {
    number(text.size());
    bytes_.append(text);
  }
  void raw(std::string_view bytes) { bytes_.append(bytes); }
  const std::string& bytes() const { return bytes_; }
  bool empty() const { return bytes_.empty(); }
  std::string take() {
    std::string taken;
    taken.swap(bytes_);
    return taken;
  }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  bool done() const { return left_.empty(); }

  uint64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (left_.empty()) throw Malformed("a number is cut off");
      const auto byte = static_cast<unsigned char>(left_.front());
      left_.remove_prefix(1);
      if (shift == 63 && byte > 1) throw Malformed("a number has more than 64 bits");
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    throw Malformed("a number has more than 64 bits");
  }

  // A number that is less than `limit`.
  uint64_t below(uint64_t limit) {
    const uint64_t value = number();
    if (value >= limit) throw Malformed("a number is out of its range");
    return value;
  }

  // A count of items that follow, each of at least one byte.
  size_t count() { return static_cast<size_t>(below(left_.size() + 1)); }

  std::string text() {
    const size_t length = count();
    if (length > left_.size()) throw Malformed("a text is cut off");
    std::string found(left_.substr(0, length));
    left_.remove_prefix(length);
    return found;
  }

 private:
  std::string_view left_;
};

// A set of small numbers: ranks, or slots of the cache.
class Bits {
 public:
  bool has(size_t number) const {
    return number / 64 < words_.size() && (words_[number / 64] >> (number % 64) & 1) != 0;
  }
  void add(size_t number) {
    grow(number / 64 + 1);
    words_[number / 64] |= uint64_t{1} << (number % 64);
  }
  void add(const Bits& other) {
    grow(other.words_.size());
    for (size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
  }
  void remove(const Bits& other) {
    for (size_t i = 0; i < words_.size() && i < other.words_.size(); ++i) words_[i] &= ~other.words_[i];
  }
  void keep(const Bits& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= i < other.words_.size() ? other.words_[i] : 0;
  }
  void clear() { words_.clear(); }
  bool empty() const {
    for (const uint64_t word : words_)
      if (word != 0) return false;
    return true;
  }
  size_t count() const {
    size_t found = 0;
    for (const uint64_t word : words_) found += static_cast<size_t>(__builtin_popcountll(word));
    return found;
  }
  // Adds what is in `other` and not in `known`.
  void add_unknown(const Bits& other, const Bits& known) {
    grow(other.words_.size());
    for (size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i] & ~known.word(i);
  }
  // Whether all of `wanted` are in this set or in `also`.
  bool covers(const Bits& wanted, const Bits& also) const {
    for (size_t i = 0; i < wanted.words_.size(); ++i)
      if ((wanted.words_[i] & ~word(i) & ~also.word(i)) != 0) return false;
    return true;
  }
  // Whether all numbers that are in both `wanted` and `among` are in this set or in `also`.
  bool covers(const Bits& wanted, const Bits& among, const Bits& also) const {
    for (size_t i = 0; i < wanted.words_.size(); ++i)
      if ((wanted.words_[i] & among.word(i) & ~word(i) & ~also.word(i)) != 0) return false;
    return true;
  }
  std::vector<uint32_t> list() const {
    std::vector<uint32_t> found;
    for (size_t i = 0; i < words_.size(); ++i)
      for (uint64_t word = words_[i]; word != 0; word &= word - 1)
        found.push_back(static_cast<uint32_t>(i * 64) + static_cast<uint32_t>(__builtin_ctzll(word)));
    return found;
  }

  void write(Writer& out) const {
    std::vector<uint64_t> runs;  // alternately the length of a gap and the length of a run of members
    size_t at = 0;
    const std::vector<uint32_t> all = list();
    for (size_t i = 0; i < all.size();) {
      size_t end = i + 1;
      while (end < all.size() && all[end] == all[end - 1] + 1) ++end;
      runs.push_back(all[i] - at);
      runs.push_back(end - i);
      at = all[end - 1] + size_t{1};
      i = end;
    }
    out.number(runs.size() / 2);
    for (const uint64_t run : runs) out.number(run);
  }

  static Bits read_all(std::string_view bytes, size_t limit) {
    Reader in(bytes);
    return read(in, limit);
  }

  // Reads a set of numbers below `limit`.
  static Bits read(Reader& in, size_t limit) {
    Bits found;
    size_t at = 0;
    for (size_t runs = in.count(); runs > 0; --runs) {
      at += static_cast<size_t>(in.below(limit - at + 1));
      const auto length = static_cast<size_t>(in.below(limit - at + 1));
      for (size_t i = 0; i < length; ++i) found.add(at++);
    }
    return found;
  }

 private:
  uint64_t word(size_t i) const { return i < words_.size() ? words_[i] : 0; }
  void grow(size_t words) {
    if (words_.size() < words) words_.resize(words);
  }

  std::vector<uint64_t> words_;
};

}  // namespace ncclpy::coordinator
