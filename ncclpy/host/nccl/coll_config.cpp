// Checks of a call's configuration, after the rules that nccl.h gives for each field.
#include "coll_config.hpp"

#include <cstring>

namespace ncclpy::host {
namespace {

constexpr int undefined = NCCL_CONFIG_UNDEF_INT;

ncclResult_t check_range(const char* name, int value, int low, int high) {
  if (value == undefined || (value >= low && value <= high)) return ncclSuccess;
  return fail(ncclInvalidArgument, "Invalid collective config %s attribute value %d", name, value);
}

}  // namespace

ncclResult_t parse_coll_config(const ncclCollConfig_t* given, const ncclConfig_t& comm, cudaEvent_t* launch_event) {
  *launch_event = nullptr;
  if (given == nullptr) return ncclSuccess;
  ncclCollConfig_t config = {};
  size_t size;
  std::memcpy(&size, given, sizeof size);
  std::memcpy(static_cast<void*>(&config), given, size < sizeof config ? size : sizeof config);
  // The first release with this struct ended before the event.
  if (size < offsetof(ncclCollConfig_t, launchCompletionEvent) || config.magic != NCCL_API_MAGIC)
    return fail(ncclInvalidArgument, "ncclCollConfig_t argument not initialized via NCCL_COLLCONFIG_INITIALIZER");
  if (config.version < 23200) config.launchCompletionEvent = nullptr;
  NCCLPY_TRY(check_range("minCTAs", config.minCTAs, 1, INT_MAX));
  NCCLPY_TRY(check_range("maxCTAs", config.maxCTAs, 1, comm.maxCTAs));
  if (config.minCTAs != undefined && config.maxCTAs != undefined && config.minCTAs > config.maxCTAs) {
    return fail(ncclInvalidArgument, "Invalid collective config min/max channels attribute value %d/%d", config.minCTAs,
                config.maxCTAs);
  }
  NCCLPY_TRY(check_range("nvlsCTAs", config.nvlsCTAs, 1, INT_MAX));
  NCCLPY_TRY(check_range("cgaClusterSize", config.cgaClusterSize, 0, INT_MAX));
  NCCLPY_TRY(check_range("forceAlgSelection", config.forceAlgSelection, 0, 1));
  NCCLPY_TRY(check_range("CTAPolicy", config.CTAPolicy, 0, NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO));
  *launch_event = config.launchCompletionEvent;
  return ncclSuccess;
}

}  // namespace ncclpy::host
