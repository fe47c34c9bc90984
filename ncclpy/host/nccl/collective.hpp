// The two ways in which the data of a collective move, once all ranks have arrived and agree.
#pragma once

#include "comm.hpp"

namespace ncclpy::host {

// All ranks are threads of one process: everyone reads and writes the others' buffers.
void run_direct(Comm& comm, int parity);

}  // namespace ncclpy::host
