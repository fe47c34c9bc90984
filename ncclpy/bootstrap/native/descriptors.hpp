// Descriptors that a forked child closes at once. A child that kept a copy of a connection would keep the connection,
// and with it the parent's lease, after the parent's death.
#pragma once

#include <utility>

namespace ncclpy::store {

// A number that each fork increases in the child. A process must not touch what was made in another generation.
int generation();

// Owns a descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept { swap(other); }
  Descriptor& operator=(Descriptor&& other) noexcept {
    Descriptor taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~Descriptor() { close(); }

  void close();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  void swap(Descriptor& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(generation_, other.generation_);
  }

  int fd_ = -1;
  int generation_ = 0;
};

}  // namespace ncclpy::store
