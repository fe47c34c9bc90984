// Invalid frames for a root and for a rank in the middle of a tree: they may throw an exception, and nothing worse.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "node.hpp"

using ncclpy::coordinator::Bits;
using ncclpy::coordinator::Node;
using ncclpy::coordinator::Place;

namespace {

Place place_of(bool root) {
  Place place;
  place.rank = root ? 0 : 1;
  place.size = 5;
  place.root = root;
  Bits second, third;
  second.add(2);
  second.add(4);
  third.add(3);
  place.children = {{2, second}, {3, third}};
  return place;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  Node node(place_of((data[0] & 1) != 0), data[0] >> 1 & 7, 5.0, 1.0);
  std::string_view left(reinterpret_cast<const char*>(data) + 1, size - 1);
  double now = 0;
  while (left.size() >= 2) {
    const auto what = static_cast<unsigned char>(left[0]);
    const size_t length = std::min<size_t>(static_cast<unsigned char>(left[1]), left.size() - 2);
    const std::string_view bytes = left.substr(2, length);
    left.remove_prefix(2 + length);
    const std::string key(bytes.substr(0, 2)), rest(bytes.substr(std::min<size_t>(2, bytes.size())));
    now += 0.3;
    try {
      switch (what % 9) {
        case 0:
        case 1:
          node.from_child(what % 9, bytes, now);
          break;
        case 2:
        case 3:
          node.from_parent(bytes, now);
          break;
        case 4:
          node.bring(what >> 6, key, rest, "", (what & 32) != 0, now);
          break;
        case 5:
          node.launched(what >> 6);
          break;
        case 6:
          node.look(now + (what >> 4));
          break;
        case 7:
          node.join();
          break;
        default:
          if (what > 200) node.shut_down((what & 1) != 0, key);
          if (what < 20) node.lost_child(what & 1, key);
      }
      node.settle();
    } catch (const std::exception&) {
      return 0;  // the connection is closed
    }
    node.up.clear();
    node.down.clear();
    node.records.clear();
  }
  return 0;
}
