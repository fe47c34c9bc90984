// Runs collectives that take so long, and prints how many of a thousand go the second way. Arguments: whether that is what is
// begun with, then rows of a number of collectives, and the microseconds that the first way and the second take. In each row
// but the first a third of what is printed stands for how soon a change is seen: it counts all, not the last thousand.
#include <cstdio>
#include <cstdlib>

#include "nccl/ways.hpp"

using ncclpy::host::Collective;

int main(int count, char** arguments) {
  ncclpy::host::Ways ways;
  const bool prefers = std::atoi(arguments[1]) != 0;
  for (int at = 2; at + 2 < count; at += 3) {
    const int n = std::atoi(arguments[at]);
    const double microseconds[2] = {std::atof(arguments[at + 1]), std::atof(arguments[at + 2])};
    int second = 0;
    for (int i = 0; i < n; i++) {
      const bool way = ways.pulls(Collective::reduce, 1 << 20, prefers);
      second += way;
      double took = microseconds[way];
      if (i % 50 == 49) took *= 100;  // another program
      ways.took(Collective::reduce, 1 << 20, way, took * 1e-6);
      // What others take, and what could not be as was wanted, changes nothing.
      ways.took(Collective::reduce, 1 << 20, !way, 1e-9);
      ways.took(Collective::all_reduce, 1 << 20, way, 1e-9);
      ways.took(Collective::reduce, 1 << 22, way, 1e-9);
    }
    std::printf("%d\n", second);
  }
}
