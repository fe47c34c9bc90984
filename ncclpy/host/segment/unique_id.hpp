// Unique ids, and the way from an id to the shared memory of its communicator.
//
// The process that makes an id enters it in a table. The id holds the process's pid, the table's descriptor in that
// process, the number of the entry, and a nonce that the entry must have as well. The first rank that joins makes the
// communicator's memory and keeps its descriptor open until all ranks have joined. So an unused id costs its entry in
// the table, 64 bytes, and no descriptor; an id may be copied, sent and forgotten like any other value.
//
// Other processes of the same user open table and memory through /proc. Neither has a name in a file system. Both are
// sealed: a process that can open them can write to them, but cannot truncate them under processes that have mapped
// them.
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

// One id's entry in the table of its maker. Other processes write to it: every value is checked before use.
struct alignas(64) IdEntry {
  // The low byte is a Phase; the rest counts the ids for which the entry was used.
  std::atomic<uint64_t> word{0};
  std::atomic<uint64_t> nonce[2];
  std::atomic<uint64_t> memory{0};  // the first rank's pid in the high half, its descriptor in the low half
  std::atomic<uint32_t> nranks{0};  // as the first rank passed it
};

enum class Phase : uint8_t { unused, offered, being_laid_out, laid_out, served, given_up };

// An id in use for a rendezvous: its entry and, in the process of the first rank, the descriptor of the memory.
class IdRendezvous {
 public:
  IdRendezvous() = default;
  ~IdRendezvous();
  IdRendezvous(const IdRendezvous&) = delete;
  IdRendezvous& operator=(const IdRendezvous&) = delete;

  // Finds the entry of an id.
  ncclResult_t find(const ncclUniqueId& id);
  // Sets `*memory` to a descriptor of the memory, `bytes` long. The first rank creates the memory, filled with zeros;
  // the others wait until the first rank has called publish(), for at most about 2 s, and open the memory. The
  // IdRendezvous owns the descriptor.
  ncclResult_t open(int nranks, size_t bytes, int* memory, bool* first);
  // Called by the first rank when it has initialised the start of the memory (`ready`), or has failed to. After a
  // failure the next rank that calls open() is the first.
  void publish(bool ready);
  // Called when the memory is mapped. Only the first rank keeps its descriptor, through which the others open the
  // memory.
  void mapped(bool first) {
    if (!first) memory_.reset();
  }
  // Called when all ranks have joined (`served`), or never will (`given_up`): marks the id as used up and closes the
  // descriptor.
  void end(Phase how);

  const unsigned char* nonce() const { return nonce_; }

 private:
  ncclResult_t error_of_ended_id(Phase phase) const;
  ncclResult_t create_memory(int nranks, size_t bytes);
  ncclResult_t open_shared_memory(uint64_t word, int nranks, size_t bytes);

  IdEntry* entry_ = nullptr;
  void* mapping_ = nullptr;  // of another process's table
  unsigned char nonce_[16] = {};
  uint64_t word_ = 0;  // the entry's word in the phase `offered`
  Descriptor memory_;
};

// The bytes of the id by which the ranks of one process find each other; "" if the id is not the host engine's.
std::string key_of(const ncclUniqueId& id);

ncclResult_t create_unique_id(ncclUniqueId* id);
// Withdraws an id that no rank will use any more: a rank that joins with it gets an error.
void withdraw_unique_id(const ncclUniqueId& id);

}  // namespace ncclpy::host
