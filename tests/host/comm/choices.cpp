// Runs collectives that take so long, and prints how many of each row go the second way. Arguments: whether that is what is
// begun with, then rows of a number of collectives, and the microseconds that the first way and the second take, of which 0
// cannot be measured.
#include <cstdio>
#include <cstdlib>

#include "comm/ways.hpp"

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
      if (i % 50 == 49 || i % 3 == 1) took *= 100;  // another program
      // Of its size each is one of several.
      const size_t bytes = (1 << 20) - size_t(i % 5) * 100000;
      if (took > 0) ways.took(Collective::reduce, bytes, way, took * 1e-6 * double(bytes) / (1 << 20));
      // What others take, and what could not be as was wanted, changes nothing.
      ways.took(Collective::reduce, 1 << 20, !way, 1e-9);
      ways.took(Collective::all_reduce, 1 << 20, way, 1e-9);
      ways.took(Collective::reduce, 1 << 22, way, 1e-9);
    }
    std::printf("%d\n", second);
  }
}
