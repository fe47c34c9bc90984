// Compare nccl_abi.h with a real nccl.h. nccl_rows.h is written by test_abi.py from the names in nccl_abi.h:
// MACROS, ENUMS, VALUES, STRUCTS, FIELDS and FUNCTIONS, each an X-macro of what the real header has too.
#include <nccl.h>
#if __has_include(<nccl_device.h>)
#include <nccl_device.h>
#endif
#include <climits>
#include <cstdint>
#include <utility>

#include "canonical.h"
#include "nccl_rows.h"

// Both headers define the same macros: the real values are read before nccl_abi.h is included.
#define X(name) static const long double real_##name = static_cast<long double>(name);
MACROS(X)
#undef X
// The values that NCCL's initialisers write, where it has one.
template <class T> const T* initial() { return nullptr; }
#define INITIAL(T, initializer) \
  template <> const T* initial<T>() { \
    static const T value = initializer; \
    return &value; \
  }
INITIAL(ncclConfig_t, NCCL_CONFIG_INITIALIZER)
#ifdef NCCL_SIM_INFO_INITIALIZER
INITIAL(ncclSimInfo_t, NCCL_SIM_INFO_INITIALIZER)
#endif
#ifdef NCCL_COLLCONFIG_INITIALIZER
INITIAL(ncclCollConfig_t, NCCL_COLLCONFIG_INITIALIZER)
#endif
#ifdef NCCL_ENCRYPTION_CONFIG_INITIALIZER
INITIAL(ncclEncryptionConfig_t, NCCL_ENCRYPTION_CONFIG_INITIALIZER)
#endif
#include "nccl_undefine.h"

namespace ours {
#include "nccl_abi.h"
#define X(since, ret, name, params) using type_of_##name = ret params;
NCCLPY_NCCL_FUNCTIONS(X)
#undef X
}  // namespace ours

template <class Field> void show_initial(const char* what, const Field& value) {
  if constexpr (std::is_pointer_v<Field>) std::printf("initial %s %s\n", what, value ? "something" : "null");
  else if constexpr (std::is_arithmetic_v<Field>) std::printf("initial %s %.0Lf\n", what, static_cast<long double>(value));
}

// A field that the real struct lacks is reported, not compared.
#define X(T, field) \
  template <class Real, class = void> struct compare_##T##_##field { \
    static void run() { std::printf("lacks " #T "." #field "\n"); } \
  }; \
  template <class Real> struct compare_##T##_##field<Real, std::void_t<decltype(std::declval<Real>().field)>> { \
    static void run() { \
      compare("offset of " #T "." #field, offsetof(Real, field), offsetof(ours::T, field)); \
      compare("size of " #T "." #field, sizeof(std::declval<Real>().field), sizeof(std::declval<ours::T>().field)); \
      compare_type<decltype(Real::field), decltype(ours::T::field)>(#T "." #field); \
      if (auto* value = initial<Real>()) show_initial(#T "." #field, value->field); \
    } \
  };
FIELDS(X)
#undef X

int main() {
  std::printf("version %d\n", NCCL_VERSION_CODE);
#define X(name) compare(#name, real_##name, static_cast<long double>(name));
  MACROS(X)
#undef X
#define X(name) compare_type<::name, ours::name>(#name);
  ENUMS(X)
#undef X
#define X(name) compare(#name, ::name, ours::name);
  VALUES(X)
#undef X
  // An older release has only a prefix of the struct; test_abi.py judges.
#define X(name) std::printf("size %s %zu %zu\n", #name, sizeof(::name), sizeof(ours::name));
  STRUCTS(X)
#undef X
#define X(T, field) compare_##T##_##field<::T>::run();
  FIELDS(X)
#undef X
#define X(name) compare_type<decltype(::name), ours::type_of_##name>(#name);
  FUNCTIONS(X)
#undef X
  return differences ? 1 : 0;
}
