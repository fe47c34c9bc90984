// A library with NCCL's ABI that only records how it is called.
//
// Every function of nccl_abi.h is exported. Each call records one JSON object, with its arguments as seen in C and
// whether the caller held Python's GIL, and fills its out-parameters with 70 + their position. The test reads it.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>

#include "nccl_abi.h"

#define EXPORT __attribute__((visibility("default")))

extern "C" {
EXPORT int recorder_result = 0;  // the result of functions that return an ncclResult_t
EXPORT int recorder_defer = 0;  // keep the address of a handle instead of writing it, as in a nonblocking call
EXPORT void** recorder_place = nullptr;
}
static std::string last;

extern "C" EXPORT const char* recorder_last() { return last.c_str(); }
extern "C" EXPORT void recorder_write(uintptr_t handle) { *recorder_place = reinterpret_cast<void*>(handle); }

namespace {

std::string quoted(const char* text) { return text ? '"' + std::string(text) + '"' : "null"; }
template <class T>
std::string number(T value) { return std::to_string(value); }
std::string address(const void* p) { return number(reinterpret_cast<uintptr_t>(p)); }

template <class T, class = std::enable_if_t<std::is_integral_v<T> || std::is_enum_v<T>>>
std::string seen(int, T value) {
  if constexpr (std::is_enum_v<T>) return number(static_cast<long long>(value));
  else return number(value);
}
std::string seen(int, const char* text) { return quoted(text); }
std::string seen(int, const ncclUniqueId& id) { return "\"id " + number(static_cast<unsigned char>(id.internal[127])) + '"'; }
std::string seen(int n, const ncclUniqueId* id) { return id ? seen(n, *id) : "null"; }
std::string seen(int n, ncclUniqueId* id) {
  std::string text = seen(n, *id);
  std::memset(id, 70 + n, sizeof *id);
  return text;
}
std::string seen(int, ncclTeam_t team) {
  return "[" + number(team.nRanks) + "," + number(team.rank) + "," + number(team.stride) + "]";
}
std::string seen(int, ncclMultimemHandle_t handle) { return address(handle.mcBasePtr); }

#define F(field) "\"" #field "\":" + number(c->field) + ","
#define P(field) "\"" #field "\":" + address(c->field) + ","
#define S(field) "\"" #field "\":" + quoted(c->field) + ","
std::string seen(int, ncclConfig_t* c) {
  if (!c) return "null";
  return "{" F(size) F(magic) F(version) F(blocking) F(cgaClusterSize) F(minCTAs) F(maxCTAs) S(netName) F(splitShare)
      F(trafficClass) S(commName) F(collnetEnable) F(CTAPolicy) F(shrinkShare) F(nvlsCTAs) F(nChannelsPerNetPeer)
      F(nvlinkCentricSched) F(graphUsageMode) F(numRmaCtx) F(maxP2pPeers) F(graphStreamOrdering)
      F(launchOrderImplicit) F(numRmaSig) F(rmaEagerInit) F(hostCftMode) "\"nvlsHostMode\":" + number(c->nvlsHostMode) + "}";
}
std::string seen(int, const ncclCollConfig_t* c) {
  return "{" F(size) F(magic) F(version) P(ext) F(minCTAs) F(maxCTAs) F(nvlsCTAs) F(cgaClusterSize) S(algSelection)
      F(forceAlgSelection) F(CTAPolicy) F(userProfilerTag) "\"launchCompletionEvent\":" +
      address(c->launchCompletionEvent) + "}";
}
std::string seen(int, const ncclEncryptionConfig_t* c) {
  return "{" F(size) F(magic) F(version) F(mode) "\"psk\":" + quoted(c->psk) + "}";
}
std::string seen(int n, ncclSimInfo_t* c) {
  c->estimatedTime = 70.5f + n;
  return "{" F(size) F(magic) "\"version\":" + number(c->version) + "}";
}
std::string seen(int n, ncclCommProperties_t* c) {
  c->rank = 70 + n;
  c->commHash = 7000000000000000000u;
  c->ginSupport[63] = true;
  c->cftCountedSupport = true;
  return "{" F(size) F(magic) "\"version\":" + number(c->version) + "}";
}
#undef F
#undef P
#undef S
std::string seen(int, ncclWaitSignalDesc_t* d) {
  return "[" + number(d->opCnt) + "," + number(d->peer) + "," + number(d->sigIdx) + "," + number(d->ctx) + "]";
}
std::string seen(int, const int* list) { return list ? number(list[0]) : "null"; }
std::string seen(int, const char** text) {
  static const std::string value(99, 'V');
  *text = value.c_str();
  return "\"out\"";
}
std::string seen(int, const char*** table) {
  static const char* keys[100] = {"FIRST", "SECOND"};
  for (int i = 2; i < 100; ++i) keys[i] = "MORE";
  *table = keys;
  return "\"out\"";
}
// A number to fill. The old value is recorded, since int* excludeRanksList has the same type as int* count.
template <class T, class = std::enable_if_t<std::is_integral_v<T> || std::is_enum_v<T>>>
std::string seen(int n, T* out) {
  std::string old = seen(n, *out);
  *out = static_cast<T>(70 + n);
  return "\"out " + old + "\"";
}
// A handle to fill.
template <class T>
std::string seen(int n, T** out) {
  recorder_place = reinterpret_cast<void**>(out);
  if (!recorder_defer) *recorder_place = reinterpret_cast<void*>(uintptr_t(70 + n));
  return "\"out\"";
}
// An opaque handle or a buffer.
std::string seen(int, const void* p) { return address(p); }
template <class T, class = std::void_t<>>
std::string seen(int, T* p, std::enable_if_t<!std::is_integral_v<T> && !std::is_enum_v<T>>* = nullptr) {
  return address(p);
}

int gil_held() {
  static auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check ? check() : -1;
}

template <class Tag, class Function>
struct Recorder;
template <class Tag, class R, class... A>
struct Recorder<Tag, R(A...)> {
  static R call(A... args) {
    std::string list;
    int n = 0;
    ((list += (n ? "," : "") + seen(n, args), ++n), ...);
    last = "{\"function\":" + quoted(Tag::symbol) + ",\"gil\":" + number(gil_held()) + ",\"args\":[" + list + "]}";
    if constexpr (std::is_same_v<R, ncclResult_t>) return static_cast<ncclResult_t>(recorder_result);
    else if constexpr (std::is_same_v<R, const char*>) return "text";
    else if constexpr (std::is_same_v<R, ncclTeam_t>) return {7, 8, 9};
    else if constexpr (std::is_same_v<R, int>) return 77;
  }
};

// Called while the library is loaded and by ncclpy.bindings.get_version.
template <class Tag>
struct Recorder<Tag, ncclResult_t(int*)> {
  static ncclResult_t call(int* version) {
    last = "{\"function\":\"ncclGetVersion\",\"gil\":" + number(gil_held()) + ",\"args\":[\"out\"]}";
    const char* asked = std::getenv("RECORDER_VERSION");
    *version = asked ? std::atoi(asked) : NCCLPY_ABI_VERSION;
    return ncclSuccess;
  }
};

}  // namespace

// The exported name is an indirect function that resolves to its recorder, so that parameter lists need no parsing.
#define ROW(since, ret, name, params) \
  namespace { struct tag_##name { static constexpr const char* symbol = #name; }; } \
  extern "C" __attribute__((used)) void* resolve_##name() { \
    return reinterpret_cast<void*>(&Recorder<tag_##name, ret params>::call); \
  } \
  extern "C" EXPORT ret name params __attribute__((ifunc("resolve_" #name)));
NCCLPY_NCCL_FUNCTIONS(ROW)
