#include "descriptors.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "mutex.hpp"

namespace ncclpy::store {
namespace {

// The descriptors of this process. The Registry is never destroyed: threads may use it until the process has ended.
struct Registry {
  Mutex<NCCLPY_LOCK_STORE_DESCRIPTORS> mutex;
  std::vector<bool> open;  // by number
  std::atomic<int> generation{0};
};

Registry& registry() {
  static Registry* one = [] {
    auto* made = new Registry;
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     Registry& all = registry();
                     for (size_t fd = 0; fd < all.open.size(); fd++) {
                       if (all.open[fd]) ::close(static_cast<int>(fd));
                     }
                     all.open.clear();
                     all.generation++;
                     all.mutex.unlock();
                   });
    return made;
  }();
  return *one;
}

}  // namespace

int generation() { return registry().generation.load(); }

Descriptor::Descriptor(int fd) : fd_(fd) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  generation_ = all.generation.load();
  if (fd < 0) return;
  if (all.open.size() <= static_cast<size_t>(fd)) all.open.resize(static_cast<size_t>(fd) + 1);
  all.open[static_cast<size_t>(fd)] = true;
}

void Descriptor::close() {
  if (fd_ < 0) return;
  Registry& all = registry();
  {
    std::lock_guard lock(all.mutex);
    if (generation_ == all.generation.load()) {
      all.open[static_cast<size_t>(fd_)] = false;
      ::close(fd_);
    }
  }
  fd_ = -1;
}

}  // namespace ncclpy::store
