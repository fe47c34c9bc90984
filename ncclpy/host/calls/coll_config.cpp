// Checks of a call's configuration, by the rules that nccl.h gives for each field.
#include "coll_config.hpp"

#include <climits>
#include <cstddef>
#include <cstring>

#include "config.hpp"

namespace ncclpy::host {
namespace {

constexpr int undefined = NCCL_CONFIG_UNDEF_INT;
constexpr char kind[] = "collective config";

}  // namespace

ncclResult_t parse_coll_config(const ncclCollConfig_t* given, const ncclConfig_t& comm, cudaEvent_t* launch_event) {
  *launch_event = nullptr;
  if (given == nullptr) return ncclSuccess;
  ncclCollConfig_t config = {};
  size_t size;
  std::memcpy(&size, given, sizeof size);
  std::memcpy(static_cast<void*>(&config), given, size < sizeof config ? size : sizeof config);
  // The struct of the first release ends before launchCompletionEvent, which is NULL then.
  if (size < offsetof(ncclCollConfig_t, launchCompletionEvent) || config.magic != NCCL_API_MAGIC)
    return fail(ncclInvalidArgument, "ncclCollConfig_t argument not initialized via NCCL_COLLCONFIG_INITIALIZER");
  NCCLPY_TRY(check_range(kind, "minCTAs", config.minCTAs, 1, INT_MAX));
  NCCLPY_TRY(check_range(kind, "maxCTAs", config.maxCTAs, 1, comm.maxCTAs));
  if (config.minCTAs != undefined && config.maxCTAs != undefined && config.minCTAs > config.maxCTAs) {
    return fail(ncclInvalidArgument, "Invalid collective config min/max channels attribute value %d/%d", config.minCTAs,
                config.maxCTAs);
  }
  NCCLPY_TRY(check_range(kind, "nvlsCTAs", config.nvlsCTAs, 1, INT_MAX));
  NCCLPY_TRY(check_range(kind, "cgaClusterSize", config.cgaClusterSize, 0, INT_MAX));
  NCCLPY_TRY(check_range(kind, "forceAlgSelection", config.forceAlgSelection, 0, 1));
  NCCLPY_TRY(check_range(kind, "CTAPolicy", config.CTAPolicy, 0, NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO));
  *launch_event = config.launchCompletionEvent;
  return ncclSuccess;
}

}  // namespace ncclpy::host
