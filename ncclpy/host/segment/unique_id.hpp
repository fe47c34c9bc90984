// Unique ids, and the way from one to the shared memory of its communicator.
//
// An id is a place in a table of the process that made it: which process, under which descriptor the table is open
// there, which place. The memory itself is made by the rank that comes first, under a descriptor that it keeps until
// all have come. So an id that nobody uses costs its place in the table, 64 bytes, and no descriptor; it may be copied,
// sent and forgotten like any other value.
//
// Others of the same user open both through /proc. Nothing of it has a name in a file system. Table and memory are
// sealed: whoever can open them can write them, but cannot take pages away from under those who have mapped them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/abi.hpp"

namespace ncclpy::host {

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int value = -1) : value_(value) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : value_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      value_ = other.release();
    }
    return *this;
  }
  int get() const { return value_; }
  int release() {
    const int value = value_;
    value_ = -1;
    return value;
  }
  void reset();

 private:
  int value_;
};

// One id's place in the table of its maker. Other processes write here: every value is checked where it is used.
struct alignas(64) IdEntry {
  // The low byte is a Phase, the rest counts the ids that the place has stood for.
  std::atomic<uint64_t> word{0};
  std::atomic<uint64_t> nonce[2];
  std::atomic<uint64_t> memory{0};  // where the first rank has it: pid, and descriptor in the low half
  std::atomic<uint32_t> nranks{0};  // as the first rank said
};

enum class Phase : uint8_t { unused, offered, being_laid_out, laid_out, served, given_up };

// An id that is being used to meet: its place and, with the rank that came first, the descriptor of the memory.
class Meeting {
 public:
  Meeting() = default;
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Finds the place behind an id.
  ncclResult_t find(const ncclUniqueId& id);
  // A descriptor of the memory, `bytes` long: made here by the first rank, which sees zeros, else opened. It is the
  // meeting's own.
  ncclResult_t open(int nranks, size_t bytes, int* memory, bool* first);
  // The first rank has filled the memory's beginning in, or has not been able to.
  void publish(bool ready);
  // The memory is mapped: its descriptor is kept by the first rank only, from whom the others have theirs.
  void mapped(bool first) {
    if (!first) memory_.reset();
  }
  // All ranks have come, or never will: the id has served, and nobody needs the descriptor any more.
  void end(Phase how);

  const unsigned char* nonce() const { return nonce_; }

 private:
  ncclResult_t over(Phase phase) const;
  ncclResult_t create_memory(int nranks, size_t bytes);
  ncclResult_t open_shared_memory(uint64_t word, int nranks, size_t bytes);

  IdEntry* entry_ = nullptr;
  void* mapping_ = nullptr;  // of another process's table
  int32_t maker_ = 0;
  unsigned char nonce_[16] = {};
  uint64_t word_ = 0;  // with the phase `offered`
  Descriptor memory_;
};

// The id's own bytes by which the ranks of one process find each other; "" if it is none of the host engine's.
std::string key_of(const ncclUniqueId& id);

ncclResult_t create_unique_id(ncclUniqueId* id);
// An id that no rank will use any more; whoever comes with it is told so.
void withdraw_unique_id(const ncclUniqueId& id);

}  // namespace ncclpy::host
