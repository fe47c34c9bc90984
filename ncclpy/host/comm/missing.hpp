// Who has come to what a communicator is waiting for, and who has not: for people whose deadline has passed.
#pragma once

#include <string>
#include <vector>

#include "comm.hpp"

namespace ncclpy::host {

// "AllReduce: came: 0, 1; missing: 2 (process 4711, last call AllReduce, 1 before this one, closed)". "" if nothing is
// waited for.
// Looks at memory only: it may be asked while other threads are stuck in the communicator, and never waits for them.
std::string who_is_missing(Comm& comm);

// While it lives, the communicator is making a call in which all ranks meet.
class Making {
 public:
  Making(Comm& comm, uint64_t deed);
  ~Making();
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;

 private:
  Comm& comm_;
};

// While it lives and has been told them, the communicator waits for these ranks.
class Awaited {
 public:
  Awaited(Comm& comm, Side side) : comm_(comm), side_(side) {}
  ~Awaited() {
    if (told_) tell({});
  }
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;
  void tell(std::vector<int> ranks);

 private:
  Comm& comm_;
  const Side side_;
  bool told_ = false;
};

}  // namespace ncclpy::host
