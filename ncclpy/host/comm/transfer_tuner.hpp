// The choice between two transports for large collectives among processes: staging through shared memory, or
// Cross-Memory Attach (CMA, process_vm_readv).
//
// The faster one depends on the operation, its size and the number of ranks, and on the machine: the distance between
// its cores, and the kernel's time for a page. A virtual machine's cores are moved while a program runs, and what was
// twice as fast may then take four times as long. So both transports are measured, the better one is used, and the
// other one is tried again from time to time, which costs about a fiftieth of the time. The result is the same, bit
// for bit.
#pragma once

#include <vector>

#include "segment/segment.hpp"

namespace ncclpy::host {

// Belongs to one communicator, and is used by the rank that decides for all.
class TransferTuner {
 public:
  // Whether the next collective shall use CMA. `prefers` is the choice before anything is measured.
  bool choose_cma(Collective kind, size_t bytes, bool prefers);
  // Records the duration of a collective in seconds, from the arrival of all ranks until this rank had finished.
  void record(Collective kind, size_t bytes, bool cma, double seconds);

 private:
  // Measurements of one kind of collective, for sizes up to the next power of two.
  struct Entry {
    Collective kind;
    int size;  // the exponent of that power
    bool prefers;
    bool uses_cma;          // the current choice
    int remaining;          // collectives until the next choice
    bool on_trial = false;  // chosen to measure it, not because it is better
    bool settling = true;   // the choice has just changed
    int choices = 1;        // choices of the better transport so far, the preferred one at first included
    double costs[2] = {};   // seconds a byte, by uses_cma, of undisturbed collectives; 0: unknown

    void choose_next();
  };
  Entry* find(Collective kind, size_t bytes);

  std::vector<Entry> entries_;
};

}  // namespace ncclpy::host
