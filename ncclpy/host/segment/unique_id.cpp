// The tables of a process's ids, and the error texts for ids that cannot be used.
#include "unique_id.hpp"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <vector>

#include "base/errors.hpp"
#include "base/mutex.hpp"

namespace ncclpy::host {
namespace {

constexpr uint64_t magic = 0x3264697970636c6e;  // "nlcpyid2"
constexpr char table_name[] = "ncclpy-ids";
constexpr char memory_name[] = "ncclpy-communicator";

constexpr uint32_t table_entries = 16384;
constexpr size_t table_bytes = table_entries * sizeof(IdEntry);

// The size is fixed, so that an access through a mapping cannot raise SIGBUS.
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// What a unique id begins with; the rest of its 128 bytes is zero.
struct Address {
  uint64_t magic;
  int32_t pid;
  int32_t descriptor;
  unsigned char nonce[16];
  uint32_t entry;
};
static_assert(sizeof(Address) <= sizeof(ncclUniqueId));

Address address_of(const ncclUniqueId& id) {
  Address address;
  memcpy(&address, &id, sizeof address);
  return address;
}

Phase phase_of(uint64_t word) { return Phase(word & 0xff); }
uint64_t with(uint64_t word, Phase phase) { return (word & ~uint64_t(0xff)) | uint64_t(phase); }

// Returns an error that says, by errno, why `what` could not be made.
ncclResult_t no_memory(const char* what, size_t bytes) {
  const int error = errno;
  if (error == EMFILE || error == ENFILE) {
    return fail(ncclSystemError, "no file descriptor is free for %s: close some, or raise the limit (ulimit -n): %s",
                what, strerror(error));
  }
  return fail(ncclSystemError, "no memory for %s, %zu bytes%s: %s", what, bytes,
              error == EFBIG ? " (the limit is ulimit -f)" : "", strerror(error));
}

// Makes a file without a name, for this user alone; no process can change its size.
ncclResult_t make_memory(const char* name, const char* what, size_t bytes, Descriptor* made) {
  Descriptor memory(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0 || fchmod(memory.get(), 0600) != 0 || ftruncate(memory.get(), off_t(bytes)) != 0 ||
      fcntl(memory.get(), F_ADD_SEALS, seals) != 0)
    return no_memory(what, bytes);
  *made = std::move(memory);
  return ncclSuccess;
}

// Returns an error that says why another process's descriptor could not be opened, and what helps. `role` describes
// that process.
ncclResult_t cannot_open(int error, int32_t pid, const char* role) {
  if (error == EMFILE || error == ENFILE) {
    return fail(ncclSystemError,
                "this process could not open the memory of process %d, which %s: no file descriptor is free; close "
                "some, or raise the limit (ulimit -n): %s",
                pid, role, strerror(error));
  }
  const bool exists = pid > 0 && (kill(pid, 0) == 0 || errno != ESRCH);
  if (!exists) {
    return fail(ncclInvalidUsage,
                "this unique id cannot be used: process %d, which %s, has ended, or it runs in another container or "
                "on another machine; the host engine's ranks share one machine, and the process must live until all "
                "ranks have joined",
                pid, role);
  }
  if (access("/proc/self/fd", F_OK) != 0)
    return fail(ncclSystemError, "/proc is not mounted here; ranks of several processes open their memory through it");
  if (error == EACCES || error == EPERM || error == ENOENT) {
    return fail(ncclSystemError,
                "this process may not open the memory of process %d, which %s: it belongs to another user, or has "
                "changed its user (setuid) or its program (exec) since it started, which closes it to others. All "
                "ranks must run as one user from their start; after setuid, prctl(PR_SET_DUMPABLE, 1) opens a process "
                "again: %s",
                pid, role, strerror(error));
  }
  return fail(ncclSystemError, "opening the memory of process %d, which %s: %s", pid, role, strerror(error));
}

// Opens `descriptor` of process `pid` if it is a memory of the engine with this name and size. `found` is false if it
// is something else: descriptor numbers are reused.
ncclResult_t open_memory(int32_t pid, int32_t descriptor, const char* name, size_t bytes, const char* role,
                         Descriptor* memory, bool* found) {
  char path[64], target[128], link[64];
  *found = false;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
  const int length = snprintf(link, sizeof link, "/memfd:%s", name);
  const ssize_t read = readlink(path, target, sizeof target - 1);
  if (read < 0) return cannot_open(errno, pid, role);
  target[read] = '\0';
  if (strncmp(target, link, size_t(length)) != 0) return ncclSuccess;
  Descriptor opened(open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (opened.get() < 0) return cannot_open(errno, pid, role);
  struct stat info;
  if (fstat(opened.get(), &info) != 0 || size_t(info.st_size) != bytes) return ncclSuccess;
  // A file of another user may be changed by that user at any time, even while it is read.
  if (info.st_uid != geteuid()) {
    return fail(ncclInvalidUsage, "the memory of process %d, which %s, belongs to user %u and this process runs as %u; "
                "all ranks must run as one user", pid, role, unsigned(info.st_uid), unsigned(geteuid()));
  }
  const int sealed = fcntl(opened.get(), F_GET_SEALS);
  if (sealed < 0 || (sealed & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
    return fail(ncclInvalidUsage, "the memory of process %d, which %s, is not sealed: it could be truncated while "
                "this process uses it, so it is refused", pid, role);
  }
  *memory = std::move(opened);
  *found = true;
  return ncclSuccess;
}

constexpr char role_of_maker[] = "made this unique id";
constexpr char role_of_first_rank[] = "was the first to join with this unique id";

void* map_table(int descriptor) {
  return mmap(nullptr, table_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
}

// One table of this process. Its descriptor stays open, because the ids refer to it.
struct Table {
  Table(int32_t process, int opened, IdEntry* mapped) : pid(process), descriptor(opened), entries(mapped) {}

  int32_t pid;
  int descriptor;
  IdEntry* entries;
  uint32_t next = 0;           // the first entry that was never used
  std::vector<uint32_t> free;  // entries that were used before
  std::vector<bool> taken = std::vector<bool>(table_entries);

  // Returns the index of a free entry, or table_entries if there is none.
  uint32_t take() {
    if (free.empty() && next == table_entries) collect();
    uint32_t index = table_entries;
    if (!free.empty()) {
      index = free.back();
      free.pop_back();
    } else if (next < table_entries) {
      index = next++;
    }
    if (index < table_entries) taken[index] = true;
    return index;
  }
  void give_back(uint32_t index) {
    if (index >= table_entries || !taken[index]) return;
    taken[index] = false;
    free.push_back(index);
  }
  // Frees the entries of ids that are used up; other processes cannot call give_back() themselves.
  void collect() {
    for (uint32_t i = 0; i < next; i++) {
      if (phase_of(entries[i].word.load(std::memory_order_acquire)) >= Phase::served) give_back(i);
    }
  }
};

// The tables of this process. Never destroyed, because threads may run while the process exits.
struct Tables {
  Mutex<NCCLPY_LOCK_IDS> mutex;
  std::vector<Table> all;
};

Tables& tables() {
  static auto* const the = new Tables;
  return *the;
}

// Returns the table of this process that holds an id's entry, or nullptr. The caller holds the mutex. After a fork the
// parent's tables are not this process's.
Table* own_table(Tables& the, int32_t pid, int32_t descriptor) {
  if (pid != getpid()) return nullptr;
  for (Table& table : the.all) {
    if (table.pid == pid && table.descriptor == descriptor) return &table;
  }
  return nullptr;
}

ncclResult_t add_table(Tables& the) {
  Descriptor memory;
  NCCLPY_TRY(make_memory(table_name, "unique ids", table_bytes, &memory));
  void* const mapped = map_table(memory.get());
  if (mapped == MAP_FAILED) return no_memory("unique ids", table_bytes);
  the.all.emplace_back(getpid(), memory.get(), static_cast<IdEntry*>(mapped));
  memory.release();
  return ncclSuccess;
}

void write_nonce(IdEntry& entry, const unsigned char* nonce) {
  uint64_t halves[2];
  memcpy(halves, nonce, sizeof halves);
  for (int i = 0; i < 2; i++) entry.nonce[i].store(halves[i], std::memory_order_relaxed);
}

bool has_nonce(const IdEntry& entry, const unsigned char* nonce) {
  uint64_t halves[2];
  memcpy(halves, nonce, sizeof halves);
  return entry.nonce[0].load(std::memory_order_relaxed) == halves[0] &&
         entry.nonce[1].load(std::memory_order_relaxed) == halves[1];
}

ncclResult_t used_up() {
  return fail(ncclInvalidUsage,
              "this unique id cannot be used: it was already used for a communicator; an id serves one communicator, "
              "make a new one with ncclGetUniqueId");
}

}  // namespace

void Descriptor::reset() {
  if (value_ >= 0) close(value_);
  value_ = -1;
}

std::string key_of(const ncclUniqueId& id) {
  const Address address = address_of(id);
  if (address.magic != magic) return {};
  return std::string(reinterpret_cast<const char*>(address.nonce), sizeof address.nonce);
}

ncclResult_t create_unique_id(ncclUniqueId* id) {
  Address address = {};
  address.magic = magic;
  address.pid = getpid();
  if (getrandom(address.nonce, sizeof address.nonce, 0) != ssize_t(sizeof address.nonce))
    return fail(ncclSystemError, "getrandom: %s", strerror(errno));
  Tables& the = tables();
  std::lock_guard lock(the.mutex);
  Table* table = nullptr;
  address.entry = table_entries;
  for (size_t i = the.all.size(); i-- > 0 && address.entry == table_entries;) {
    table = &the.all[i];
    if (table->pid == address.pid) address.entry = table->take();
  }
  if (address.entry == table_entries) {
    NCCLPY_TRY(add_table(the));
    table = &the.all.back();
    address.entry = table->take();
  }
  address.descriptor = table->descriptor;
  IdEntry& entry = table->entries[address.entry];
  const uint64_t before = entry.word.load(std::memory_order_relaxed);
  entry.word.store(with(before + 0x100, Phase::unused), std::memory_order_seq_cst);
  write_nonce(entry, address.nonce);
  entry.word.store(with(before + 0x100, Phase::offered), std::memory_order_release);
  memset(id, 0, sizeof *id);
  memcpy(id, &address, sizeof address);
  return ncclSuccess;
}

void withdraw_unique_id(const ncclUniqueId& id) {
  IdRendezvous id_rendezvous;
  const std::string text = last_error();
  if (id_rendezvous.find(id) == ncclSuccess) id_rendezvous.end(Phase::given_up);
  set_last_error(text);
}

IdRendezvous::~IdRendezvous() {
  if (mapping_ != nullptr) munmap(mapping_, table_bytes);
}

ncclResult_t IdRendezvous::error_of_ended_id(Phase phase) const {
  if (phase != Phase::given_up) return used_up();
  return fail(ncclInvalidUsage,
              "this unique id cannot be used: a rank that had joined with it gave up, or was aborted, before all "
              "ranks had joined, or the id was withdrawn; make a new one with ncclGetUniqueId");
}

ncclResult_t IdRendezvous::find(const ncclUniqueId& id) {
  const Address address = address_of(id);
  if (address.magic != magic)
    return fail(ncclInvalidArgument, "this unique id was not made by ncclGetUniqueId of the host engine");
  if (address.entry >= table_entries)
    return fail(ncclInvalidArgument, "this unique id is damaged: it was not passed on byte for byte");
  memcpy(nonce_, address.nonce, sizeof nonce_);
  {
    Tables& the = tables();
    std::lock_guard lock(the.mutex);
    if (const Table* own = own_table(the, address.pid, address.descriptor)) entry_ = &own->entries[address.entry];
  }
  if (entry_ == nullptr) {
    Descriptor table;
    bool found = false;
    NCCLPY_TRY(
        open_memory(address.pid, address.descriptor, table_name, table_bytes, role_of_maker, &table, &found));
    if (!found) {
      return fail(ncclInvalidUsage,
                  "this unique id cannot be used: process %d is no longer the one that made it, or runs in another "
                  "container; make a new one with ncclGetUniqueId",
                  address.pid);
    }
    void* const mapped = map_table(table.get());
    if (mapped == MAP_FAILED) return no_memory("a unique id", table_bytes);
    mapping_ = mapped;
    entry_ = static_cast<IdEntry*>(mapped) + address.entry;
  }
  word_ = entry_->word.load(std::memory_order_acquire);
  const Phase phase = phase_of(word_);
  const bool nonce_matches = has_nonce(*entry_, nonce_);
  std::atomic_thread_fence(std::memory_order_acquire);
  // Entries are reused: the id is used up if the entry has another id's nonce, or has got another id during the read.
  const bool same = (entry_->word.load(std::memory_order_relaxed) ^ word_) >> 8 == 0;
  if (!nonce_matches || !same || phase == Phase::unused) return used_up();
  word_ = with(word_, Phase::offered);
  if (phase >= Phase::served) return error_of_ended_id(phase);
  return ncclSuccess;
}

ncclResult_t IdRendezvous::open(int nranks, size_t bytes, int* memory, bool* first) {
  *first = false;
  // Initialising the memory takes microseconds. If it is not done after 2000 attempts (2 s), the rank that began it
  // was killed, and the id is lost.
  for (int attempts = 2000;;) {
    uint64_t now = entry_->word.load(std::memory_order_acquire);
    if (with(now, Phase::offered) != word_) return used_up();
    switch (phase_of(now)) {
      case Phase::offered:
        if (!entry_->word.compare_exchange_strong(now, with(now, Phase::being_laid_out))) continue;
        *first = true;
        if (const ncclResult_t result = create_memory(nranks, bytes); result != ncclSuccess) {
          publish(false);
          return result;
        }
        *memory = memory_.get();
        return ncclSuccess;
      case Phase::being_laid_out: {
        if (attempts-- == 0) return fail(ncclSystemError, "the rank that set the communicator's memory up has died");
        const timespec millisecond = {0, 1000000};
        nanosleep(&millisecond, nullptr);
        continue;
      }
      case Phase::laid_out:
        NCCLPY_TRY(open_shared_memory(now, nranks, bytes));
        if (memory_.get() < 0) continue;  // the id was used up meanwhile
        *memory = memory_.get();
        return ncclSuccess;
      case Phase::unused:
      case Phase::served:
      case Phase::given_up: return error_of_ended_id(phase_of(now));
    }
    return used_up();
  }
}

ncclResult_t IdRendezvous::create_memory(int nranks, size_t bytes) {
  NCCLPY_TRY(make_memory(memory_name, "a communicator", bytes, &memory_));
  entry_->memory.store(uint64_t(uint32_t(getpid())) << 32 | uint32_t(memory_.get()), std::memory_order_relaxed);
  entry_->nranks.store(uint32_t(nranks), std::memory_order_relaxed);
  return ncclSuccess;
}

ncclResult_t IdRendezvous::open_shared_memory(uint64_t word, int nranks, size_t bytes) {
  const uint32_t said = entry_->nranks.load(std::memory_order_relaxed);
  const uint64_t where = entry_->memory.load(std::memory_order_relaxed);
  const int32_t pid = int32_t(where >> 32);
  ncclResult_t result = ncclSuccess;
  bool found = false;
  if (said != uint32_t(nranks)) {
    result =
        fail(ncclInvalidArgument, "this rank says that there are %d ranks, another one said %u", nranks, said);
  } else {
    result = open_memory(pid, int32_t(where & 0xffffffff), memory_name, bytes, role_of_first_rank, &memory_, &found);
  }
  if (entry_->word.load(std::memory_order_acquire) != word) {  // the entry has changed, so the result is void
    memory_.reset();
    return ncclSuccess;
  }
  if (result == ncclSuccess && !found) result = fail(ncclSystemError, "the communicator's memory is damaged");
  return result;
}

void IdRendezvous::publish(bool ready) {
  if (!ready) memory_.reset();
  uint64_t mine = with(word_, Phase::being_laid_out);  // the entry's word, if the id was not withdrawn meanwhile
  entry_->word.compare_exchange_strong(mine, with(word_, ready ? Phase::laid_out : Phase::offered),
                                       std::memory_order_acq_rel);
}

void IdRendezvous::end(Phase how) {
  memory_.reset();
  if (entry_ == nullptr) return;
  uint64_t now = entry_->word.load(std::memory_order_acquire);
  while (with(now, Phase::offered) == word_ && phase_of(now) < Phase::served) {
    if (entry_->word.compare_exchange_weak(now, with(now, how), std::memory_order_acq_rel)) break;
  }
  if (mapping_ != nullptr) {
    munmap(mapping_, table_bytes);
    mapping_ = nullptr;
  } else {
    Tables& the = tables();
    std::lock_guard lock(the.mutex);
    // Checked under the lock: collect() may already have freed the entry, which then may belong to another id.
    const bool has_this_id = with(entry_->word.load(std::memory_order_acquire), Phase::offered) == word_;
    for (Table& table : the.all) {
      if (has_this_id && entry_ >= table.entries && entry_ < table.entries + table_entries && table.pid == getpid())
        table.give_back(uint32_t(entry_ - table.entries));
    }
  }
  entry_ = nullptr;
}

}  // namespace ncclpy::host
