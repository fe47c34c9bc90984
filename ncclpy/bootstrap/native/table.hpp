// What a server keeps: keys with their values, requests that wait for keys, rendezvous of ranks, watches, and which of
// them end with which connection. The table uses neither sockets nor a clock: the caller passes requests and the time,
// and a Post sends the answers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "frame.hpp"

namespace ncclpy::store {

using Value = std::shared_ptr<const std::string>;

// A body; its last part may be shared with other bodies.
struct Body {
  std::string head;
  Value tail;  // nullptr: there is only `head`
};

// Carries frames to connections.
class Post {
 public:
  virtual void send(uint64_t connection, uint64_t id, Op op, Status status, Body body) = 0;

 protected:
  ~Post() = default;
};

class Table {
 public:
  // The bytes to which an append may make a value grow, that a list in an answer may have, and that keys and values
  // may take together.
  Table(Post& post, size_t max_value, size_t max_answer, size_t capacity)
      : post_(post), max_value_(max_value), max_answer_(max_answer), capacity_(capacity) {}

  // Executes a client's request. Returns false if the request is malformed, or if it has to wait and another waiting
  // request has its id (for a watch: another watch has its id).
  bool request(uint64_t connection, const Header& header, std::string_view body, double now);

  // Called when a connection has ended, after a goodbye or without one: removes what ends with it.
  void gone(uint64_t connection, bool goodbye);

  // Answers and removes the requests that have passed their deadlines.
  void expire(double now);

  // When the first deadline passes; infinite if there is none.
  double next_deadline() const;

  // Bytes that keys and values count for, including the values that ranks have brought to a rendezvous.
  size_t kept() const { return kept_; }

 private:
  struct Rendezvous;

  // A request that waits.
  struct Pending {
    uint64_t connection = 0;
    uint64_t id = 0;
    Op op{};
    double deadline = 0;
    std::vector<std::string> keys;           // of get, multi_get and wait
    std::unordered_set<std::string> absent;  // those of `keys` that are waited for
    Rendezvous* rendezvous = nullptr;        // of gather
    int64_t rank = 0;
    Value value;
  };

  struct Rendezvous {
    std::string name;
    int64_t size = 0;
    std::map<int64_t, Pending*> came;
    std::set<int64_t> left;  // ranks that had arrived, and left at their deadlines
  };

  struct Entry {
    Value value;
    uint64_t owner = 0;  // the connection with which it ends; 0: none
  };

  struct Connection {
    std::map<uint64_t, std::unique_ptr<Pending>> pending;
    std::set<std::string> owned;
    std::map<uint64_t, std::string> watches;  // prefixes by id
  };

  bool do_set(uint64_t connection, uint64_t id, Reader in);
  bool do_get(uint64_t connection, uint64_t id, Reader in, double now);
  bool do_add(uint64_t connection, uint64_t id, Reader in);
  bool do_compare_set(uint64_t connection, uint64_t id, Reader in);
  bool do_append(uint64_t connection, uint64_t id, Reader in);
  bool do_wait(uint64_t connection, uint64_t id, Op op, Reader in, double now);
  bool do_check(uint64_t connection, uint64_t id, Reader in);
  bool do_erase(uint64_t connection, uint64_t id, Reader in);
  bool do_keys(uint64_t connection, uint64_t id, Reader in);
  bool do_gather(uint64_t connection, uint64_t id, Reader in, double now);
  bool do_watch(uint64_t connection, uint64_t id, Reader in);
  bool do_unwatch(uint64_t connection, uint64_t id, Reader in);
  bool do_cancel(uint64_t connection, Reader in);
  bool do_multi_set(uint64_t connection, uint64_t id, Reader in);

  void answer(uint64_t connection, uint64_t id, Op op, Body body = {}) {
    post_.send(connection, id, op, Status::ok, std::move(body));
  }
  void refuse(uint64_t connection, uint64_t id, Op op, std::string_view words);

  // Why `more` bytes, or a key with a value of `value` bytes, cannot be kept; "" if they can.
  std::string why_no_space(size_t more) const;
  std::string why_no_space(std::string_view key, size_t value);
  // Returns the body of the answer to a multi_get, see Op.
  Body values_of(const std::vector<std::string>& keys);

  Entry* find(std::string_view key);
  // Sets a key, which ends with the connection `owner` (0: with none), and answers the requests that waited for it.
  void put(std::string_view key, Value value, uint64_t owner);
  void erase_key(std::string_view key);
  // Removes a key from those that end with the connection `owner`.
  void disown(std::string_view key, uint64_t owner);
  void notify_watches(std::string_view key, const Value& value);

  // Lets a request wait, for its keys or its rendezvous.
  void await(std::unique_ptr<Pending> pending);
  // Lets a request wait for those of its keys that are absent now.
  void await_absent(Pending& pending);
  // Removes a waiting request without an answer; nullptr if there is none.
  std::unique_ptr<Pending> remove(uint64_t connection, uint64_t id);
  void remove_watch(uint64_t connection, uint64_t id, const std::string& prefix);
  // Answers a wait or a multi_get, the keys of which are all set.
  void met(const Pending& pending);
  // Answers a request that has passed its deadline.
  void late(const Pending& pending);
  // Answers the requests of a rendezvous at which all ranks have arrived.
  void hold(Rendezvous& rendezvous);

  Post& post_;
  const size_t max_value_;
  const size_t max_answer_;
  const size_t capacity_;
  size_t kept_ = 0;
  std::map<std::string, Entry, std::less<>> entries_;
  std::unordered_map<uint64_t, Connection> connections_;
  std::unordered_map<std::string, std::unordered_set<Pending*>> waiting_;  // by key
  std::set<std::pair<double, Pending*>> deadlines_;
  std::map<std::string, std::unique_ptr<Rendezvous>, std::less<>> rendezvous_by_name_;
  std::unordered_map<std::string, std::set<std::pair<uint64_t, uint64_t>>> watches_;  // by prefix
  std::map<size_t, size_t> watched_lengths_;                                          // number of prefixes by length
};

}  // namespace ncclpy::store
