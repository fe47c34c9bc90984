// The shared memory of one communicator: where its ranks meet, agree, describe their operations and pass data.
//
// The memory is a memfd without a name in a file system: nothing is left behind however the processes end, and the
// size of /dev/shm, which containers make small, does not matter. unique_id.hpp says how the ranks find it. All ranks
// of one process share one mapping and one Segment object.
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
  bool cma_read;     // set by the rank that decides for all, see transfer_tuner.hpp
  ncclDataType_t dtype;
  Operator op;
  int32_t root;
  uint64_t count;
  const void* send;
  void* recv;
  uint64_t scalar;
};

// A record with space for a contribution of a few bytes. A reader of the record gets the contribution with it, since
// processors fetch cache lines in pairs; no data that the rank writes later shares these lines.
constexpr size_t record_inline_bytes = 64;
struct alignas(128) PlacedRecord {
  Record record;
  uint64_t passed;                  // the last collective that the rank had passed when it wrote this
  std::atomic<uint64_t> number{0};  // of the collective, from 1; written last
  alignas(64) char inline_data[record_inline_bytes];

  // Stores `from` with `number` 0; Rendezvous::describe() stores the number. Another rank may still be reading the old
  // record, although no collective needs it any more; that rank notices that the number has changed.
  void write(const Record& from);
  // Returns false if the place holds another collective's record, or gets one during the read.
  bool read(uint64_t which, Record* to) const;
};
static_assert(sizeof(PlacedRecord) == 128);

// The places of a rank's records, used in turn. A rank may be this many collectives ahead of the others if it needs no
// data from them.
constexpr size_t record_places = 8;
inline int place_of(uint64_t number) { return int(number % record_places); }

// Counts the arrivals of all ranks over all generations; generation g is open when g * nranks have arrived.
struct Barrier {
  std::atomic<uint64_t> arrivals{0};

  bool open(uint64_t target) const { return arrivals.load(std::memory_order_acquire) >= target; }
  // Arrives, and returns whether this arrival opened the barrier.
  bool arrive(uint64_t target) { return arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == target; }
  // Takes the arrival back. Returns false if the barrier has opened meanwhile: the other ranks then rely on this rank.
  bool withdraw(uint64_t target) {
    uint64_t now = arrivals.load(std::memory_order_acquire);
    while (now < target) {
      if (arrivals.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }
};

// Bytes that one rank contributes to an exchange among all ranks (split, unique ids).
constexpr size_t exchange_bytes = 192;
// The largest contribution that a rank stores beside its record (transports/inline_data.cpp). With more than two ranks
// the limit is lower, since a rank may have to read the contributions of all.
constexpr size_t inline_bytes = 32 << 10;
constexpr size_t inline_buffers = 2;
inline size_t max_inline_bytes(int nranks) {
  return std::clamp<size_t>(2 * inline_bytes / size_t(nranks) / 64 * 64, 2048, inline_bytes);
}

// Where the first survivor of a shrink publishes the new communicator's id.
struct ShrinkBoard {
  std::atomic<uint64_t> key{0};
  ncclUniqueId id;
};

// Where the ranks of a communicator find the id with which it grows.
struct GrowBoard {
  std::atomic<uint64_t> published;  // twice the number of ids so far, plus one while the next is being made
  std::atomic<uint64_t> taken;      // how many times a rank has taken an id
  ncclUniqueId id;
};

struct alignas(128) RankSlot {
  std::atomic<uint32_t> occupied{0};
  std::atomic<uint32_t> present{0};  // the next seven fields are written: the rank has joined
  uint64_t machine = 0;              // a hash of NCCL_HOSTID: ranks with different ones are on different machines
  int32_t device = 0;
  int32_t pid = 0;
  uint64_t start = 0;  // of the process, see process.hpp
  // random for each process, so that a process with a reused pid is not taken for this one
  uint64_t process_token = 0;
  const void* token_address = nullptr;  // of the same number in the process's own memory, see peer_memory.cpp
  cpu_set_t cores{};                    // that the rank may use
  std::atomic<uint32_t> closed{0};      // the rank has ended the communicator: its process's end is no longer reported
  std::atomic<uint32_t> dead{0};        // the process ended before `closed` was set
  // These two also explain to other ranks why they cannot read this rank's memory.
  std::atomic<uint32_t> aborted{0};
  std::atomic<uint32_t> revoked{0};
  // The number of collectives after `passed` that this rank has called and will never complete. On other ranks the
  // same collectives may complete with wrong data, see abort_corruption.hpp.
  std::atomic<uint64_t> abandoned{0};
  // For straggler_report, which only reads them. The calls are words of call_kind.hpp; `arrived` is how many times the
  // rank has described a collective or arrived at a barrier.
  std::atomic<uint64_t> last_call{0};
  std::atomic<uint64_t> last_done{0};  // the last operation that has run
  std::atomic<uint64_t> current_call[sides];
  std::atomic<uint64_t> arrived[sides];
  PlacedRecord placed[record_places];
  alignas(64) std::atomic<uint64_t> passed{0};  // the last collective for which this rank needs no other rank any more
  alignas(64) FutexEvent changed;               // news about this rank's messages and signals
  const Record& record(int place) const { return placed[place].record; }
  char exchange[2][exchange_bytes];
  ShrinkBoard shrink;
};

// Counters of signals from one rank to another, for all contexts that a configuration may ask for.
constexpr int signal_counters = 8;

// What the sender and the receiver of a message must agree on.
struct MessageKind {
  uint64_t count = 0;
  uint64_t dtype = 0;

  bool operator==(const MessageKind& other) const { return count == other.count && dtype == other.dtype; }
};

// Pieces in flight on a channel between processes, and their size: small enough to stay in the cache.
constexpr size_t channel_slots = 16;
constexpr size_t piece_bytes = 16 << 10;

// A slot of the ring of pieces. Of a message of few bytes the receiver reads only this cache line.
constexpr size_t piece_inline_bytes = 40;
struct alignas(64) PieceSlot {
  std::atomic<uint64_t> number{0};  // of the piece in this slot, from 1
  MessageKind message;              // the message that the piece belongs to
  char inline_data[piece_inline_bytes];
};

// The messages (p2p.cpp) and signals (one_sided.cpp) from one rank to another.
struct alignas(64) Channel {
  // The sender offers its buffer, and the receiver copies from it.
  std::atomic<uint64_t> state{0};
  const void* data = nullptr;
  MessageKind offer;
  MessageKind wanted;                // what the receiver expects
  std::atomic<uint32_t> refused{0};  // the receiver cannot read the sender's memory: no more offers
  // Messages that one side has abandoned and that the other side may complete, see abort_corruption.hpp.
  std::atomic<uint32_t> abandoned_sends{0}, abandoned_receives{0};
  // Messages that are not offered pass through a ring of pieces; the numbers count pieces over the channel's life.
  alignas(64) uint64_t written = 0;  // written by the sender alone, in a cache line of its own
  uint64_t seen_read = 0;            // the value of `read` when the sender last read it, 0 at first
  PieceSlot pieces[channel_slots];
  alignas(64) std::atomic<uint64_t> read{0};
  std::atomic<uint64_t> signals[signal_counters] = {};  // sent so far
};

// The size of one step buffer, for collectives between processes. Each rank has two step buffers for input and two for
// results.
constexpr size_t step_bytes = 256 << 10;

struct Header {
  uint64_t magic;
  unsigned char nonce[16];
  uint32_t nranks;
  uint64_t bytes;
  alignas(128) std::atomic<uint32_t> attached;
  std::atomic<int32_t> first_dead;  // the first rank found dead, plus one; 0: none
  GrowBoard grow;
  Disagreement disagreement;
  alignas(128) Barrier control;
  alignas(128) Barrier data;
  // Notified when a rank has joined, when all ranks have arrived, when a rank has described or passed a collective
  // that others wait for, when an id is published for a shrink or a grow, and when an operation cannot complete.
  alignas(128) FutexEvent changed;
  // The number of ranks that must be notified when a rank describes or passes a collective.
  std::atomic<uint32_t> record_waiters{0};
};

class Segment {
 public:
  // Through `id_rendezvous` the other ranks find this memory until all have joined.
  Segment(char* memory, size_t bytes, int nranks, std::unique_ptr<IdRendezvous> id_rendezvous);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() { return *reinterpret_cast<Header*>(memory_); }
  RankSlot& slot(int rank) { return reinterpret_cast<RankSlot*>(memory_ + slots_at_)[rank]; }
  Channel& channel(int from, int to) { return reinterpret_cast<Channel*>(memory_ + channels_at_)[from * nranks_ + to]; }
  // The buffer of `rank` for an inline contribution of `bytes` with the record at `place`. A contribution of a few
  // bytes lies in the record. Larger buffers are two for each rank, so that they stay in the cache.
  char* inline_buffer(int rank, int place, size_t bytes) {
    if (bytes <= record_inline_bytes) return slot(rank).placed[place].inline_data;
    return memory_ + inline_at_ + (size_t(rank) * inline_buffers + size_t(place) % inline_buffers) * inline_bytes;
  }
  // The step buffers of `rank`, by the parity of the step.
  char* step_input(int rank, int parity) { return step(rank, parity); }
  char* step_result(int rank, int parity) { return step(rank, 2 + parity); }
  char* piece(int from, int to, size_t slot, size_t bytes) {
    if (bytes <= piece_inline_bytes) return channel(from, to).pieces[slot].inline_data;
    return memory_ + pieces_at_ + ((size_t(from) * size_t(nranks_) + size_t(to)) * channel_slots + slot) * piece_bytes;
  }

  // Memory in bytes. fixed_bytes: one rank's share of what is always allocated. buffer_bytes: the pages of a rank's
  // data buffers that are in memory, because they were touched. release_buffers returns those pages to the system; no
  // rank may be using them.
  size_t fixed_bytes() const { return inline_at_ / size_t(nranks_); }
  size_t buffer_bytes(int rank) const;
  void release_buffers(int rank);

  int nranks() const { return nranks_; }
  Spin& spin() { return spin_; }
  bool complete() { return header().attached.load(std::memory_order_acquire) == uint32_t(nranks_); }
  // Whether all ranks are threads of this process. False until all are attached.
  bool one_process();
  bool is_local(int rank);
  bool same_process(int a, int b) { return slot(a).process_token == slot(b).process_token; }

  // Reads the cores of each rank, once all ranks are attached.
  void find_cores();
  // Called when all ranks are attached, or never will be. From then on a rank that joins with the unique id gets an
  // error.
  void end_id_rendezvous();

  // The first rank found dead, or -1. A collective at which the dead rank has not arrived never completes.
  int first_dead() { return std::clamp(header().first_dead.load(std::memory_order_acquire), 0, nranks_) - 1; }
  // Marks a rank dead for every process, and wakes all waiting threads.
  void mark_dead(int rank);
  // Wakes all threads of all processes that wait on this segment.
  void notify_all();
  // Reports to all ranks that two messages do not match, unless a mismatch was reported before, and wakes all waiting
  // threads.
  void report_disagreement(const std::string& text);
  // Marks dead each rank of another process that has joined and has not ended the communicator, if its process has
  // ended, even if no watcher has noticed the end yet. Returns the first dead rank, or -1.
  int find_dead_ranks();
  // Whether the processes of the ranks are watched (watch.hpp). set_watched returns true to its first caller only;
  // `on_destroyed` is called by the destructor.
  bool is_watched() const { return watched_.load(); }
  bool set_watched(void (*on_destroyed)()) {
    if (watched_.exchange(true)) return false;
    on_destroyed_ = on_destroyed;
    return true;
  }

  // The communicators of this process on this segment, and how many of them were destroyed or aborted: like NCCL, the
  // engine frees them when the last one is (depart() in calls/init.cpp).
  Mutex<NCCLPY_LOCK_SEGMENT> mutex;
  std::vector<std::shared_ptr<Comm>> local;
  size_t local_departed = 0;

 private:
  // Calls `use(memory, bytes)` for the rank's inline and step buffers and for the pieces on their way to it.
  template <class Use>
  void for_buffers(int rank, Use use) const {
    use(memory_ + inline_at_ + size_t(rank) * inline_buffers * inline_bytes, inline_buffers * inline_bytes);
    use(memory_ + steps_at_ + size_t(rank) * 4 * step_bytes, 4 * step_bytes);
    const size_t ring = channel_slots * piece_bytes;
    for (int from = 0; from < nranks_; from++)
      use(memory_ + pieces_at_ + (size_t(from) * size_t(nranks_) + size_t(rank)) * ring, ring);
  }
  char* step(int rank, int which) { return memory_ + steps_at_ + (size_t(rank) * 4 + size_t(which)) * step_bytes; }

  std::unique_ptr<IdRendezvous> id_rendezvous_;  // guarded by mutex
  char* memory_;
  size_t bytes_;
  int nranks_;
  Spin spin_;
  std::atomic<bool> watched_{false};
  void (*on_destroyed_)() = nullptr;  // written once, by the caller of set_watched that got true
  size_t slots_at_, channels_at_, inline_at_, steps_at_, pieces_at_;
};

// The length of the memory for `nranks` ranks.
size_t segment_bytes(int nranks);

// Opens the segment of `id` and takes the place of `rank` in it. Waits for no other rank to join; it only waits, for
// at most about 2 s, until the first rank has initialised the memory.
ncclResult_t join_segment(const ncclUniqueId& id, int nranks, int rank, int device, std::shared_ptr<Segment>* segment);

}  // namespace ncclpy::host
