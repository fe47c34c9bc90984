// The layout of the shared memory, and how ranks take their places in it.
#include "segment.hpp"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/errors.hpp"
#include "base/mutex.hpp"
#include "process.hpp"
#include "unique_id.hpp"

namespace ncclpy::host {
namespace {

constexpr uint64_t magic = 0x3867657379706c63;  // "clpyseg8"

constexpr size_t page = 4096;

// Limited by address space: every pair of ranks has a ring of pieces.
constexpr int max_ranks = 4096;

size_t aligned(size_t bytes) { return (bytes + page - 1) & ~(page - 1); }

struct Layout {
  size_t slots, channels, inline_area, steps, pieces, end;
  explicit Layout(int nranks) {
    const size_t n = size_t(nranks);
    slots = aligned(sizeof(Header));
    channels = slots + aligned(n * sizeof(RankSlot));
    // Pages from here on take memory only once they are used.
    inline_area = channels + aligned(n * n * sizeof(Channel));
    steps = inline_area + aligned(n * inline_buffers * inline_bytes);
    pieces = steps + n * 4 * step_bytes;
    end = pieces + n * n * channel_slots * piece_bytes;
  }
};

// The segments that this process has mapped, so that its ranks share one mapping. Never destroyed, because threads may
// run while the process exits.
struct Registry {
  Mutex<NCCLPY_LOCK_REGISTRY> mutex;
  std::map<std::string, std::weak_ptr<Segment>> mapped;  // by key_of(id)
};

Registry& registry() {
  static Registry* the = new Registry;
  return *the;
}

// A random number for each process, different after a fork.
uint64_t this_process() {
  static const uint64_t token = [] {
    uint64_t random = 0;
    while (getrandom(&random, sizeof random, 0) != ssize_t(sizeof random)) {
    }
    return random;
  }();
  return token ^ (uint64_t(getpid()) << 32);
}

// Maps the whole memory. The first rank initialises it.
ncclResult_t map_segment(std::unique_ptr<IdRendezvous> id_rendezvous, int nranks, std::shared_ptr<Segment>* segment) {
  const size_t bytes = segment_bytes(nranks);
  int descriptor = -1;
  bool first = false;
  NCCLPY_TRY(id_rendezvous->open(nranks, bytes, &descriptor, &first));
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    if (first) id_rendezvous->publish(false);
    return fail(ncclSystemError,
                "no address space for a communicator of %d ranks, %zu bytes (the limit is ulimit -v): %s", nranks, bytes,
                strerror(error));
  }
  Header* header = static_cast<Header*>(memory);
  if (first) {  // fresh pages are zero, which is the initial value of every other field
    header->magic = magic;
    memcpy(header->nonce, id_rendezvous->nonce(), sizeof header->nonce);
    header->nranks = uint32_t(nranks);
    header->bytes = bytes;
    id_rendezvous->publish(true);
  } else if (header->magic != magic || memcmp(header->nonce, id_rendezvous->nonce(), sizeof header->nonce) != 0 ||
             header->nranks != uint32_t(nranks) || header->bytes != bytes) {
    munmap(memory, bytes);
    return fail(ncclSystemError, "the communicator's memory is damaged");
  }
  id_rendezvous->mapped(first);
  *segment = std::make_shared<Segment>(static_cast<char*>(memory), bytes, nranks, std::move(id_rendezvous));
  return ncclSuccess;
}

// Records are copied word by word with atomic accesses, since a rank may overwrite its record while another one reads
// it.
typedef uint64_t __attribute__((may_alias)) Word;
constexpr size_t record_words = sizeof(Record) / sizeof(Word);
static_assert(sizeof(Record) % sizeof(Word) == 0);

}  // namespace

void PlacedRecord::write(const Record& from) {
  const Word* const words = reinterpret_cast<const Word*>(&from);
  Word* const here = reinterpret_cast<Word*>(&record);
  number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < record_words; i++) __atomic_store_n(here + i, words[i], __ATOMIC_RELAXED);
}

bool PlacedRecord::read(uint64_t which, Record* to) const {
  if (number.load(std::memory_order_acquire) != which) return false;
  const Word* const here = reinterpret_cast<const Word*>(&record);
  Word* const words = reinterpret_cast<Word*>(to);
  for (size_t i = 0; i < record_words; i++) words[i] = __atomic_load_n(here + i, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_acquire);
  return number.load(std::memory_order_relaxed) == which;
}

Segment::Segment(char* memory, size_t bytes, int nranks, std::unique_ptr<IdRendezvous> id_rendezvous)
    : id_rendezvous_(std::move(id_rendezvous)), memory_(memory), bytes_(bytes), nranks_(nranks), spin_(nranks) {
  const Layout layout(nranks);
  slots_at_ = layout.slots;
  channels_at_ = layout.channels;
  inline_at_ = layout.inline_area;
  steps_at_ = layout.steps;
  pieces_at_ = layout.pieces;
}

Segment::~Segment() {
  munmap(memory_, bytes_);
  if (watched_.load()) on_destroyed_();
}

void Segment::end_id_rendezvous() {
  std::unique_ptr<IdRendezvous> ended;
  {
    std::lock_guard lock(mutex);
    ended = std::move(id_rendezvous_);
  }
  if (ended != nullptr) ended->end(complete() ? Phase::served : Phase::given_up);
}

void Segment::find_cores() {
  spin_.set_cores(nranks_, [this](int rank) -> const cpu_set_t& { return slot(rank).cores; });
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

void Segment::notify_all() {
  for (int rank = 0; rank < nranks_; rank++) slot(rank).changed.notify();
  header().changed.notify();
}

bool Segment::is_local(int rank) { return slot(rank).process_token == this_process(); }

void Segment::mark_dead(int rank) {
  slot(rank).dead.store(1);
  int32_t none = 0;
  header().first_dead.compare_exchange_strong(none, rank + 1, std::memory_order_acq_rel);
  notify_all();
}

void Segment::report_disagreement(const std::string& text) {
  if (header().disagreement.report(text)) notify_all();
}

int Segment::find_dead_ranks() {
  for (int rank = 0; rank < nranks_; rank++) {
    const RankSlot& one = slot(rank);
    if (!one.present.load(std::memory_order_acquire) || one.closed.load() || one.dead.load()) continue;
    if (is_local(rank)) continue;
    if (has_ended(one.pid, one.start)) mark_dead(rank);
  }
  return first_dead();
}

bool Segment::one_process() {
  for (int rank = 0; rank < nranks_; rank++) {
    if (!is_local(rank)) return false;
  }
  return true;
}

size_t segment_bytes(int nranks) { return Layout(nranks).end; }

namespace {

uint64_t own_machine() {
  const char* const name = std::getenv("NCCL_HOSTID");
  return name == nullptr ? 0 : std::hash<std::string_view>{}(name);
}

}  // namespace

ncclResult_t join_segment(const ncclUniqueId& id, int nranks, int rank, int device,
                          std::shared_ptr<Segment>* segment) {
  if (nranks > max_ranks)
    return fail(ncclInvalidArgument, "%d ranks: the host engine serves at most %d", nranks, max_ranks);
  auto id_rendezvous = std::make_unique<IdRendezvous>();
  {
    std::lock_guard lock(registry().mutex);
    auto& mapped = registry().mapped;
    for (auto it = mapped.begin(); it != mapped.end();) it = it->second.expired() ? mapped.erase(it) : std::next(it);
    const std::string key = key_of(id);
    const auto known = mapped.find(key);
    std::shared_ptr<Segment> found = known == mapped.end() ? nullptr : known->second.lock();
    if (found == nullptr) {
      NCCLPY_TRY(id_rendezvous->find(id));
      NCCLPY_TRY(map_segment(std::move(id_rendezvous), nranks, &found));
      mapped[key] = found;
    } else if (found->nranks() != nranks) {
      return fail(ncclInvalidArgument, "this rank says that there are %d ranks, another one said %d", nranks,
                  found->nranks());
    }
    *segment = found;
  }
  RankSlot& slot = (*segment)->slot(rank);
  if (slot.occupied.exchange(1) != 0) {
    segment->reset();
    return fail(ncclInvalidUsage, "rank %d has already joined with this unique id; an id serves one communicator", rank);
  }
  slot.machine = own_machine();
  slot.device = device;
  slot.pid = getpid();
  slot.start = start_of_this_process();
  static std::atomic<uint64_t> token_address;
  slot.process_token = this_process();
  token_address.store(slot.process_token);
  slot.token_address = &token_address;
  slot.cores = own_cores();
  slot.present.store(1, std::memory_order_release);
  Header& header = (*segment)->header();
  header.attached.fetch_add(1, std::memory_order_acq_rel);
  header.changed.notify();  // at every arrival, not only the last: waiting ranks begin to watch this process
  return ncclSuccess;
}

}  // namespace ncclpy::host
