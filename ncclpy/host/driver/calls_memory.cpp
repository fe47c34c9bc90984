// Driver calls about memory.
//
// Copies are queued and follow CUDA's rules for pageable memory, that is, memory that was not allocated here: when the
// call returns, the caller may free a pageable source, and a pageable destination holds its data. A captured copy uses
// the memory at each launch of the graph instead. As in CUDA, pageable memory can be copied from and to, but not set.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exports.hpp"
#include "memory.hpp"
#include "memory_use.hpp"

using namespace ncclpy::host;

namespace {

constexpr size_t staged_bytes = size_t{64} << 10;  // pageable sources up to this size are staged, as in CUDA

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

// Whether a range that begins in an allocation also ends in it.
bool fits(const Allocation& allocation, const void* address, size_t bytes) {
  const size_t offset = static_cast<const char*>(address) - static_cast<const char*>(allocation.base);
  return bytes <= allocation.bytes - offset;
}

std::shared_ptr<const MemoryUse> copy_use(const char* function, std::vector<Range> ranges) {
  if (!checks) return nullptr;
  return std::make_shared<const MemoryUse>(MemoryUse::copies, std::move(ranges), std::string(function) + " uses");
}

Task copy_of(void* to, const void* from, size_t bytes) {
  return [to, from, bytes, use = copy_use("cuMemcpyAsync", {{to, bytes}, {from, bytes}})] {
    std::memmove(to, from, bytes);
  };
}

CUresult free_of_kind(void* base, bool pinned) {
  return driver_call([&]() -> CUresult {
    if (base == nullptr) return CUDA_SUCCESS;
    const Allocation found = allocation_of(base);
    if (found.base != base || found.pinned != pinned) return CUDA_ERROR_INVALID_VALUE;
    if (in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
    const CUresult unsafe = unsafe_while_capturing();
    if (unsafe != CUDA_SUCCESS) return unsafe;
    if (checks) {
      last_free_refusal = MemoryUse::conflict(found, true);
      if (!last_free_refusal.empty()) return CUDA_ERROR_ILLEGAL_STATE;
    }
    synchronize_device(found.device);  // as in CUDA: queued work may still use it
    return deallocate(base, pinned) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

}  // namespace

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  return driver_call([&]() -> CUresult {
    if (pointer == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const CUresult unsafe = unsafe_while_capturing();
    if (unsafe != CUDA_SUCCESS) return unsafe;
    *pointer = reinterpret_cast<uintptr_t>(allocate(bytes, current_device()));
    return *pointer == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  });
}

CUresult cuMemFree_v2(CUdeviceptr address) { return free_of_kind(pointer(address), false); }

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned int flags) {
  constexpr unsigned int portable_mapped_write_combined = 0x7;  // all host memory has these properties
  return driver_call([&] {
    if (pointer == nullptr || (flags & ~portable_mapped_write_combined) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *pointer = bytes == 0 ? nullptr : allocate_pinned(bytes, current_device());
    return *pointer == nullptr && bytes != 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  });
}

CUresult cuMemFreeHost(void* pointer) { return free_of_kind(pointer, true); }

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return stream_call(stream, [&](Stream& found) -> CUresult {
    if (bytes == 0) return CUDA_SUCCESS;
    void* const to = pointer(dst);
    const void* const from = pointer(src);
    const Allocation target = allocation_of(to), source = allocation_of(from);
    const bool to_pageable = target.base == nullptr, from_pageable = source.base == nullptr;
    if (to == nullptr || from == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!to_pageable && !fits(target, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (!from_pageable && !fits(source, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (found.capturing.load(std::memory_order_acquire))
      return capture({found.shared_from_this()}, found.device(), [to, from, bytes] { return copy_of(to, from, bytes); });
    if (from_pageable && !to_pageable && bytes <= staged_bytes) {
      std::unique_ptr<char[]> staged(new char[bytes]);
      std::memcpy(staged.get(), from, bytes);
      found.enqueue([to, bytes, staged = std::move(staged), use = copy_use("cuMemcpyAsync", {{to, bytes}})] {
        std::memcpy(to, staged.get(), bytes);
      });
      return CUDA_SUCCESS;
    }
    const bool wait = to_pageable || from_pageable;
    if (wait && in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
    const std::uint64_t number = found.enqueue(copy_of(to, from, bytes));
    if (wait) found.wait(number);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream) {
  return stream_call(stream, [&](Stream& found) -> CUresult {
    if (bytes == 0) return CUDA_SUCCESS;
    void* const to = pointer(dst);
    const Allocation target = allocation_of(to);
    if (target.base == nullptr || !fits(target, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
    const auto step = [to, value, bytes]() -> Task {
      return [to, value, bytes, use = copy_use("cuMemsetD8Async", {{to, bytes}})] { std::memset(to, value, bytes); };
    };
    if (found.capturing.load(std::memory_order_acquire)) return capture({found.shared_from_this()}, found.device(), step);
    found.enqueue(step());
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  return driver_call([&] {
    if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *free = free_memory();
    *total = total_memory();
    return CUDA_SUCCESS;
  });
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  return driver_call([&] {
    const Allocation found = allocation_of(pointer(address));
    if (value == nullptr || found.base == nullptr) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
      case CU_POINTER_ATTRIBUTE_CONTEXT:
        *static_cast<CUcontext*>(value) = context_of(found.device);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned int*>(value) = found.pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int*>(value) = found.device;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
  });
}
