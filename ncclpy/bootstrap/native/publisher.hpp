// A value that a client publishes without the GIL: the client sets a key to it once a second, if the value has
// changed, and at once when another rank asks for it.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace ncclpy::store {

// The source of the value. `tell` writes the value and returns its length, 0 if there is none now. The value counts as
// changed if its first `lasting` bytes have changed. `tell` is called under the client's mutex and must not wait.
struct Source {
  void* what;
  size_t (*tell)(void* what, char* at, size_t space, size_t* lasting);
};

class Publisher {
 public:
  // `rest` is appended to what the source writes.
  Publisher(std::string key, std::string rest, const Source& source)
      : key_(std::move(key)), rest_(std::move(rest)), source_(source) {}

  // Returns the value to publish now, "" if the source has none. If the value was not asked for, also returns "" until
  // a second has passed since the last value, and as long as the value has not changed.
  std::string next(double time, bool asked) {
    if (!asked && time < due_) return "";
    char text[2048];
    size_t lasting = 0;
    const size_t length = source_.tell(source_.what, text, sizeof text, &lasting);
    if (length == 0 || (!asked && told_.compare(0, std::string::npos, text, lasting) == 0)) return "";
    told_.assign(text, lasting);
    due_ = time + kPace;
    return std::string(text, length) + rest_;
  }

  const std::string& key() const { return key_; }

  // Least seconds between two values, except for those that are asked for.
  static constexpr double kPace = 1.0;

 private:
  std::string key_, rest_, told_;
  Source source_;
  double due_ = 0;
};

}  // namespace ncclpy::store
