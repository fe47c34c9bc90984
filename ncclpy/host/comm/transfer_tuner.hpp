// Which of two ways the data of large collectives take: in steps through the segment, or read where they lie (pulled).
//
// Which takes less time depends on the operation, its size and the number of ranks, and on the machine: how far its cores are
// from each other, and how long the kernel takes for a page. A virtual machine's cores are moved while a program runs, and what
// was twice as fast may then take four times as long. So both ways are tried, the better one is taken, and the other one now
// and then, which costs about a fiftieth of the time. The result is the same, bit for bit.
#pragma once

#include <vector>

#include "segment/segment.hpp"

namespace ncclpy::host {

// Of one communicator, at a rank that decides for all.
class TransferTuner {
 public:
  // Whether the next one is to be pulled. `prefers` is what it begins with, before anything is known.
  bool choose_cma(Collective kind, size_t bytes, bool prefers);
  // What one of them took, in seconds, from when all had come until this rank was through.
  void record(Collective kind, size_t bytes, bool cma, double seconds);

 private:
  // What is known of one kind and of sizes up to the next power of two.
  struct Entry {
    Collective kind;
    int size;
    bool prefers;
    bool uses_cma;               // that is taken now,
    int remaining;               // so often yet
    bool on_trial = false;    // to learn what it takes, and not because it is the better one
    bool settling = true;   // it has just been changed to
    int rows = 1;           // so often it was, the one that is preferred at first
    double costs[2] = {};   // seconds a byte that each way takes, when nothing holds it up; 0 is not known

    void choose_next();  // what is taken next, and how often
  };
  Entry* find(Collective kind, size_t bytes);

  std::vector<Entry> entries_;
};

}  // namespace ncclpy::host
