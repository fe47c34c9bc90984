// Runs collectives of given durations, and prints how many of each row use Cross-Memory Attach (CMA). Arguments:
// whether CMA is preferred at first, then rows of a number of collectives and their microseconds without and with CMA;
// 0 cannot be measured.
#include <cstdio>
#include <cstdlib>

#include "comm/transfer_tuner.hpp"

using ncclpy::host::Collective;

int main(int count, char** arguments) {
  ncclpy::host::TransferTuner tuner;
  const bool prefers = std::atoi(arguments[1]) != 0;
  for (int at = 2; at + 2 < count; at += 3) {
    const int n = std::atoi(arguments[at]);
    const double microseconds[2] = {std::atof(arguments[at + 1]), std::atof(arguments[at + 2])};
    int second = 0;
    for (int i = 0; i < n; i++) {
      const bool cma = tuner.choose_cma(Collective::reduce, 1 << 20, prefers);
      second += cma;
      double took = microseconds[cma];
      if (i % 50 == 49 || i % 3 == 1) took *= 100;  // held up by another program
      // The collectives have several sizes of one class.
      const size_t bytes = (1 << 20) - size_t(i % 5) * 100000;
      if (took > 0) tuner.record(Collective::reduce, bytes, cma, took * 1e-6 * double(bytes) / (1 << 20));
      // Durations of other collectives, and of the transport that was not chosen, change nothing.
      tuner.record(Collective::reduce, 1 << 20, !cma, 1e-9);
      tuner.record(Collective::all_reduce, 1 << 20, cma, 1e-9);
      tuner.record(Collective::reduce, 1 << 22, cma, 1e-9);
    }
    std::printf("%d\n", second);
  }
}
