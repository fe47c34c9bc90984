// Driver calls about kernels. The engine has one kernel, the copies of copy_many.h.
//
// A module may be any text: its contents are for GPUs and are ignored.
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "copy_many.h"
#include "exports.hpp"
#include "memory_use.hpp"

using namespace ncclpy::host;

namespace {

char the_module, the_function;  // their addresses are the handles

Task copies_of(const ncclpy_copies& copies) {
  std::vector<Range> ranges;
  if (checks) {
    for (uint32_t i = 0; i < copies.count; ++i) {
      ranges.push_back({reinterpret_cast<void*>(copies.to[i]), copies.bytes[i]});
      if (copies.from[i] != 0) ranges.push_back({reinterpret_cast<void*>(copies.from[i]), copies.bytes[i]});
    }
  }
  auto use = checks
                 ? std::make_shared<const MemoryUse>(MemoryUse::copies, std::move(ranges), "cuLaunchKernel uses")
                 : nullptr;
  return [table = std::make_unique<const ncclpy_copies>(copies), use = std::move(use)] {
    for (uint32_t i = 0; i < table->count; ++i) {
      void* const to = reinterpret_cast<void*>(table->to[i]);
      if (table->bytes[i] == 0) continue;
      if (table->from[i] == 0) {
        std::memset(to, 0, table->bytes[i]);
      } else {
        std::memmove(to, reinterpret_cast<const void*>(table->from[i]), table->bytes[i]);
      }
    }
  };
}

}  // namespace

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return driver_call([&]() -> CUresult {
    if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *module = reinterpret_cast<CUmodule>(&the_module);
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return driver_call([&]() -> CUresult {
    if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (module != reinterpret_cast<CUmodule>(&the_module)) return CUDA_ERROR_INVALID_HANDLE;
    if (std::string_view(name) != "ncclpy_copy_many") return CUDA_ERROR_NOT_SUPPORTED;
    *function = reinterpret_cast<CUfunction>(&the_function);
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchKernel(CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                        unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes,
                        CUstream stream, void** parameters, void** extra) {
  return stream_call(stream, [&](Stream& found) -> CUresult {
    if (function != reinterpret_cast<CUfunction>(&the_function)) return CUDA_ERROR_INVALID_HANDLE;
    if (gridX == 0 || gridY != 1 || gridZ != 1 || blockX != NCCLPY_COPY_THREADS || blockY != 1 || blockZ != 1 ||
        sharedBytes != 0 || parameters == nullptr || extra != nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    ncclpy_copies copies;
    std::memcpy(&copies, parameters[0], sizeof(copies));
    if (copies.count > NCCLPY_COPIES_MAX) return CUDA_ERROR_INVALID_VALUE;
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < copies.count; ++i) {  // check the table as the kernel would read it
      if (copies.first_block[i] != blocks) return CUDA_ERROR_INVALID_VALUE;
      blocks += (copies.bytes[i] + NCCLPY_COPY_CHUNK - 1) / NCCLPY_COPY_CHUNK;
    }
    if (blocks > gridX) return CUDA_ERROR_INVALID_VALUE;
    const auto step = [&copies] { return copies_of(copies); };
    if (found.capturing.load(std::memory_order_acquire)) return capture({found.shared_from_this()}, found.device(), step);
    found.enqueue(step());
    return CUDA_SUCCESS;
  });
}
