// The shared memory of one communicator: where its ranks meet, agree, describe their operations and pass data.
//
// It is a memfd, so it has no name in a file system: whatever happens to the processes, nothing stays behind, and
// /dev/shm may be as small as containers make it. How the ranks find it is in unique_id.hpp. All ranks of one process
// share one mapping of it, and one Segment object.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/wait.hpp"
#include "call_kind.hpp"
#include "disagreement.hpp"
#include "reduction/reduce.hpp"
#include "unique_id.hpp"

namespace ncclpy::host {

class Comm;

enum class Collective : uint8_t {
  all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter
};

// A rank's description of its next collective.
struct Record {
  Collective kind;
  bool reads_peers;  // see peer_memory.hpp
  bool cma_read;        // of the rank that decides, for all: see transfer_tuner.hpp
  ncclDataType_t dtype;
  Operator op;
  int32_t root;
  uint64_t count;
  const void* send;
  void* recv;
  uint64_t scalar;
};

// Where a record lies, with room for a contribution of a few bytes: who reads the one has the other with it, as processors
// fetch cache lines in pairs; and nothing that the rank goes on writing is in those.
constexpr size_t record_inline_bytes = 64;
struct alignas(128) PlacedRecord {
  Record record;
  uint64_t passed;                  // which collective the rank was through with then
  std::atomic<uint64_t> number{0};  // of the collective, from 1 on; written last
  alignas(64) char inline_data[record_inline_bytes];

  // Another rank may be reading, of a collective that needs it no more, and finds that the number has changed.
  void write(const Record& from);
  // False if another one is here, or comes meanwhile.
  bool read(uint64_t which, Record* to) const;
};
static_assert(sizeof(PlacedRecord) == 128);

// A rank's places for records, which come round. So many collectives a rank may be ahead of others, where it needs nothing of
// them.
constexpr size_t record_places = 8;
inline int place_of(uint64_t number) { return int(number % record_places); }

// Counts arrivals of all ranks over all generations; generation g is open when g * nranks have arrived.
struct Barrier {
  std::atomic<uint64_t> arrivals{0};

  bool open(uint64_t target) const { return arrivals.load(std::memory_order_acquire) >= target; }
  // Arrives and returns whether that opened the gate.
  bool arrive(uint64_t target) { return arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == target; }
  // Takes the arrival back. False when the gate has opened meanwhile: the others count on this rank now.
  bool withdraw(uint64_t target) {
    uint64_t now = arrivals.load(std::memory_order_acquire);
    while (now < target) {
      if (arrivals.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }
};

// Bytes of one rank's contribution to an exchange among all ranks (split, unique ids).
constexpr size_t exchange_bytes = 192;
// Largest contribution that travels inside the segment, together with the description of the operation; with more ranks less,
// as each may have to read those of all.
constexpr size_t inline_bytes = 32 << 10;
constexpr size_t inline_buffers = 2;
inline size_t max_inline_bytes(int nranks) {
  return std::clamp<size_t>(2 * inline_bytes / size_t(nranks) / 64 * 64, 2048, inline_bytes);
}

// Where the first survivor of a shrink tells the others how to meet.
struct ShrinkBoard {
  std::atomic<uint64_t> key{0};
  ncclUniqueId id;
};

// Where the ranks of a communicator find the id with which it grows.
struct GrowBoard {
  std::atomic<uint64_t> published;  // twice the number of ids so far, plus one while the next is being made
  std::atomic<uint64_t> taken;      // how often ranks have taken one
  ncclUniqueId id;
};

struct alignas(128) RankSlot {
  std::atomic<uint32_t> occupied{0};
  std::atomic<uint32_t> present{0};  // the rank has written the next seven and its place is taken
  uint64_t machine = 0;              // a hash of NCCL_HOSTID: ranks with different ones are on different machines
  int32_t device = 0;
  int32_t pid = 0;
  uint64_t start = 0;    // of the process, see watch.hpp
  uint64_t process_token = 0;  // random for each process, so that a reused pid is not mistaken for a neighbour
  const void* token_address = nullptr;   // where that process has the same number
  cpu_set_t cores{};              // that the rank may use
  std::atomic<uint32_t> closed{0};  // the communicator was destroyed: what its process does is nobody's concern any more
  std::atomic<uint32_t> dead{0};  // the process has ended before that
  // For straggler_report, which only reads them: words of call_kind.hpp, and how often the rank has described something or has come to
  // a gate.
  std::atomic<uint32_t> aborted{0};
  std::atomic<uint32_t> revoked{0};
  // Collectives behind `passed` that this rank has called and will never complete; others may, with wrong data: abort_corruption.hpp.
  std::atomic<uint64_t> abandoned{0};
  std::atomic<uint64_t> last_call{0};  // the last call
  std::atomic<uint64_t> last_done{0};    // the last operation that has run
  std::atomic<uint64_t> current_call[sides];
  std::atomic<uint64_t> arrived[sides];
  PlacedRecord placed[record_places];
  alignas(64) std::atomic<uint64_t> passed{0};  // the last collective for which this rank needs nothing more
  alignas(64) FutexEvent changed;                        // point-to-point news for this rank
  const Record& record(int place) const { return placed[place].record; }
  char exchange[2][exchange_bytes];
  ShrinkBoard shrink;
};

// Counters of signals from one rank to another: those of all contexts that a configuration may ask for.
constexpr int signal_counters = 8;

// What sender and receiver of a message must agree on.
struct MessageKind {
  uint64_t count = 0;
  uint64_t dtype = 0;

  bool operator==(const MessageKind& other) const { return count == other.count && dtype == other.dtype; }
};

// Pieces in flight on a channel between processes, and their size: small enough to stay in the cache.
constexpr size_t channel_slots = 16;
constexpr size_t piece_bytes = 16 << 10;

// A piece in the ring: all that the receiver reads of few bytes is one cache line.
constexpr size_t piece_inline_bytes = 40;
struct alignas(64) PieceSlot {
  std::atomic<uint64_t> number{0};  // of the piece that is here, from 1 on
  MessageKind message;              // that it belongs to
  char inline_data[piece_inline_bytes];
};

// The way of messages from one rank to another, see p2p.cpp, and of its signals, see one_sided.cpp.
struct alignas(64) Channel {
  // The sender offers its buffer, the receiver copies from it.
  std::atomic<uint64_t> state{0};
  const void* data = nullptr;
  MessageKind offer;
  MessageKind wanted;                // what the receiver takes
  std::atomic<uint32_t> refused{0};  // it cannot read the sender's memory: no more offers
  // Messages that one side has broken off, and the other may complete: see abort_corruption.hpp.
  std::atomic<uint32_t> abandoned_sends{0}, abandoned_receives{0};
  // Or pieces, counted over the channel's life, pass through a ring.
  alignas(64) uint64_t written = 0;  // this line is the sender's alone
  uint64_t seen_read = 0;            // what `read` was when the ring was full, or at first
  PieceSlot pieces[channel_slots];
  alignas(64) std::atomic<uint64_t> read{0};
  std::atomic<uint64_t> signals[signal_counters] = {};  // ever given
};

// A rank's buffer for collectives between processes: twice the step's input, twice its result.
constexpr size_t step_bytes = 256 << 10;

struct Header {
  uint64_t magic;
  unsigned char nonce[16];
  uint32_t nranks;
  uint64_t bytes;
  alignas(128) std::atomic<uint32_t> attached;
  std::atomic<int32_t> first_dead;  // the first rank found dead, plus one
  GrowBoard grow;
  Disagreement disagreement;
  alignas(128) Barrier control;
  alignas(128) Barrier data;
  alignas(128) FutexEvent changed;  // news that concern all ranks: all have come, or somebody has passed what others wait for
  std::atomic<uint32_t> record_waiters{0};  // ranks that wait until others have passed a collective, or look out for what they call
};

class Segment {
 public:
  // `meeting` is how the ranks meet here, until all have come.
  Segment(char* memory, size_t bytes, int nranks, std::unique_ptr<Meeting> meeting);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() { return *reinterpret_cast<Header*>(memory_); }
  RankSlot& slot(int rank) { return reinterpret_cast<RankSlot*>(memory_ + slots_at_)[rank]; }
  Channel& channel(int from, int to) { return reinterpret_cast<Channel*>(memory_ + channels_at_)[from * nranks_ + to]; }
  // A small buffer of `rank` for so many bytes, by the place of the record. Of more than a few bytes there are two, which stay
  // in the cache.
  char* inline_buffer(int rank, int place, size_t bytes) {
    if (bytes <= record_inline_bytes) return slot(rank).placed[place].inline_data;
    return memory_ + inline_at_ + (size_t(rank) * inline_buffers + size_t(place) % inline_buffers) * inline_bytes;
  }
  // The step buffers of `rank`, by parity of the step.
  char* step_input(int rank, int parity) { return step(rank, parity); }
  char* step_result(int rank, int parity) { return step(rank, 2 + parity); }
  char* piece(int from, int to, size_t slot, size_t bytes) {
    if (bytes <= piece_inline_bytes) return channel(from, to).pieces[slot].inline_data;
    return memory_ + pieces_at_ + ((size_t(from) * size_t(nranks_) + size_t(to)) * channel_slots + slot) * piece_bytes;
  }

  // Memory: what is always there, as one rank's part; what a rank's data pass through, as far as it was ever touched;
  // and giving the latter back, when no rank uses it.
  size_t fixed_bytes() const { return inline_at_ / size_t(nranks_); }
  size_t buffer_bytes(int rank) const;
  void release_buffers(int rank);

  int nranks() const { return nranks_; }
  Spin& spin() { return spin_; }
  bool complete() { return header().attached.load(std::memory_order_acquire) == uint32_t(nranks_); }
  // Whether all ranks are threads of this process. Known once all are attached.
  bool one_process();
  bool is_local(int rank);
  bool same_process(int a, int b) { return slot(a).process_token == slot(b).process_token; }

  // All ranks are here: which cores each has is known.
  void find_cores();
  // All ranks are here, or never will be: the unique id has served.
  void end_meeting();

  // The first rank found dead, or -1. Nothing on this segment will ever be complete then.
  int first_dead() { return std::clamp(header().first_dead.load(std::memory_order_acquire), 0, nranks_) - 1; }
  // Marks a rank dead for every process, and wakes all who wait.
  void mark_dead(int rank);
  // Wakes all that wait on it, in all processes.
  void notify_all();
  // Tells all ranks that two messages differ, unless they have been told before, and wakes all who wait.
  void report_disagreement(const std::string& text);
  // Buries whoever is dead at this moment, also if no watcher has noticed yet; the first dead rank, or -1.
  int find_dead_ranks();
  // Whether the processes of its ranks are watched (watch.hpp). The first who asks for it gets true; `tell` is called
  // when the segment is gone.
  bool is_watched() const { return watched_.load(); }
  bool set_watched(void (*on_destroyed)()) {
    if (watched_.exchange(true)) return false;
    on_destroyed_ = on_destroyed;
    return true;
  }

  // The communicators of this process on this segment, for those things that NCCL does when the last one goes.
  Mutex<NCCLPY_LOCK_SEGMENT> mutex;
  std::vector<std::shared_ptr<Comm>> local;
  size_t local_departed = 0;

 private:
  // Calls `use(memory, bytes)` for the rank's small and step buffers and the pieces on their way to it.
  template <class Use>
  void for_buffers(int rank, Use use) const {
    use(memory_ + inline_at_ + size_t(rank) * inline_buffers * inline_bytes, inline_buffers * inline_bytes);
    use(memory_ + steps_at_ + size_t(rank) * 4 * step_bytes, 4 * step_bytes);
    const size_t ring = channel_slots * piece_bytes;
    for (int from = 0; from < nranks_; from++)
      use(memory_ + pieces_at_ + (size_t(from) * size_t(nranks_) + size_t(rank)) * ring, ring);
  }
  char* step(int rank, int which) { return memory_ + steps_at_ + (size_t(rank) * 4 + size_t(which)) * step_bytes; }

  std::unique_ptr<Meeting> meeting_;  // guarded by mutex
  char* memory_;
  size_t bytes_;
  int nranks_;
  Spin spin_;
  std::atomic<bool> watched_{false};
  void (*on_destroyed_)() = nullptr;  // by who has set watched_, who holds the segment
  size_t slots_at_, channels_at_, inline_at_, steps_at_, pieces_at_;
};

// How long the memory is for so many ranks.
size_t segment_bytes(int nranks);

// Opens the segment of `id` and takes the place of `rank` in it. Does not wait for the other ranks.
ncclResult_t join_segment(const ncclUniqueId& id, int nranks, int rank, int device, std::shared_ptr<Segment>* segment);

}  // namespace ncclpy::host
