// Checks for ends and deregistrations that NCCL would not survive.
#include "strict_ends.hpp"

#include <cstdio>
#include <cstdlib>

#include "base/switches.hpp"

namespace ncclpy::host {
namespace {

[[noreturn]] void abort_process(const Comm& comm, const char* what) {
  std::fprintf(stderr, "NCCLPY_HOST_STRICT_ENDS: rank %d of %s %s\n", comm.rank, comm.title().c_str(), what);
  std::abort();
}

}  // namespace

const bool strict_ends = is_on("NCCLPY_HOST_STRICT_ENDS");

void check_destroy(Comm& comm) {
  if (!strict_ends || comm.nranks == 1) return;
  std::lock_guard lock(comm.mutex);
  if (!comm.registrations.empty()) {
    abort_process(comm, "ends with registered buffers: NCCL frees its proxies, and then sends them deregistrations");
  }
}

void check_deregister(const Comm& comm) {
  if (strict_ends && comm.nranks > 1 && comm.health.aborted() && !comm.disconnected) {
    abort_process(comm, "deregisters with its abort flag up: NCCL sends the first word of the request, and then no more");
  }
}

}  // namespace ncclpy::host

// Whether (1 or 0) ncclpy may rely on an abort to bring back a thread that is inside a call of the communicator. The
// engine's abort always does that, NCCL's does not; with strict ends the answer is 0, as for NCCL.
extern "C" __attribute__((visibility("default"))) int ncclpyHostAbortPreempts() { return ncclpy::host::strict_ends ? 0 : 1; }
