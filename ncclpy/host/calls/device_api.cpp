// The device-side interface, for kernels on a GPU. The host engine has no such kernels and returns an error.
#include "base/errors.hpp"

namespace ncclpy::host {
namespace {

ncclResult_t no_device_side(const char* function) {
  return fail(ncclInvalidUsage,
              "%s : this is for code that runs on a GPU, and the host engine runs none; the host's collectives, "
              "windows and one-sided calls are supported",
              function);
}

}  // namespace
}  // namespace ncclpy::host

using ncclpy::host::no_device_side;

ncclResult_t ncclDevCommCreate(ncclComm_t, const ncclDevCommRequirements_t*, ncclDevComm_t*) {
  return no_device_side("ncclDevCommCreate");
}

ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm_t*) { return no_device_side("ncclDevCommDestroy"); }

ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t, size_t, void**) {
  return no_device_side("ncclGetLsaMultimemDevicePointer");
}

ncclResult_t ncclGetMultimemDevicePointer(ncclWindow_t, size_t, ncclMultimemHandle_t, void**) {
  return no_device_side("ncclGetMultimemDevicePointer");
}

ncclResult_t ncclGetMultimemDeviceLeInfo(ncclWindow_t, size_t, ncclCftLeId*, size_t*) {
  return no_device_side("ncclGetMultimemDeviceLeInfo");
}

ncclResult_t ncclGetCftDeviceLeInfo(ncclWindow_t, size_t, int, ncclTeam_t, ncclCftLeId*, size_t*) {
  return no_device_side("ncclGetCftDeviceLeInfo");
}

ncclResult_t ncclGetPeerDeviceLeInfo(ncclWindow_t, size_t, int, ncclCftLeId*, size_t*) {
  return no_device_side("ncclGetPeerDeviceLeInfo");
}
