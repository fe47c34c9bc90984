// Reports, for error texts of deadlines, which ranks have arrived where a communicator waits, and which have not.
#pragma once

#include <string>
#include <vector>

#include "comm.hpp"

namespace ncclpy::host {

// "AllReduce: arrived: 0, 1; missing: 2 (process 4711, last call AllReduce, 1 before this one, closed)". "" if the
// communicator waits for nothing. Only reads memory: it may be called while other threads are stuck in the
// communicator, and never waits for them.
std::string straggler_report(Comm& comm);

// While an object exists, straggler reports of all ranks show that this rank executes the control call `call`.
class ControlCallScope {
 public:
  ControlCallScope(Comm& comm, uint64_t call);
  ~ControlCallScope();
  ControlCallScope(const ControlCallScope&) = delete;
  ControlCallScope& operator=(const ControlCallScope&) = delete;

 private:
  Comm& comm_;
};

// From set() until the destruction of the object, this rank's straggler report names these ranks as missing.
class AwaitedRanks {
 public:
  AwaitedRanks(Comm& comm, Side side) : comm_(comm), side_(side) {}
  ~AwaitedRanks() {
    if (set_) set({});
  }
  AwaitedRanks(const AwaitedRanks&) = delete;
  AwaitedRanks& operator=(const AwaitedRanks&) = delete;
  void set(std::vector<int> ranks);

 private:
  Comm& comm_;
  const Side side_;
  bool set_ = false;
};

}  // namespace ncclpy::host
