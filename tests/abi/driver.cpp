// Compare driver_abi.h with a real cuda.h. driver_rows.h is written by test_abi.py from the names in driver_abi.h.
// The switch below makes cuda.h declare every version of a function under its symbol.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cstdint>

#include "canonical.h"
#include "driver_rows.h"

#define X(name) static const long double real_##name = (long double)(uintptr_t)(name);
MACROS(X)
#undef X
#include "driver_undefine.h"

namespace ours {
#include "driver_abi.h"
#define X(ret, name, params) using type_of_##name = ret params;
NCCLPY_DRIVER_FUNCTIONS(X)
#undef X
}  // namespace ours

int main() {
#define X(name) compare(#name, real_##name, (long double)(uintptr_t)(name));
  {
    using namespace ours;
    MACROS(X)
  }
#undef X
#define X(name) compare_type<::name, ours::name>(#name);
  ENUMS(X)
#undef X
#define X(name) compare(#name, ::name, ours::name);
  VALUES(X)
#undef X
#define X(name) compare("size of " #name, sizeof(::name), sizeof(ours::name));
  STRUCTS(X)
#undef X
#define X(name) compare_type<decltype(::name), ours::type_of_##name>(#name);
  FUNCTIONS(X)
#undef X
  return differences ? 1 : 0;
}
