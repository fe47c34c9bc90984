// The book of claims.
#include "claims.hpp"

#include <cstdio>
#include <mutex>
#include <set>

#include "base/mutex.hpp"
#include "base/switches.hpp"

namespace ncclpy::host {

namespace {

struct Book {
  Mutex<NCCLPY_LOCK_CLAIMS> mutex;
  std::set<const Claim*> claims;
};

Book& book() {
  static auto* const one = new Book;  // never destroyed: used until the process is gone
  return *one;
}

}  // namespace

const bool checks = is_on("NCCLPY_HOST_CHECKS");

thread_local std::string refused_free;

std::string Range::text() const {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%zu bytes at %p", bytes, base);
  return buffer;
}

Claim::Claim(Kind kind, std::vector<Range> ranges, std::string words, std::function<bool()> ended)
    : kind_(kind), ranges_(std::move(ranges)), words_(std::move(words)), ended_(std::move(ended)) {
  std::lock_guard lock(book().mutex);
  book().claims.insert(this);
}

Claim::~Claim() {
  std::lock_guard lock(book().mutex);
  book().claims.erase(this);
}

std::string Claim::on(const Allocation& allocation, bool waits_for_copies) {
  std::lock_guard lock(book().mutex);
  for (const Claim* claim : book().claims) {
    if (claim->kind_ == copies && waits_for_copies) continue;
    for (const Range& range : claim->ranges_) {
      if (!range.overlaps(allocation.base, allocation.bytes) || (claim->ended_ && claim->ended_())) continue;
      return "memory that is still needed, " + Range{allocation.base, allocation.bytes}.text() + " on device " +
             std::to_string(allocation.device) + ": " + claim->words_ + " " + range.text() +
             (claim->kind_ == registered ? "; deregister it first" : " and is not done; wait for it first");
    }
  }
  return "";
}

}  // namespace ncclpy::host
