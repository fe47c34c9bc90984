// NCCL's allocations, and the registration of buffers. A registration is only checked and recorded, since CPU memory
// needs no preparation.
#include "driver/memory.hpp"

#include "call.hpp"
#include "driver/device.hpp"
#include "faults/fault.hpp"
#include "faults/strict_ends.hpp"
#include "launch/group.hpp"
#include "launch/launch_memory_use.hpp"

namespace ncclpy::host {
namespace {

ncclResult_t allocate_memory(void** pointer, size_t bytes) {
  // NCCL reports failures of the CUDA runtime as "unhandled".
  if (pointer == nullptr) return fail(ncclUnhandledCudaError, "ncclMemAlloc : ptr argument is NULL");
  NCCLPY_TRY(fault_at_call(nullptr, -1, "ncclMemAlloc"));
  *pointer = nullptr;
  if (bytes == 0) return ncclSuccess;
  *pointer = allocate_shared(bytes, current_device());
  if (*pointer == nullptr)
    return fail(ncclUnhandledCudaError, "ncclMemAlloc : no %zu bytes on device %d", bytes, current_device());
  return ncclSuccess;
}

ncclResult_t free_memory_at(void* pointer) {
  NCCLPY_TRY(fault_at_call(nullptr, -1, "ncclMemFree"));
  if (checks && pointer != nullptr) {
    const Allocation known = allocation_of(pointer);
    const std::string needed = known.base == pointer ? MemoryUse::conflict(known, false) : "";
    if (!needed.empty()) return fail(ncclInvalidUsage, "ncclMemFree : %s", needed.c_str());
  }
  if (pointer != nullptr && !deallocate(pointer))
    return fail(ncclUnhandledCudaError, "ncclMemFree : %p was not allocated by ncclMemAlloc", pointer);
  return ncclSuccess;
}

// NCCL counts registrations of the same buffer, or of a part of it, and keeps the memory until all are removed; for
// memory that overlaps in another way it makes another registration. Both cases are nearly always a defect: a missing
// deregistration.
ncclResult_t check_once(const Comm& comm, const char* function, const Range& wanted) {
  for (const auto& [handle, known] : comm.registrations) {
    if (!wanted.overlaps(known.memory, known.bytes)) continue;
    return fail(ncclInvalidUsage, "%s : %s are registered twice with rank %d of %s, which has %s as %p; deregister those first",
                function, wanted.text().c_str(), comm.rank, comm.title().c_str(),
                Range{known.memory, known.bytes}.text().c_str(), handle);
  }
  return ncclSuccess;
}

ncclResult_t register_buffer(ncclComm_t handle, void* buffer, size_t bytes, void** registration) {
  const char* const function = "ncclCommRegister";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  NCCLPY_TRY(comm->health.ensure_ready());
  NCCLPY_TRY(check_pointer(buffer, function, "buff"));
  NCCLPY_TRY(check_pointer(registration, function, "handle"));
  if (bytes == 0) return fail(ncclInvalidArgument, "%s : size is 0", function);
  const Allocation known = allocation_of(buffer);
  const uintptr_t end = uintptr_t(known.base) + known.bytes;
  if (known.base != nullptr && bytes > end - uintptr_t(buffer)) {
    return fail(ncclInvalidArgument, "%s : %zu bytes at %p reach beyond their allocation of %zu bytes at %p", function,
                bytes, buffer, known.bytes, known.base);
  }
  static std::atomic<uintptr_t> next{1};
  Registration made = {buffer, bytes, checks ? registered_memory_use(*comm, buffer, bytes, function) : nullptr};
  std::lock_guard lock(comm->mutex);
  if (checks) NCCLPY_TRY(check_once(*comm, function, {buffer, bytes}));
  *registration = reinterpret_cast<void*>(next.fetch_add(1));
  comm->registrations.emplace(*registration, std::move(made));
  return ncclSuccess;
}

ncclResult_t deregister_buffer(ncclComm_t handle, void* registration) {
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, "ncclCommDeregister", &comm));
  if (registration == nullptr) return ncclSuccess;
  std::lock_guard lock(comm->mutex);
  check_deregister(*comm);
  if (comm->registrations.erase(registration) == 0)
    return fail(ncclInvalidUsage, "Deregister: Could not find handle %p", registration);
  return ncclSuccess;
}

}  // namespace
}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return guarded("ncclMemAlloc", [&] { return allocate_memory(pointer, bytes); });
}

ncclResult_t ncclMemFree(void* pointer) {
  return guarded("ncclMemFree", [&] { return free_memory_at(pointer); });
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t bytes, void** registration) {
  return guarded("ncclCommRegister", [&] { return register_buffer(comm, buffer, bytes, registration); });
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* registration) {
  return guarded("ncclCommDeregister", [&] { return deregister_buffer(comm, registration); });
}
