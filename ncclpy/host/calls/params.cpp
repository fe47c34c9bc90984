// Parameters: settings of the whole process, made by the environment or by a call. The parameters here are the
// engine's own. Of NCCL's variables the engine reads NCCL_HOSTID (segment.cpp), NCCL_CONF_FILE, and two that override
// configurations (config.cpp); the others control transports and algorithms that the engine does not have.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "driver/device.hpp"
#include "driver/memory_use.hpp"
#include "faults/strict_ends.hpp"
#include "launch/group.hpp"
#include "segment/abort_corruption.hpp"
#include "transports/collective.hpp"
#include "transports/peer_memory.hpp"

namespace ncclpy::host {
namespace {

std::atomic<int> encryption_mode{NCCL_ENCRYPTION_MODE_NONE};

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// A parameter. Its value is a 32-bit integer (`number`) or a text (`text`); the other function is null.
struct Parameter {
  const char* key;
  int32_t (*number)();
  std::string (*text)();

  std::string to_string() const { return number != nullptr ? std::to_string(number()) : text(); }
};

const Parameter parameters[] = {
    {"NCCLPY_FAULTS", nullptr, [] { return environment("NCCLPY_FAULTS"); }},
    {"NCCLPY_HOST_ABORT_CORRUPTS", [] { return int32_t(abort_corrupts); }, nullptr},
    {"NCCLPY_HOST_CHECKS", [] { return int32_t(checks); }, nullptr},
    {"NCCLPY_HOST_DEVICES", [] { return int32_t(device_count()); }, nullptr},
    {"NCCLPY_HOST_ENCRYPTION", [] { return int32_t(encryption_mode.load()); }, nullptr},
    {"NCCLPY_HOST_READ_PEERS", [] { return int32_t(may_read_peers()); }, nullptr},
    {"NCCLPY_HOST_STRICT_ENDS", [] { return int32_t(strict_ends); }, nullptr},
};

const Parameter* find(const char* key) {
  for (const Parameter& one : parameters) {
    if (std::string_view(one.key) == key) return &one;
  }
  return nullptr;
}

// The parameter of a handle: a handle is the parameter's address.
ncclResult_t unwrap(const char* function, ncclParamHandle_t handle, const void* out, const Parameter** parameter) {
  NCCLPY_TRY(check_pointer(out, function, "out"));
  for (const Parameter& one : parameters) {
    if (static_cast<const void*>(&one) == handle) {
      *parameter = &one;
      return ncclSuccess;
    }
  }
  return fail(ncclInvalidArgument, "%s : %p is not a handle of ncclParamBind", function, static_cast<void*>(handle));
}

ncclResult_t wrong_type(const char* function, const Parameter& parameter) {
  return fail(ncclInvalidArgument, "%s : %s is %s", function, parameter.key,
              parameter.number != nullptr ? "a signed integer of 32 bits" : "a text");
}

ncclResult_t no_such_type(const char* function, ncclParamHandle_t handle, const void* out) {
  return guarded(function, [&] {
    const Parameter* parameter = nullptr;
    NCCLPY_TRY(unwrap(function, handle, out, &parameter));
    return wrong_type(function, *parameter);
  });
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclParamBind(ncclParamHandle_t* out, const char* key) {
  NCCLPY_TRY(check_pointer(out, "ncclParamBind", "out"));
  NCCLPY_TRY(check_pointer(key, "ncclParamBind", "key"));
  const Parameter* const found = find(key);
  if (found == nullptr) return fail(ncclInvalidArgument, "ncclParamBind : there is no parameter \"%s\"", key);
  *out = reinterpret_cast<ncclParamHandle_t>(const_cast<Parameter*>(found));
  return ncclSuccess;
}

ncclResult_t ncclParamGetI32(ncclParamHandle_t handle, int32_t* out) {
  return guarded("ncclParamGetI32", [&] {
    const Parameter* parameter = nullptr;
    NCCLPY_TRY(unwrap("ncclParamGetI32", handle, out, &parameter));
    if (parameter->number == nullptr) return wrong_type("ncclParamGetI32", *parameter);
    *out = parameter->number();
    return ncclSuccess;
  });
}

#define NCCLPY_NO_SUCH_TYPE(name, type) \
  ncclResult_t name(ncclParamHandle_t handle, type* out) { return no_such_type(#name, handle, out); }
NCCLPY_NO_SUCH_TYPE(ncclParamGetI8, int8_t)
NCCLPY_NO_SUCH_TYPE(ncclParamGetI16, int16_t)
NCCLPY_NO_SUCH_TYPE(ncclParamGetI64, int64_t)
NCCLPY_NO_SUCH_TYPE(ncclParamGetU8, uint8_t)
NCCLPY_NO_SUCH_TYPE(ncclParamGetU16, uint16_t)
NCCLPY_NO_SUCH_TYPE(ncclParamGetU32, uint32_t)
NCCLPY_NO_SUCH_TYPE(ncclParamGetU64, uint64_t)
#undef NCCLPY_NO_SUCH_TYPE

ncclResult_t ncclParamGetStr(ncclParamHandle_t handle, const char** out) {
  return guarded("ncclParamGetStr", [&] {
    thread_local std::string kept;
    const Parameter* parameter = nullptr;
    NCCLPY_TRY(unwrap("ncclParamGetStr", handle, out, &parameter));
    if (parameter->text == nullptr) return wrong_type("ncclParamGetStr", *parameter);
    kept = parameter->text();
    *out = kept.c_str();
    return ncclSuccess;
  });
}

ncclResult_t ncclParamGet(ncclParamHandle_t handle, void* out, int space, int* length) {
  return guarded("ncclParamGet", [&] {
    const Parameter* parameter = nullptr;
    NCCLPY_TRY(unwrap("ncclParamGet", handle, out, &parameter));
    int32_t number = 0;
    std::string bytes;
    if (parameter->number != nullptr) {
      number = parameter->number();
      bytes.assign(reinterpret_cast<const char*>(&number), sizeof number);
    } else {
      bytes = parameter->text();
      bytes.push_back(0);
    }
    if (space < 0 || size_t(space) < bytes.size()) {
      return fail(ncclInvalidArgument, "ncclParamGet : %s takes %zu bytes, there is space for %d", parameter->key,
                  bytes.size(), space);
    }
    std::memcpy(out, bytes.data(), bytes.size());
    if (length != nullptr) *length = int(bytes.size());
    return ncclSuccess;
  });
}

ncclResult_t ncclParamGetParameter(const char* key, const char** value, int* length) {
  return guarded("ncclParamGetParameter", [&] {
    thread_local std::string kept;
    NCCLPY_TRY(check_pointer(key, "ncclParamGetParameter", "key"));
    NCCLPY_TRY(check_pointer(value, "ncclParamGetParameter", "value"));
    NCCLPY_TRY(check_pointer(length, "ncclParamGetParameter", "valueLen"));
    *value = nullptr;
    *length = 0;
    const Parameter* const found = find(key);
    if (found == nullptr) return fail(ncclInvalidArgument, "ncclParamGetParameter : there is no parameter \"%s\"", key);
    kept = found->to_string();
    *value = kept.c_str();
    *length = int(kept.size());
    return ncclSuccess;
  });
}

ncclResult_t ncclParamGetAllParameterKeys(const char*** table, int* length) {
  return guarded("ncclParamGetAllParameterKeys", [&] {
    thread_local std::vector<const char*> keys;
    NCCLPY_TRY(check_pointer(table, "ncclParamGetAllParameterKeys", "table"));
    NCCLPY_TRY(check_pointer(length, "ncclParamGetAllParameterKeys", "tableLen"));
    keys.clear();
    for (const Parameter& one : parameters) keys.push_back(one.key);
    *table = keys.data();
    *length = int(keys.size());
    return ncclSuccess;
  });
}

void ncclParamDumpAll(void) {
  guarded("ncclParamDumpAll", [] {
    for (const Parameter& one : parameters) std::printf("%s=%s\n", one.key, one.to_string().c_str());
    std::fflush(stdout);
    return ncclSuccess;
  });
}

// There are no sockets to encrypt: the ranks meet in memory of one user. The configuration is checked and its mode
// stored, so that programs with this call run here.
ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t* config) {
  NCCLPY_TRY(check_pointer(config, "ncclSetEncryption", "config"));
  if (config->magic != NCCL_API_MAGIC || config->size < sizeof *config) {
    return fail(ncclInvalidArgument,
                "ncclEncryptionConfig_t argument not initialized via NCCL_ENCRYPTION_CONFIG_INITIALIZER");
  }
  if (config->mode != NCCL_ENCRYPTION_MODE_NONE && config->mode != NCCL_ENCRYPTION_MODE_PSK)
    return fail(ncclInvalidArgument, "ncclSetEncryption : unknown mode %d", config->mode);
  if (config->mode == NCCL_ENCRYPTION_MODE_PSK && (config->psk == nullptr || *config->psk == 0))
    return fail(ncclInvalidArgument, "ncclSetEncryption : NCCL_ENCRYPTION_MODE_PSK needs a key in psk");
  encryption_mode.store(config->mode);
  return ncclSuccess;
}
