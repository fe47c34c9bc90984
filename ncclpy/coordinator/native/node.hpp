// A rank's node in the tree by which the ranks agree which operations all of them have brought, and in which order.
//
// A rank sends an operation up once all ranks below it have brought the operation too, or have joined. So the root
// receives an operation once from each child, and all ranks have brought it when the last child has sent it. The
// root's responses, such as the operations to run, are sent down in frames that are the same for all ranks. An
// operation that was agreed on before, and is still in the response cache, is a single bit in both directions: its
// slot in the cache. The caches of all ranks are the same, since all ranks apply the same frames. Nothing here waits,
// reads a clock or knows of connections: the caller passes in the time, and passes frames in and out as bytes.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "wire.hpp"

namespace ncclpy::coordinator {

// The number of the process set of all ranks, and the number under which the ranks agree on new process sets. The key
// of a new process set is the set of its members, as Bits::write() writes it.
constexpr uint32_t kAllRanks = 0;
constexpr uint32_t kSets = UINT32_MAX;

enum class Kind {
  run,         // all ranks have brought an operation: to be launched
  mismatch,    // an operation on which the ranks disagree
  after_join,  // an operation that is not defined without the ranks that have joined
  overdue,     // an operation that not all ranks have brought in time
  stalled,     // a warning of an operation that waits for long; at the root only
  all_joined,  // all ranks have joined
  group,       // a new process set
  closing,     // a shutdown with `drain` has begun
  ended,       // the coordinator has ended
};

// Ranks that have brought an operation with the same `fixed`: the bytes that all ranks must bring alike.
struct Part {
  std::string fixed;
  Bits ranks;
};

// In a warning of an operation that waits: another one that waits, and the ranks that have brought that one.
struct Neighbour {
  std::string key;
  Bits ranks;
};

// A response of the root, or another message, to this rank. Each kind uses some of the fields.
struct Record {
  Kind kind{};
  uint32_t group = 0;
  std::string key;
  std::string fixed;
  std::vector<std::string> owns;  // for each member of the set the bytes that only this member has brought
  std::vector<Part> parts;
  std::vector<Neighbour> near;
  // stalled, overdue: the ranks that have brought the operation, and those that have neither brought it nor joined.
  // `have` is for run and after_join the ranks that have joined, for group the members, and for ended the lost ranks.
  Bits have, missing;
  double seconds = 0;  // stalled: how long the operation has waited
  int64_t rank = -1;   // the rank that has joined last (all_joined), or that shuts down (closing, ended); -1 for none
  std::string reason;
};

// The outcome of bring() and join(): whether the call was taken, or why it was refused.
enum class Brought {
  taken,
  twice,     // the operation is in flight on this rank already, or the rank has called join() already
  closing,   // the coordinator shuts down
  joined,    // this rank has called join(), and not all ranks have joined
  ended,     // the coordinator has ended
  no_group   // this rank is in no such process set
};

struct Counters {
  uint64_t brought = 0, runs = 0, hits = 0, frames = 0, evicted = 0, bytes_up = 0, bytes_down = 0;
};

// The ranks of a process set: of a known one, or read from the key of a new one. False if there is no such set.
class Members {
 public:
  explicit Members(const Bits* known) : known_(known) {}
  explicit Members(Bits read) : read_(std::move(read)) {}

  explicit operator bool() const { return known_ != nullptr || !read_.empty(); }
  const Bits& operator*() const { return known_ != nullptr ? *known_ : read_; }
  const Bits* operator->() const { return &**this; }

 private:
  Bits read_;
  const Bits* known_ = nullptr;
};

// Operations that have failed because this rank did not bring them in time. If the rank brings one later, it gets the
// error. Above a limit of bytes the oldest operations are forgotten. If the rank brings one that was forgotten, the
// operation waits for the other ranks like a new one.
class Condemned {
 public:
  using Name = std::pair<uint32_t, std::string>;

  void add(const Name& name, Record record);
  // Returns whether there was such a record.
  bool take(const Name& name, Record& record);
  void clear();
  size_t size() const { return records_.size(); }

 private:
  struct Kept {
    Record record;
    uint64_t turn = 0;
  };

  std::map<Name, Kept> records_;
  std::map<uint64_t, Name> by_turn_;
  uint64_t turns_ = 0;
  size_t bytes_ = 0;
};

// This rank's position in the tree.
struct Place {
  uint32_t rank = 0, size = 1;
  bool root = true;
  std::vector<std::pair<uint32_t, Bits>> children;  // each with its rank, and the ranks of its subtree
};

class Node {
 public:
  Node(Place place, size_t cache, double timeout, double stall_after);

  // Calls of this rank. A rank that joins brings nothing more until all have joined. With `drain`, the operations that
  // all ranks have brought run before the shutdown.
  Brought bring(uint32_t group, std::string key, std::string fixed, std::string own, bool joinable, double now);
  Brought join();
  void shut_down(bool drain, const std::string& reason);
  // A frame's operations of this set were launched: the root may send the operations that all ranks have brought
  // meanwhile. Without effect on other ranks.
  void launched(uint32_t group);

  // Received frames, which may be Malformed (thrown), and lost connections.
  void from_child(size_t child, std::string_view frame, double now);
  void from_parent(std::string_view frame, double now);
  void lost_child(size_t child, const std::string& why);
  void lost_parent(uint32_t parent, const std::string& why);

  // Frames to send: upwards, and downwards to all children, in order.
  std::deque<std::string> up, down;
  // Records for this rank: those of each frame, and those that arise here, such as warnings.
  std::deque<std::vector<Record>> records;

  // Reports operations that wait for long or are overdue; returns when to look again, or infinity.
  double look(double now);
  // Puts together the frames to send. Called after the functions above; several calls of bring() may share one call.
  void settle();

  bool ended() const { return ended_; }
  bool pending() const { return !entries_.empty() || !mine_.empty() || joining_; }
  Bits have(uint32_t group, const std::string& key) const;
  size_t condemned() const { return condemned_.size(); }
  Counters counters;

 private:
  using Name = std::pair<uint32_t, std::string>;

  struct NameHash {
    size_t operator()(const Name& name) const { return std::hash<std::string>()(name.second) + name.first; }
  };

  struct Mine {
    std::string fixed, own;
    bool joinable = false;
  };

  struct Entry {
    double since = 0;
    double warn = 0;         // when to report it
    double patience = 0;     // seconds until the next report
    bool joinable = true;
    bool forwarded = false;  // upwards, or, at the root, listed in ready_
    bool overdue = false;    // past the timeout, and reported to the root; at the root: reported from below
    bool again = false;      // ranks below may bring it once more, though it was forwarded
    Bits cached;             // ranks that have brought what its slot holds
    Bits have;               // all ranks that have brought it
    Bits hinted;             // at the root: ranks that have brought it, by hints from subtrees where others have not
    std::string hinted_fixed;
    std::vector<Part> parts;
    std::map<uint32_t, std::string> owns;
  };

  struct Slot {
    bool used = false;
    Name name;
    std::string fixed;
    bool joinable = true;
    std::vector<std::string> owns;
    uint64_t assigned = 0;  // the frame that has filled it
    bool touched = false;   // used since the CLOCK hand last passed it
  };

  Members members(const Name& name) const;
  Entry& entry(const Name& name, double now);
  void add_mine(const Name& name, const Mine& mine, double now);
  // Notes that ranks have brought what a slot holds.
  void add_bit(uint32_t slot, const Bits& ranks, double now);
  // Forwards an operation upwards, or at the root to ready_, if all ranks below have brought it or joined.
  void complete(const Name& name, Entry& entry);
  void complete_all();
  // Moves the ranks in `cached` into a part in full, with what the slot holds.
  void expand(const Name& name, Entry& entry);
  // Reports upwards an operation that waits for long, and the ranks below that have brought it.
  void send_hint(const Name& name, const std::string& fixed, const Bits& have, double age, bool overdue);
  // At the root: sends the response to an operation that all ranks have brought.
  void respond(const Name& name);
  // At the root: the slot for an operation; kNoSlot if all are in use, there is no cache, or a shutdown has begun.
  uint32_t find_slot(const Name& name);
  // Adds a record to the next frame downwards, and applies it here.
  void send_down(Writer record);
  // Adds the collected bits_down_ to the next frame downwards.
  void send_bits();
  void apply(Reader& frame, double now);
  void run(const Name& name, const std::string& fixed, const std::vector<std::string>& owns);
  // Ends an operation with a record for this rank, if it is a member.
  void finish(const Name& name, Record record);
  void fill_slot(uint32_t slot, const Name& name, Slot filled, double now);
  void note_joined(const Bits& ranks);
  void ask_shut_down(int64_t rank, bool drain, const std::string& reason);
  void tell_lost(const Bits& lost, const std::string& reason);
  void end_frame();
  // Joins, if this rank wants to and nothing that it has brought is waiting; returns whether it has joined now.
  bool check_joined();
  // Whether an operation in a record from below is ignored; `seen` is the last frame that the record's sender had
  // applied. was_done(): the operation has ended in a later frame. is_late(): was_done(), or it was forwarded already.
  bool is_late(const Name& name, uint64_t seen) const;
  bool was_done(const Name& name, uint64_t seen) const;
  bool all_closed() const;
  Record stalled(const Name& name, const Entry& entry, double now) const;
  std::string fixed_of(const Name& name, const Entry& entry) const;

  const Place place_;
  const Bits self_;
  Bits below_;  // this rank and all ranks below it
  const double timeout_, stall_after_;
  std::vector<Bits> groups_;
  std::map<Name, Entry> entries_;
  std::unordered_map<Name, Mine, NameHash> mine_;
  Condemned condemned_;
  std::vector<Slot> slots_;
  uint32_t used_ = 0;  // how many slots are used; they are the first ones
  uint32_t hand_ = 0;  // at the root: where the search for a slot to replace continues (CLOCK)
  std::unordered_map<Name, uint32_t, NameHash> by_name_;
  uint64_t applied_ = 0;   // the number of the last frame downwards
  uint64_t current_ = 0;   // the number of the frame that is being made or applied
  Bits joined_;            // the ranks that have joined by the frames so far, so the same on all ranks
  Bits seen_joined_;       // the ranks of this subtree that have joined, also those in no frame yet
  bool joining_ = false, has_joined_ = false;
  bool closing_ = false, closed_sent_ = false, ended_ = false;
  int64_t closer_ = -1;  // the rank that has begun the shutdown with `drain`
  std::string close_reason_;
  std::vector<bool> closed_;     // children
  std::vector<uint64_t> seen_;   // by children: the last frame that each has applied
  // The frame that has ended an operation, for operations that a frame from below may still contain.
  std::map<Name, uint64_t> done_;
  std::map<uint32_t, std::deque<Name>> ready_;  // at the root, by sets: operations that all ranks have brought
  std::set<uint32_t> launching_;  // at the root: sets with operations of a frame that launched() has not reported
  double due_ = 0;                     // until then look() has nothing to report
  Writer up_, down_;
  Bits bits_up_, bits_down_;
  std::vector<Record> telling_;  // records for this rank, of the frame that is being made or applied
};

}  // namespace ncclpy::coordinator
