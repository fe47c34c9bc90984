// Driver calls about the driver itself, devices and contexts.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "exports.hpp"
#include "memory.hpp"
#include "memory_use.hpp"

using namespace ncclpy::host;

namespace {

std::atomic<bool> was_initialised{false};

constexpr int shown_driver_version = 13000;  // these calls keep the contract of this CUDA version

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

#define NCCLPY_ERROR(name, text) {name, #name, text}
constexpr ErrorText error_names[] = {
    NCCLPY_ERROR(CUDA_SUCCESS, "no error"),
    NCCLPY_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    NCCLPY_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    NCCLPY_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    NCCLPY_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    NCCLPY_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    NCCLPY_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    NCCLPY_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    NCCLPY_ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    NCCLPY_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    NCCLPY_ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    NCCLPY_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    NCCLPY_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    NCCLPY_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    NCCLPY_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    NCCLPY_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    NCCLPY_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    NCCLPY_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    NCCLPY_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    NCCLPY_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    NCCLPY_ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                 "operation would make the legacy stream depend on a capturing blocking stream"),
    NCCLPY_ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    NCCLPY_ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
                 "attempt to terminate a thread-local capture sequence from another thread"),
    NCCLPY_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef NCCLPY_ERROR

const ErrorText* find_error(CUresult code) {
  const auto found = std::find_if(std::begin(error_names), std::end(error_names), [&](auto& e) { return e.code == code; });
  return found == std::end(error_names) ? nullptr : found;
}

// The error text for an invalid NCCLPY_HOST_DEVICES; nullptr if the variable is valid.
const char* environment_error() {
  static const std::string* const error = []() -> std::string* {
    try {
      device_count();
      return nullptr;
    } catch (const std::invalid_argument& wrong) {
      return new std::string(wrong.what());
    }
  }();
  return error == nullptr ? nullptr : error->c_str();
}

// As driver_call, for a body that writes a property of `device` to `out`.
template <class Out, class Body>
CUresult device_call(Out* out, CUdevice device, Body body) {
  return driver_call([&]() -> CUresult {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
    return body();
  });
}

// Refers to every call of NCCLPY_DRIVER_FUNCTIONS, so that the link fails if a call has no definition.
[[gnu::used]] const ncclpy_driver_table all_calls = {
#define NCCLPY_NAME(ret, name, params) name,
    NCCLPY_DRIVER_FUNCTIONS(NCCLPY_NAME)
#undef NCCLPY_NAME
};

}  // namespace

bool ncclpy::host::initialised() { return was_initialised.load(std::memory_order_acquire) && !after_fork(); }

CUresult cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (environment_error() != nullptr) return CUDA_ERROR_NO_DEVICE;
  if (after_fork()) return CUDA_ERROR_NOT_INITIALIZED;
  was_initialised.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = shown_driver_version;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorText* known = find_error(error);
  *name = known == nullptr ? nullptr : known->name;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// CUDA_ERROR_NO_DEVICE occurs only if NCCLPY_HOST_DEVICES is invalid, which the text then explains.
CUresult cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorText* known = find_error(error);
  *text = known == nullptr ? nullptr : known->text;
  if (error == CUDA_ERROR_ILLEGAL_STATE && !last_free_refusal.empty()) *text = last_free_refusal.c_str();
  if (error == CUDA_ERROR_NO_DEVICE && environment_error() != nullptr) *text = environment_error();
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  return driver_call([&] {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = device_count();
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return device_call(device, ordinal, [&] {
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return device_call(name, device, [&] {
    if (length < 1) return CUDA_ERROR_INVALID_VALUE;
    name[device_name(device).copy(name, length - 1)] = '\0';
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return device_call(uuid, device, [&] {
    *uuid = device_uuid(device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return device_call(value, device, [&] {
    switch (attribute) {
      case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        *value = device_pci_address(device).domain;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *value = device_pci_address(device).bus;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        *value = device_pci_address(device).device;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:  // no GPU
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = 0;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  return device_call(bytes, device, [&] {
    *bytes = total_memory();
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return device_call(can, device, [&] {
    if (peer < 0 || peer >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;  // as in CUDA: no device is its own peer
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetPCIBusId(char* busId, int length, CUdevice device) {
  return device_call(busId, device, [&] {
    const std::string id = device_pci_bus_id(device);
    if (length < 0 || static_cast<size_t>(length) <= id.size()) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(busId, id.c_str(), id.size() + 1);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return device_call(context, device, [&] {
    *context = context_of(device);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return driver_call([&] {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = current_context();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return driver_call([&] {
    if (context != nullptr && device_of_context(context) < 0) return CUDA_ERROR_INVALID_CONTEXT;
    set_current_context(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return driver_call([&] {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current_device();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize(void) {
  return driver_call([]() -> CUresult {
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
    const CUresult captured = forbid_captures(current_device());
    if (captured != CUDA_SUCCESS) return captured;
    synchronize_device(current_device());
    return CUDA_SUCCESS;
  });
}

// Priorities are accepted and have no effect: the machine's scheduler treats all threads alike.
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return driver_call([&] {
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
  });
}
