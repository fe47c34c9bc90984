// Selects the copy of the reduction loops for this processor, once.
#include "reduce.hpp"

namespace ncclpy::host {

void reduce_baseline(const Reduction& reduction);
#if defined(__x86_64__)
void reduce_avx2(const Reduction& reduction);
void reduce_avx512(const Reduction& reduction);
#endif

std::vector<Kernels> usable_kernels() {
  std::vector<Kernels> found = {reduce_baseline};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) found.push_back(reduce_avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    found.push_back(reduce_avx512);
#endif
  return found;
}

void reduce(const Reduction& reduction) {
  static const Kernels kernels = usable_kernels().back();
  kernels(reduction);
}

size_t size_of(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclNumTypes: break;
  }
  return 0;
}

}  // namespace ncclpy::host
