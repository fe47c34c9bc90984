// The layout of the shared memory, the unique ids that lead to it, and how ranks take their places.
#include "segment.hpp"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <string>

#include "errors.hpp"
#include "watch.hpp"

namespace ncclpy::host {
namespace {

constexpr uint64_t magic = 0x3167657379706c63;  // "clpyseg1"
constexpr char memory_name[] = "ncclpy-communicator";
constexpr char memory_link[] = "/memfd:ncclpy-communicator";  // as /proc shows it

// Header::phase. The creator of the id does not know the number of ranks: the first rank lays the memory out.
enum Phase : uint32_t { created, being_laid_out, laid_out };

// The 128 bytes of a unique id.
struct Address {
  uint64_t magic;
  int32_t pid;
  int32_t descriptor;
  unsigned char nonce[16];
};
static_assert(sizeof(Address) <= sizeof(ncclUniqueId));

constexpr size_t page = 4096;

// What address space allows: every pair of ranks has its ring of pieces.
constexpr int max_ranks = 4096;

size_t aligned(size_t bytes) { return (bytes + page - 1) & ~(page - 1); }

struct Layout {
  size_t slots, channels, small, steps, pieces, end;
  explicit Layout(int nranks) {
    const size_t n = size_t(nranks);
    slots = aligned(sizeof(Header));
    channels = slots + aligned(n * sizeof(RankSlot));
    small = channels + aligned(n * n * sizeof(Channel));
    // Pages of what follows take memory only when they are used.
    steps = small + aligned(n * 2 * inline_bytes);
    pieces = steps + n * 4 * step_bytes;
    end = pieces + n * n * channel_slots * piece_bytes;
  }
};

// What this process knows of segments: those it has mapped, and the ids that it handed out. Never destroyed, because
// threads may be at work while the process exits.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Segment>> mapped;  // by nonce
  std::map<std::string, int> offered;                    // descriptors, by nonce
};

Registry& registry() {
  static Registry* the = new Registry;
  return *the;
}

// Random for each process, and different after a fork.
uint64_t this_process() {
  static const uint64_t token = [] {
    uint64_t random = 0;
    while (getrandom(&random, sizeof random, 0) != ssize_t(sizeof random)) {
    }
    return random;
  }();
  return token ^ (uint64_t(getpid()) << 32);
}

std::string key_of(const unsigned char* nonce) { return std::string(reinterpret_cast<const char*>(nonce), 16); }

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  int release() {
    int value = value_;
    value_ = -1;
    return value;
  }

 private:
  int value_;
};

char* map_memory(int descriptor, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

const char stale[] =
    "this unique id leads nowhere: it was already used for a communicator, or the process that made it (pid %d) has "
    "ended or belongs to another user or another container; make a new one with ncclGetUniqueId";

// Opens the memory behind an id and checks that it is this id's. The descriptor may meanwhile be something else.
ncclResult_t open_memory(const Address& address, int* descriptor) {
  char path[64], target[128];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", address.pid, address.descriptor);
  const ssize_t length = readlink(path, target, sizeof target - 1);
  if (length < 0) return fail(ncclInvalidUsage, stale, address.pid);
  target[length] = '\0';
  if (strncmp(target, memory_link, sizeof memory_link - 1) != 0) return fail(ncclInvalidUsage, stale, address.pid);
  Descriptor opened(open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (opened.get() < 0 || fstat(opened.get(), &info) != 0 || size_t(info.st_size) < sizeof(Header))
    return fail(ncclInvalidUsage, stale, address.pid);
  char* memory = map_memory(opened.get(), sizeof(Header));
  if (memory == nullptr) return fail(ncclSystemError, "mmap of the communicator's memory: %s", strerror(errno));
  const Header* header = reinterpret_cast<Header*>(memory);
  const bool ours = header->magic == magic && memcmp(header->nonce, address.nonce, sizeof address.nonce) == 0;
  munmap(memory, sizeof(Header));
  if (!ours) return fail(ncclInvalidUsage, stale, address.pid);
  *descriptor = opened.release();
  return ncclSuccess;
}

// Lays the memory out if nobody has, and maps all of it.
ncclResult_t map_segment(int descriptor, int nranks, std::shared_ptr<Segment>* segment) {
  if (nranks > max_ranks)
    return fail(ncclInvalidArgument, "%d ranks: the host engine serves at most %d", nranks, max_ranks);
  const size_t bytes = Layout(nranks).end;
  char* memory = map_memory(descriptor, aligned(sizeof(Header)));
  if (memory == nullptr) return fail(ncclSystemError, "mmap of the communicator's memory: %s", strerror(errno));
  Header* header = reinterpret_cast<Header*>(memory);
  ncclResult_t result = ncclSuccess;
  uint32_t expected = created;
  if (header->phase.compare_exchange_strong(expected, being_laid_out)) {
    if (ftruncate(descriptor, off_t(bytes)) != 0) {
      header->phase.store(created);
      result = fail(ncclSystemError, "no memory for a communicator of %d ranks (%zu bytes): %s", nranks, bytes,
                    strerror(errno));
    } else {
      header->nranks = uint32_t(nranks);
      header->bytes = bytes;
      header->phase.store(laid_out);  // fresh pages are zero, which is every field's first value
    }
  }
  // Whoever lays it out needs microseconds; if it was killed at that, nobody can ever use this id.
  for (int i = 0; result == ncclSuccess && header->phase.load() == being_laid_out; i++) {
    if (i == 2000) result = fail(ncclSystemError, "the rank that set the communicator's memory up has died");
    const timespec millisecond = {0, 1000000};
    nanosleep(&millisecond, nullptr);
  }
  if (result == ncclSuccess && header->nranks != uint32_t(nranks)) {
    result = fail(ncclInvalidArgument, "this rank says that there are %d ranks, another one said %u", nranks,
                  header->nranks);
  }
  // Memory that is shorter than its header says would end the process when it is touched.
  struct stat info;
  if (result == ncclSuccess && (header->phase.load() != laid_out || header->bytes != bytes ||
                                fstat(descriptor, &info) != 0 || size_t(info.st_size) < bytes)) {
    result = fail(ncclSystemError, "the communicator's memory is damaged");
  }
  munmap(memory, aligned(sizeof(Header)));
  if (result != ncclSuccess) return result;
  memory = map_memory(descriptor, bytes);
  if (memory == nullptr) return fail(ncclSystemError, "mmap of %zu bytes for a communicator: %s", bytes, strerror(errno));
  *segment = std::make_shared<Segment>(memory, bytes, nranks);
  return ncclSuccess;
}

}  // namespace

Segment::Segment(char* memory, size_t bytes, int nranks)
    : memory_(memory), bytes_(bytes), nranks_(nranks), spin_(nranks) {
  const Layout layout(nranks);
  slots_at_ = layout.slots;
  channels_at_ = layout.channels;
  small_at_ = layout.small;
  steps_at_ = layout.steps;
  pieces_at_ = layout.pieces;
}

Segment::~Segment() {
  // Whoever made the id may keep the memory open without being a rank; what the last rank leaves takes no room.
  const uint32_t mine = claimed_.load();
  if (header().departed.fetch_add(mine) + mine >= uint32_t(nranks_))
    madvise(memory_ + steps_at_, bytes_ - steps_at_, MADV_REMOVE);
  munmap(memory_, bytes_);
  if (watched_.load()) forget_segments();
}

size_t Segment::buffer_bytes(int rank) const {
  size_t pages = 0;
  for_buffers(rank, [&](char* memory, size_t bytes) {
    std::vector<unsigned char> present(bytes / page);
    if (mincore(memory, bytes, present.data()) != 0) return;
    for (const unsigned char one : present) pages += one & 1;
  });
  return pages * page;
}

void Segment::release_buffers(int rank) {
  for_buffers(rank, [](char* memory, size_t bytes) { madvise(memory, bytes, MADV_REMOVE); });
}

bool Segment::is_local(int rank) { return slot(rank).process == this_process(); }

void Segment::bury(int rank) {
  if (slot(rank).dead.exchange(1) == 0) header().departed.fetch_add(1);
  int32_t none = 0;
  header().first_dead.compare_exchange_strong(none, rank + 1, std::memory_order_acq_rel);
  header().bell.ring();
  for (int r = 0; r < nranks_; r++) slot(r).bell.ring();
}

int Segment::take_pulses() {
  for (int rank = 0; rank < nranks_; rank++) {
    const RankSlot& one = slot(rank);
    if (!one.present.load(std::memory_order_acquire) || one.left.load() || one.dead.load() || is_local(rank)) continue;
    if (start_of_process(one.pid) != one.start) bury(rank);
  }
  return first_dead();
}

void Segment::watch_others(const std::shared_ptr<Segment>& segment) {
  if (segment->watched_.load()) return;
  for (int rank = 0; rank < segment->nranks_; rank++) {
    if (!segment->slot(rank).present.load(std::memory_order_acquire) || segment->is_local(rank)) continue;
    if (!segment->watched_.exchange(true)) watch(segment);
    return;
  }
}

bool Segment::one_process() {
  for (int rank = 0; rank < nranks_; rank++) {
    if (!is_local(rank)) return false;
  }
  return true;
}

ncclResult_t create_unique_id(ncclUniqueId* id) {
  retire_unique_ids();
  Address address = {};
  address.magic = magic;
  address.pid = getpid();
  if (getrandom(address.nonce, sizeof address.nonce, 0) != ssize_t(sizeof address.nonce))
    return fail(ncclSystemError, "getrandom: %s", strerror(errno));
  Descriptor memory(memfd_create(memory_name, MFD_CLOEXEC));
  if (memory.get() < 0) return fail(ncclSystemError, "memfd_create for a unique id: %s", strerror(errno));
  // For this user alone, as far as a file without a name can be opened by others at all.
  if (fchmod(memory.get(), 0600) != 0 || ftruncate(memory.get(), off_t(aligned(sizeof(Header)))) != 0)
    return fail(ncclSystemError, "no memory for a unique id: %s", strerror(errno));
  char* mapped = map_memory(memory.get(), aligned(sizeof(Header)));
  if (mapped == nullptr) return fail(ncclSystemError, "mmap for a unique id: %s", strerror(errno));
  Header* header = reinterpret_cast<Header*>(mapped);
  header->magic = magic;
  memcpy(header->nonce, address.nonce, sizeof address.nonce);
  munmap(mapped, aligned(sizeof(Header)));
  address.descriptor = memory.get();
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().offered[key_of(address.nonce)] = memory.get();
  }
  memory.release();
  memset(id, 0, sizeof *id);
  memcpy(id, &address, sizeof address);
  return ncclSuccess;
}

void withdraw_unique_id(const ncclUniqueId& id) {
  Address address;
  memcpy(&address, &id, sizeof address);
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().offered.find(key_of(address.nonce));
  if (found == registry().offered.end()) return;
  close(found->second);
  registry().offered.erase(found);
}

ncclResult_t join_segment(const ncclUniqueId& id, int nranks, int rank, int device,
                          std::shared_ptr<Segment>* segment) {
  Address address;
  memcpy(&address, &id, sizeof address);
  if (address.magic != magic)
    return fail(ncclInvalidArgument, "this unique id was not made by ncclGetUniqueId of the host engine");
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto known = registry().mapped.find(key_of(address.nonce));
    std::shared_ptr<Segment> found = known == registry().mapped.end() ? nullptr : known->second.lock();
    if (found == nullptr) {
      int descriptor = -1;
      NCCLPY_TRY(open_memory(address, &descriptor));
      Descriptor opened(descriptor);
      NCCLPY_TRY(map_segment(opened.get(), nranks, &found));
      registry().mapped[key_of(address.nonce)] = found;
    } else if (found->nranks() != nranks) {
      return fail(ncclInvalidArgument, "this rank says that there are %d ranks, another one said %d", nranks,
                  found->nranks());
    }
    *segment = found;
  }
  RankSlot& slot = (*segment)->slot(rank);
  if (slot.claimed.exchange(1) != 0) {
    segment->reset();
    return fail(ncclInvalidUsage, "rank %d has already joined with this unique id; an id serves one communicator", rank);
  }
  (*segment)->claimed();
  slot.device = device;
  slot.pid = getpid();
  slot.start = start_of_process(slot.pid);
  static std::atomic<uint64_t> beacon;
  slot.process = this_process();
  beacon.store(slot.process);
  slot.beacon = &beacon;
  slot.present.store(1, std::memory_order_release);
  Header& header = (*segment)->header();
  header.attached.fetch_add(1, std::memory_order_acq_rel);
  header.bell.ring();  // also before the last one: the others begin to watch this process
  return ncclSuccess;
}

void retire_unique_ids() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (auto it = registry().mapped.begin(); it != registry().mapped.end();) {
    it = it->second.expired() ? registry().mapped.erase(it) : std::next(it);
  }
  for (auto it = registry().offered.begin(); it != registry().offered.end();) {
    char* memory = map_memory(it->second, sizeof(Header));
    const Header* header = reinterpret_cast<Header*>(memory);
    const bool served = memory != nullptr && header->phase.load() == laid_out &&
                        (header->attached.load() == header->nranks || header->first_dead.load() != 0 ||
                         header->spoiled.load() != 0);
    if (memory != nullptr) munmap(memory, sizeof(Header));
    if (served) close(it->second);
    it = served ? registry().offered.erase(it) : std::next(it);
  }
}

}  // namespace ncclpy::host
