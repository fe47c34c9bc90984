// Registering windows. Ranks of one process access each other's memory directly. Of another process only memory from
// ncclMemAlloc can be accessed: it lies in a memfd, which is opened through /proc, as the segment is.
#include "window.hpp"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "call.hpp"
#include "comm/stragglers.hpp"
#include "driver/memory.hpp"
#include "launch/group.hpp"
#include "launch/launch_memory_use.hpp"
#include "transports/collective.hpp"

namespace ncclpy::host {

Window::~Window() {
  for (const Part& part : parts) {
    if (part.mapping != nullptr) munmap(part.mapping, part.mapped);
  }
}

namespace {

// What a rank tells the others about its part.
struct Offer {
  char* base;
  uint64_t bytes;
  int32_t flags;
  int32_t descriptor;  // -1: cannot be mapped by another process
  uint64_t offset;     // of the part in the allocation
  uint64_t whole;      // the size of the allocation
  uint64_t device, inode;
  uint64_t gate;  // number of the PutGate in its process
};
static_assert(sizeof(Offer) <= exchange_bytes);

Offer offer_of(char* memory, size_t bytes, int flags, uint64_t gate) {
  Offer offer = {memory, bytes, flags, -1, 0, 0, 0, 0, gate};
  const Allocation found = allocation_of(memory);
  struct stat identity;
  if (found.descriptor < 0 || fstat(found.descriptor, &identity) != 0) return offer;
  offer.descriptor = found.descriptor;
  offer.offset = uint64_t(memory - static_cast<char*>(found.base));
  offer.whole = found.bytes;
  offer.device = identity.st_dev;
  offer.inode = identity.st_ino;
  return offer;
}

// All windows of the process by handle, and their gates by number.
struct Windows {
  Mutex<NCCLPY_LOCK_HANDLES> mutex;
  std::map<ncclWindow_t, std::weak_ptr<Window>> by_handle;
  std::map<uint64_t, std::weak_ptr<PutGate>> gates;  // by number
  uint64_t next = 1;
};

Windows& windows() {
  static auto* const all = new Windows;  // never destroyed: threads may run while the process exits
  return *all;
}

// Removes the entries of windows, or of gates, that were destroyed.
template <class Map>
void forget_expired(Map& map) {
  for (auto at = map.begin(); at != map.end();) at = at->second.expired() ? map.erase(at) : std::next(at);
}

uint64_t add_gate(const std::shared_ptr<PutGate>& gate) {
  Windows& all = windows();
  std::lock_guard lock(all.mutex);
  forget_expired(all.gates);
  all.gates[all.next] = gate;
  return all.next++;
}

std::shared_ptr<PutGate> gate_behind(uint64_t number) {
  Windows& all = windows();
  std::lock_guard lock(all.mutex);
  const auto found = all.gates.find(number);
  return found == all.gates.end() ? nullptr : found->second.lock();
}

ncclWindow_t add_window(const std::shared_ptr<Window>& window) {
  Windows& all = windows();
  std::lock_guard lock(all.mutex);
  forget_expired(all.by_handle);
  const auto handle = reinterpret_cast<ncclWindow_t>(uintptr_t(all.next++));
  all.by_handle[handle] = window;
  return handle;
}

ncclResult_t map_part(int rank, int32_t pid, const Offer& offer, Window::Part* part) {
  const char* const function = "ncclCommWindowRegister";
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, offer.descriptor);
  const int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return fail(ncclSystemError, "%s : memory of rank %d, %s: %s", function, rank, path, strerror(errno));
  struct stat identity;
  const bool same = fstat(descriptor, &identity) == 0 && identity.st_dev == offer.device &&
                    identity.st_ino == offer.inode && uint64_t(identity.st_size) >= offer.whole &&
                    identity.st_uid == geteuid() && (fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK) != 0 &&
                    offer.offset <= offer.whole && offer.bytes <= offer.whole - offer.offset;
  void* mapping = same ? mmap(nullptr, offer.whole, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) : MAP_FAILED;
  close(descriptor);
  if (!same) return fail(ncclSystemError, "%s : memory of rank %d has gone meanwhile", function, rank);
  if (mapping == MAP_FAILED) return fail(ncclSystemError, "%s : mmap of rank %d's memory: %s", function, rank, strerror(errno));
  *part = {static_cast<char*>(mapping) + offer.offset, offer.bytes, mapping, offer.whole, std::make_shared<PutGate>()};
  return ncclSuccess;
}

// Finds what is nearly always a defect: parts of different sizes (all ranks report the same two), and memory in two
// windows with the same flags.
ncclResult_t check_parts(Comm& comm, const std::vector<Offer>& offers, const Window& window) {
  const char* const function = "ncclCommWindowRegister";
  for (int r = 1; r < comm.nranks; r++) {
    if (offers[size_t(r)].bytes == offers[0].bytes) continue;
    return fail(ncclInvalidUsage, "%s : the sizes differ: rank 0 registers %" PRIu64 " bytes, rank %d %" PRIu64 " bytes (%s)",
                function, offers[0].bytes, r, offers[size_t(r)].bytes, comm.title().c_str());
  }
  const Offer& mine = offers[size_t(comm.rank)];
  const Range wanted = {mine.base, mine.bytes};
  std::lock_guard lock(comm.mutex);
  for (const auto& [handle, known] : comm.windows) {
    const Range part = {known->user, known->parts[size_t(comm.rank)].bytes};
    if (known->flags != window.flags || !part.overlaps(wanted.base, wanted.bytes)) continue;
    return fail(ncclInvalidUsage, "%s : %s are registered twice with rank %d of %s, which has %s as window %p; deregister that first",
                function, wanted.text().c_str(), comm.rank, comm.title().c_str(), part.text().c_str(),
                static_cast<void*>(handle));
  }
  return ncclSuccess;
}

ncclResult_t map_parts(Comm& comm, const std::vector<Offer>& offers, Window* window) {
  Segment& segment = *comm.segment;
  if (checks) NCCLPY_TRY(check_parts(comm, offers, *window));
  for (int r = 0; r < comm.nranks; r++) {
    const Offer& offer = offers[size_t(r)];
    if (offer.flags != window->flags) {
      return fail(ncclInvalidUsage, "ncclCommWindowRegister : rank %d registers with flags %#x, rank %d with %#x",
                  comm.rank, window->flags, r, offer.flags);
    }
    if (offer.descriptor < 0 && !segment.one_process()) {
      return fail(ncclInvalidArgument,
                  "ncclCommWindowRegister : the buffer of rank %d is not of ncclMemAlloc, and ranks are in several "
                  "processes",
                  r);
    }
    Window::Part part = {offer.base, offer.bytes, nullptr, 0, nullptr};
    if (!segment.is_local(r)) {
      NCCLPY_TRY(map_part(r, segment.slot(r).pid, offer, &part));
    } else {
      part.gate = gate_behind(offer.gate);
      if (part.gate == nullptr) return fail(ncclSystemError, "ncclCommWindowRegister : rank %d has gone meanwhile", r);
    }
    window->parts.push_back(part);
  }
  return ncclSuccess;
}

// Makes the window, together with all other ranks. At the end the ranks agree on whether all have succeeded, so that
// no rank has a window that others lack.
ncclResult_t make(Comm& comm, char* memory, size_t bytes, int flags, uint64_t call, ncclWindow_t* out) {
  std::lock_guard one_at_a_time(comm.control);
  const ControlCallScope scope(comm, call);
  const auto gate = std::make_shared<PutGate>();
  const Offer mine = offer_of(memory, bytes, flags, add_gate(gate));
  std::vector<Offer> offers(size_t(comm.nranks));
  NCCLPY_TRY(exchange(comm, &mine, sizeof mine, offers.data()));
  auto window = std::make_shared<Window>();
  window->user = memory;
  window->flags = flags;
  ncclResult_t result = map_parts(comm, offers, window.get());
  const std::string text = last_error();
  const char failed = result != ncclSuccess;
  std::vector<char> all(size_t(comm.nranks));
  NCCLPY_TRY(exchange(comm, &failed, 1, all.data()));
  if (failed) return fail(result, "%s", text.c_str());
  for (int r = 0; r < comm.nranks; r++) {
    if (all[size_t(r)]) return fail(ncclInvalidUsage, "ncclCommWindowRegister : rank %d could not register", r);
  }
  if (checks) window->memory_use = registered_memory_use(comm, memory, bytes, "ncclCommWindowRegister");
  const ncclWindow_t handle = add_window(window);
  std::lock_guard lock(comm.mutex);
  comm.windows[handle] = window;
  *out = handle;
  return ncclSuccess;
}

ncclResult_t register_window(ncclComm_t handle, void* memory, size_t bytes, ncclWindow_t* window, int flags) {
  const char* const function = "ncclCommWindowRegister";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  NCCLPY_TRY(check_pointer(window, function, "win"));
  *window = nullptr;
  if (memory == nullptr || bytes == 0)
    return fail(ncclInvalidArgument, "%s : invalid pointer %p / size %zu", function, memory, bytes);
  constexpr int known = NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING | NCCL_WIN_GIN_ONLY | NCCL_WIN_CFT_COUNTED;
  if ((flags & ~known) != 0) return fail(ncclInvalidArgument, "%s : invalid flags %#x", function, flags);
  const Allocation found = allocation_of(memory);
  if (found.base != nullptr && bytes > found.bytes - size_t(static_cast<char*>(memory) - static_cast<char*>(found.base))) {
    return fail(ncclInvalidArgument, "%s : %zu bytes at %p reach beyond their allocation of %zu bytes at %p", function,
                bytes, memory, found.bytes, found.base);
  }
  NCCLPY_TRY(comm->health.ensure_ready());
  Job job;
  job.comm = comm;
  const uint64_t call = comm->note_call(CallKind::register_window);
  job.run = [=] { return make(*comm, static_cast<char*>(memory), bytes, flags, call, window); };
  return submit(std::move(job));
}

// Removes the window after the operations issued so far have run, since they may still write through the window.
ncclResult_t deregister_window(ncclComm_t handle, ncclWindow_t window) {
  const char* const function = "ncclCommWindowDeregister";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  if (window == nullptr) return ncclSuccess;
  std::shared_ptr<Window> found;
  NCCLPY_TRY(find_window(*comm, window, function, &found));
  Job job;
  job.comm = comm;
  job.run = [comm, window] {
    comm->queue.drain();
    if (comm->health.stopped()) comm->queue.await_launches();  // an operation that was running may still write
    std::shared_ptr<Window> gone;  // destroyed after the lock is released
    std::lock_guard lock(comm->mutex);
    const auto entry = comm->windows.find(window);
    if (entry == comm->windows.end()) return ncclSuccess;
    entry->second->parts[size_t(comm->rank)].gate->close();
    entry->second->memory_use.reset();  // a holder of a part keeps the window alive, but the memory may now be freed
    gone = std::move(entry->second);
    comm->windows.erase(entry);
    return ncclSuccess;
  };
  return submit(std::move(job));
}

ncclResult_t user_pointer(ncclComm_t handle, ncclWindow_t window, void** pointer) {
  const char* const function = "ncclWinGetUserPtr";
  std::shared_ptr<Comm> comm;
  NCCLPY_TRY(find_comm(handle, function, &comm));
  NCCLPY_TRY(check_pointer(pointer, function, "outUserPtr"));
  std::shared_ptr<Window> found;
  NCCLPY_TRY(find_window(*comm, window, function, &found));
  *pointer = found->user;
  return ncclSuccess;
}

// The address of the rank's part in this process: a process that can register can access all parts.
ncclResult_t part_pointer(ncclWindow_t handle, size_t offset, int rank, void** pointer, const char* function) {
  NCCLPY_TRY(check_pointer(handle, function, "window"));
  NCCLPY_TRY(check_pointer(pointer, function, "outPtr"));
  const std::shared_ptr<Window> window = window_behind(handle);
  if (window == nullptr) {
    return fail(ncclInvalidArgument, "%s : %p is not a window, or was deregistered", function,
                static_cast<void*>(handle));
  }
  if (rank < 0 || size_t(rank) >= window->parts.size()) {
    return fail(ncclInvalidArgument, "%s : rank %d is not within 0..%zu", function, rank, window->parts.size() - 1);
  }
  const Window::Part& part = window->parts[size_t(rank)];
  if (offset >= part.bytes) {
    return fail(ncclInvalidArgument, "%s : offset %zu reaches beyond the %zu bytes of rank %d", function, offset,
                part.bytes, rank);
  }
  *pointer = part.base + offset;
  return ncclSuccess;
}

}  // namespace

ncclResult_t find_window(Comm& comm, ncclWindow_t handle, const char* function, std::shared_ptr<Window>* window) {
  NCCLPY_TRY(check_pointer(handle, function, "win"));
  std::lock_guard lock(comm.mutex);
  const auto found = comm.windows.find(handle);
  if (found == comm.windows.end()) {
    return fail(ncclInvalidArgument, "%s : %p is not a window of this communicator, or was deregistered", function,
                static_cast<void*>(handle));
  }
  *window = found->second;
  return ncclSuccess;
}

void close_parts(Comm& comm) {
  std::lock_guard lock(comm.mutex);
  for (const auto& [handle, window] : comm.windows) window->parts[size_t(comm.rank)].gate->close();
}

std::shared_ptr<Window> window_behind(ncclWindow_t handle) {
  Windows& all = windows();
  std::lock_guard lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  return found == all.by_handle.end() ? nullptr : found->second.lock();
}

bool in_symmetric_window(Comm& comm, const void* memory, size_t bytes) {
  std::lock_guard lock(comm.mutex);
  for (const auto& [handle, window] : comm.windows) {
    const Window::Part& own = window->parts[size_t(comm.rank)];
    const uintptr_t at = uintptr_t(memory), begin = uintptr_t(own.base);
    if ((window->flags & NCCL_WIN_COLL_SYMMETRIC) != 0 && at >= begin && at - begin <= own.bytes &&
        bytes <= own.bytes - (at - begin))
      return true;
  }
  return false;
}

}  // namespace ncclpy::host

using namespace ncclpy::host;

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* window, int flags) {
  return guarded("ncclCommWindowRegister",
                 [&] { return note_group_error(register_window(comm, memory, bytes, window, flags)); });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return guarded("ncclCommWindowDeregister", [&] { return note_group_error(deregister_window(comm, window)); });
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** pointer) {
  return guarded("ncclGetPeerDevicePointer",
                 [&] { return part_pointer(window, offset, peer, pointer, "ncclGetPeerDevicePointer"); });
}

// All ranks are one team here.
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int rank, void** pointer) {
  return guarded("ncclGetLsaDevicePointer",
                 [&] { return part_pointer(window, offset, rank, pointer, "ncclGetLsaDevicePointer"); });
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** pointer) {
  return guarded("ncclWinGetUserPtr", [&] { return user_pointer(comm, window, pointer); });
}
