// The checks of NCCL's parseCommConfig, in the same order and with the same messages, and what overrides a
// configuration.
#include "config.hpp"

#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace ncclpy::host {
namespace {

constexpr int undefined = NCCL_CONFIG_UNDEF_INT;
constexpr int max_channels = 64;

int version(int major, int minor, int patch) { return major * 10000 + minor * 100 + patch; }

ncclConfig_t undefined_config() {
  ncclConfig_t config = {};
  config.size = sizeof config;
  config.magic = NCCL_API_MAGIC;
  config.version = NCCLPY_ABI_VERSION;
  for (int* field : {&config.blocking, &config.cgaClusterSize, &config.minCTAs, &config.maxCTAs, &config.splitShare,
                     &config.trafficClass, &config.collnetEnable, &config.CTAPolicy, &config.shrinkShare,
                     &config.nvlsCTAs, &config.nChannelsPerNetPeer, &config.nvlinkCentricSched, &config.graphUsageMode,
                     &config.numRmaCtx, &config.maxP2pPeers, &config.graphStreamOrdering, &config.launchOrderImplicit,
                     &config.numRmaSig, &config.rmaEagerInit, &config.hostCftMode, &config.nvlsHostMode}) {
    *field = undefined;
  }
  return config;
}

void set_default(int& field, int value) {
  if (field == undefined) field = value;
}

void fill_defaults(ncclConfig_t& config) {
  set_default(config.blocking, 1);
  set_default(config.cgaClusterSize, 4);
  set_default(config.minCTAs, 1);
  set_default(config.maxCTAs, max_channels);
  set_default(config.splitShare, 0);
  set_default(config.collnetEnable, 0);
  set_default(config.CTAPolicy, NCCL_CTA_POLICY_DEFAULT);
  set_default(config.shrinkShare, 0);
  set_default(config.nvlinkCentricSched, 0);
  set_default(config.graphUsageMode, 2);
  set_default(config.numRmaCtx, 1);
  set_default(config.numRmaSig, 1);
  set_default(config.graphStreamOrdering, 1);
}

// Like NCCL, adds the lines of NCCL_CONF_FILE to the environment. Variables that are already set are kept.
void read_file_into_environment() {
  const char* const name = std::getenv("NCCL_CONF_FILE");
  if (name == nullptr) return;
  std::ifstream file(name);
  for (std::string line; std::getline(file, line);) {
    const size_t equals = line.find('=');
    if (line[0] != '#' && equals != std::string::npos)
      setenv(line.substr(0, equals).c_str(), line.c_str() + equals + 1, 0);
  }
}

// A value that overrides the configurations of the whole process, or `undefined`.
int override_of(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr || *text == 0) return undefined;
  const long value = std::strtol(text, nullptr, 0);
  return value == 0 || value == 1 ? int(value) : undefined;
}

// Environment variables override `blocking` and `splitShare`; they are read once, as by NCCL.
void override(ncclConfig_t& config) {
  struct Overrides {
    int blocking, split_share;
  };
  static const Overrides all = [] {
    read_file_into_environment();
    return Overrides{override_of("NCCL_COMM_BLOCKING"), override_of("NCCL_COMM_SPLIT_SHARE_RESOURCES")};
  }();
  if (all.blocking != undefined) config.blocking = all.blocking;
  if (all.split_share != undefined) config.splitShare = all.split_share;
}

}  // namespace

ncclResult_t check_range(const char* kind, const char* name, int value, int low, int high) {
  if (value == undefined || (value >= low && value <= high)) return ncclSuccess;
  return fail(ncclInvalidArgument, "Invalid %s %s attribute value %d", kind, name, value);
}

ncclConfig_t default_config() {
  ncclConfig_t config = undefined_config();
  fill_defaults(config);
  override(config);
  return config;
}

ncclResult_t parse_config(const ncclConfig_t* given, ncclConfig_t* config, std::string* name) {
  *config = undefined_config();
  size_t size;
  std::memcpy(&size, given, sizeof size);
  if (size > sizeof *config) size = sizeof *config;
  config->magic = 0;
  std::memcpy(static_cast<void*>(config), given, size);
  if (config->magic != NCCL_API_MAGIC)
    return fail(ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  // In the struct of an older release the place of a newer field may be padding: such fields count as undefined.
  const int caller_version = int(config->version);
  if (caller_version < version(2, 14, 0)) config->blocking = undefined;
  if (caller_version < version(2, 17, 0)) {
    config->cgaClusterSize = config->minCTAs = config->maxCTAs = undefined;
    config->netName = nullptr;
  }
  if (caller_version < version(2, 25, 0)) config->trafficClass = undefined;
  if (caller_version < version(2, 27, 0)) {
    config->collnetEnable = config->CTAPolicy = config->shrinkShare = config->nvlsCTAs = undefined;
    config->commName = nullptr;
  }
  if (caller_version < version(2, 28, 0)) config->nChannelsPerNetPeer = config->nvlinkCentricSched = undefined;
  if (caller_version < version(2, 29, 0)) config->graphUsageMode = config->numRmaCtx = undefined;
  if (caller_version < version(2, 30, 0)) config->maxP2pPeers = undefined;
  if (caller_version < version(2, 30, 5)) config->graphStreamOrdering = undefined;
  if (caller_version < version(2, 31, 0))
    config->launchOrderImplicit = config->numRmaSig = config->rmaEagerInit = config->hostCftMode = undefined;
  if (caller_version < version(2, 32, 0)) config->nvlsHostMode = undefined;

  NCCLPY_TRY(check_range("config", "blocking", config->blocking, 0, 1));
  NCCLPY_TRY(check_range("config", "cgaClusterSize", config->cgaClusterSize, 0, INT_MAX));
  if ((config->minCTAs != undefined && config->minCTAs <= 0) || (config->maxCTAs != undefined && config->maxCTAs <= 0) ||
      config->minCTAs > (config->maxCTAs == undefined ? INT_MAX : config->maxCTAs)) {
    return fail(ncclInvalidArgument, "Invalid config min/max channels attribute value %d/%d", config->minCTAs,
                config->maxCTAs);
  }
  NCCLPY_TRY(check_range("config", "splitShare", config->splitShare, 0, 1));
  NCCLPY_TRY(check_range("config", "collnetEnable", config->collnetEnable, 0, 1));
  NCCLPY_TRY(check_range("config", "CTAPolicy", config->CTAPolicy, 0, NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO));
  NCCLPY_TRY(check_range("config", "shrinkShare", config->shrinkShare, 0, 1));
  NCCLPY_TRY(check_range("config", "nvlsCTAs", config->nvlsCTAs, 1, INT_MAX));
  NCCLPY_TRY(check_range("config", "nChannelsPerNetPeer", config->nChannelsPerNetPeer, 1, max_channels));
  NCCLPY_TRY(check_range("config", "nvlinkCentricSched", config->nvlinkCentricSched, 0, 1));
  NCCLPY_TRY(check_range("config", "graphUsageMode", config->graphUsageMode, 0, 2));
  NCCLPY_TRY(check_range("config", "numRmaCtx", config->numRmaCtx, 0, INT_MAX));
  NCCLPY_TRY(check_range("config", "maxP2pPeers", config->maxP2pPeers, 1, INT_MAX));
  NCCLPY_TRY(check_range("config", "graphStreamOrdering", config->graphStreamOrdering, 0, 1));
  NCCLPY_TRY(check_range("config", "launchOrderImplicit", config->launchOrderImplicit, 0, 1));
  NCCLPY_TRY(check_range("config", "numRmaSig", config->numRmaSig, 0, INT_MAX));
  NCCLPY_TRY(check_range("config", "rmaEagerInit", config->rmaEagerInit, 0, 1));
  if (config->commName != nullptr) *name = config->commName;
  config->netName = nullptr;
  config->commName = nullptr;
  fill_defaults(*config);
  override(*config);
  return ncclSuccess;
}

}  // namespace ncclpy::host
