// What a client tells by itself, without the GIL: a value that is put under a key once a second, if it has changed, and at
// once when a counter that others count up has changed.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace ncclpy::store {

// Where the value comes from. `tell` writes it and returns its length, 0 where there is none now; the first `lasting`
// bytes are what counts as a change. It is called under the client's mutex and waits for nobody.
struct Source {
  void* what;
  size_t (*tell)(void* what, char* at, size_t room, size_t* lasting);
};

class Teller {
 public:
  // `rest` is put behind what the source writes.
  Teller(std::string key, std::string rest, const Source& source)
      : key_(std::move(key)), rest_(std::move(rest)), source_(source) {}

  // Returns the value to be put now, "" if there is none: it is no second since, or has not changed.
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

  // Seconds between two looks.
  static constexpr double kPace = 1.0;

 private:
  std::string key_, rest_, told_;
  Source source_;
  double due_ = 0;
};

}  // namespace ncclpy::store
