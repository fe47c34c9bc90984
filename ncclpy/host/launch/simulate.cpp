// The cost model behind ncclGroupSimulateEnd.
#include "simulate.hpp"

#include <cstring>

#include "base/errors.hpp"

namespace ncclpy::host {
namespace {

constexpr double launch_us = 3.0;
constexpr double operation_us = 1.0;
constexpr double bytes_per_us = 4000.0;

// Bytes that pass the busiest rank's link, as a multiple of count * size.
double traffic(const Operation& operation, int nranks) {
  if (operation.kind == Operation::signal || operation.kind == Operation::wait_signal) return 0.0;
  if (operation.kind != Operation::collective) return 1.0;
  const double others = nranks - 1;
  switch (operation.collective_kind) {
    case Collective::all_reduce: return 2.0 * others / nranks;
    case Collective::broadcast:
    case Collective::reduce: return nranks > 1 ? 1.0 : 0.0;
    case Collective::all_gather:
    case Collective::reduce_scatter:
    case Collective::all_to_all:
    case Collective::gather:
    case Collective::scatter: return others;
  }
  return 0.0;
}

}  // namespace

double estimate(const std::vector<Operation>& operations, int nranks) {
  double microseconds = operations.empty() ? 0.0 : launch_us;
  for (const Operation& operation : operations) {
    const double bytes = double(operation.count) * double(size_of(operation.dtype));
    microseconds += operation_us * nranks + bytes * traffic(operation, nranks) / bytes_per_us;
  }
  return microseconds;
}

ncclResult_t check_sim_info(const ncclSimInfo_t* info) {
  size_t size;
  std::memcpy(&size, info, sizeof size);
  if (size < offsetof(ncclSimInfo_t, version) || info->magic != NCCLPY_SIM_INFO_MAGIC)
    return fail(ncclInvalidArgument, "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER");
  return ncclSuccess;
}

void set_estimated_time(ncclSimInfo_t* info, double microseconds) {
  size_t size;
  std::memcpy(&size, info, sizeof size);
  if (size >= offsetof(ncclSimInfo_t, estimatedTime) + sizeof info->estimatedTime)
    info->estimatedTime = float(microseconds);
}

}  // namespace ncclpy::host
