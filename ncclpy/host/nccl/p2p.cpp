// Sends and receives.
#include "comm.hpp"
namespace ncclpy::host {
void run_p2p(Comm&, const Operation*, size_t) {}
}  // namespace ncclpy::host
