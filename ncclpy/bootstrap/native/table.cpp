#include "table.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

namespace ncclpy::store {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
// Most absent ranks, and most ranks that have left, that an answer lists. Further absent ranks are only counted: up to
// 100,000 ranks may get such an answer at once.
constexpr int64_t kListed = 4096;
constexpr size_t kListedLeft = 64;
constexpr int64_t kMaxRanks = int64_t{1} << 24;
// Bytes that a key counts for in addition to the bytes of its name and its value; also a value in a rendezvous.
constexpr size_t kEntry = 200;
// Most bytes of values in the answer to a multi_get, which is a copy of them. The client asks again for values that do
// not fit, and for a longer one by a get, the answer to which needs no copy.
constexpr size_t kTogether = 4 << 20;

double deadline_after(int64_t microseconds, double now) {
  return microseconds < 0 ? kForever : now + static_cast<double>(microseconds) * 1e-6;
}

Body body_of(Writer& out, Value tail = nullptr) { return {std::move(out.body), std::move(tail)}; }

// A value as the last field of a body.
Body body_with(Writer& out, const Value& value) {
  out.announce(value->size());
  if (value->size() < 4096) {
    out.body += *value;
    return body_of(out);
  }
  return body_of(out, value);
}

Value value_of(std::string_view bytes) { return std::make_shared<const std::string>(bytes); }

}  // namespace

bool Table::request(uint64_t connection, const Header& header, std::string_view body, double now) {
  const uint64_t id = header.id;
  Reader in(body);
  switch (header.op) {
    case Op::set: return do_set(connection, id, in);
    case Op::get: return do_get(connection, id, in, now);
    case Op::add: return do_add(connection, id, in);
    case Op::compare_set: return do_compare_set(connection, id, in);
    case Op::append: return do_append(connection, id, in);
    case Op::wait:
    case Op::multi_get: return do_wait(connection, id, header.op, in, now);
    case Op::check: return do_check(connection, id, in);
    case Op::erase: return do_erase(connection, id, in);
    case Op::keys: return do_keys(connection, id, in);
    case Op::gather: return do_gather(connection, id, in, now);
    case Op::watch: return do_watch(connection, id, in);
    case Op::unwatch: return do_unwatch(connection, id, in);
    case Op::cancel: return do_cancel(connection, in);
    case Op::multi_set: return do_multi_set(connection, id, in);
    case Op::ping:
      if (!in.end()) return false;
      answer(connection, id, Op::ping);
      return true;
    case Op::goodbye:  // handled by the server
    case Op::change:
    case Op::farewell: return false;
  }
  return false;
}

void Table::refuse(uint64_t connection, uint64_t id, Op op, std::string_view words) {
  Writer out;
  out.bytes(words);
  post_.send(connection, id, op, Status::refused, body_of(out));
}

bool Table::do_set(uint64_t connection, uint64_t id, Reader in) {
  std::string_view key, value;
  int64_t ephemeral;
  if (!in.bytes(key) || !in.bytes(value) || !in.integer(ephemeral) || !in.end()) return false;
  if (const std::string words = why_no_space(key, value.size()); !words.empty()) {
    refuse(connection, id, Op::set, words);
    return true;
  }
  put(key, value_of(value), ephemeral ? connection : 0);
  answer(connection, id, Op::set);
  return true;
}

bool Table::do_get(uint64_t connection, uint64_t id, Reader in, double now) {
  std::string_view key;
  int64_t microseconds;
  if (!in.bytes(key) || !in.integer(microseconds) || !in.end()) return false;
  if (Entry* entry = find(key)) {
    Writer out;
    answer(connection, id, Op::get, body_with(out, entry->value));
    return true;
  }
  auto pending = std::make_unique<Pending>();
  pending->connection = connection;
  pending->id = id;
  pending->op = Op::get;
  pending->deadline = deadline_after(microseconds, now);
  pending->keys.emplace_back(key);
  if (connections_[connection].pending.count(id)) return false;
  await(std::move(pending));
  return true;
}

bool Table::do_add(uint64_t connection, uint64_t id, Reader in) {
  std::string_view key;
  int64_t number, sum = 0;
  if (!in.bytes(key) || !in.integer(number) || !in.end()) return false;
  uint64_t owner = 0;
  if (Entry* entry = find(key)) {
    const std::string& text = *entry->value;
    const auto read = std::from_chars(text.data(), text.data() + text.size(), sum);
    if (read.ec != std::errc() || read.ptr != text.data() + text.size()) {
      refuse(connection, id, Op::add, "the value is not a number");
      return true;
    }
    owner = entry->owner;
  }
  if (__builtin_add_overflow(sum, number, &sum)) {
    refuse(connection, id, Op::add, "the sum has more than 64 bits");
    return true;
  }
  const Value text = value_of(std::to_string(sum));
  if (const std::string words = why_no_space(key, text->size()); !words.empty()) {
    refuse(connection, id, Op::add, words);
    return true;
  }
  put(key, text, owner);
  Writer out;
  out.integer(sum);
  answer(connection, id, Op::add, body_of(out));
  return true;
}

bool Table::do_compare_set(uint64_t connection, uint64_t id, Reader in) {
  std::string_view key, expected, desired;
  int64_t is_expected, is_desired;
  if (!in.bytes(key) || !in.integer(is_expected) || !in.bytes(expected) || !in.integer(is_desired) ||
      !in.bytes(desired) || !in.end()) {
    return false;
  }
  Entry* entry = find(key);
  const bool swap = entry ? is_expected && *entry->value == expected : !is_expected;
  Value now = entry ? entry->value : nullptr;
  if (swap) {
    if (const std::string words = why_no_space(key, desired.size()); is_desired && !words.empty()) {
      refuse(connection, id, Op::compare_set, words);
      return true;
    }
    now = is_desired ? value_of(desired) : nullptr;
    if (now) {
      put(key, now, 0);
    } else {
      erase_key(key);
    }
  }
  Writer out;
  out.integer(swap).integer(now != nullptr);
  answer(connection, id, Op::compare_set, body_with(out, now ? now : value_of("")));
  return true;
}

bool Table::do_append(uint64_t connection, uint64_t id, Reader in) {
  std::string_view key, value;
  if (!in.bytes(key) || !in.bytes(value) || !in.end()) return false;
  Entry* entry = find(key);
  const size_t size = (entry ? entry->value->size() : 0) + value.size();
  const std::string words = size > max_value_
                                ? "the value would have more than " + std::to_string(max_value_) + " bytes"
                                : why_no_space(key, size);
  if (!words.empty()) {
    refuse(connection, id, Op::append, words);
    return true;
  }
  std::string whole = entry ? *entry->value : std::string();
  whole.append(value);
  put(key, std::make_shared<const std::string>(std::move(whole)), entry ? entry->owner : 0);
  answer(connection, id, Op::append);
  return true;
}

bool Table::do_wait(uint64_t connection, uint64_t id, Op op, Reader in, double now) {
  int64_t microseconds, count;
  if (!in.integer(microseconds) || !in.count(count) || (op == Op::multi_get && count > kMaxTogether)) return false;
  auto pending = std::make_unique<Pending>();
  pending->connection = connection;
  pending->id = id;
  pending->op = op;
  pending->deadline = deadline_after(microseconds, now);
  bool all = true;
  for (int64_t i = 0; i < count; i++) {
    std::string_view key;
    if (!in.bytes(key)) return false;
    pending->keys.emplace_back(key);
    all = all && find(key);
  }
  if (!in.end() || connections_[connection].pending.count(id)) return false;
  if (all) {
    met(*pending);
  } else {
    await(std::move(pending));
  }
  return true;
}

void Table::met(const Pending& pending) {
  answer(pending.connection, pending.id, pending.op,
         pending.op == Op::multi_get ? values_of(pending.keys) : Body{});
}

Body Table::values_of(const std::vector<std::string>& keys) {
  Writer values;
  int64_t without = 0;
  size_t space = std::min(max_answer_, kTogether);
  for (const std::string& key : keys) {
    const Entry* entry = find(key);
    if (entry && entry->value->size() + 5 <= space) {
      values.bytes(*entry->value);
      space -= entry->value->size() + 5;
    } else {
      values.integer(entry != nullptr);
      without++;
    }
  }
  Writer out;
  out.integer(without);
  return body_of(out, std::make_shared<const std::string>(std::move(values.body)));
}

bool Table::do_multi_set(uint64_t connection, uint64_t id, Reader in) {
  int64_t count;
  std::string_view key, value;
  if (!in.count(count)) return false;
  Reader whole = in;  // an incomplete request sets nothing
  for (int64_t i = 0; i < count; i++) {
    if (!whole.bytes(key) || !whole.bytes(value)) return false;
  }
  if (!whole.end()) return false;
  for (int64_t i = 0; i < count && in.bytes(key) && in.bytes(value); i++) {
    if (const std::string words = why_no_space(key, value.size()); !words.empty()) {
      refuse(connection, id, Op::multi_set,
             std::to_string(i) + " of " + std::to_string(count) + " keys are set, and there is " + words);
      return true;
    }
    put(key, value_of(value), 0);
  }
  answer(connection, id, Op::multi_set);
  return true;
}

bool Table::do_check(uint64_t connection, uint64_t id, Reader in) {
  int64_t count;
  bool all = true;
  if (!in.count(count)) return false;
  for (int64_t i = 0; i < count; i++) {
    std::string_view key;
    if (!in.bytes(key)) return false;
    all = all && find(key);
  }
  if (!in.end()) return false;
  Writer out;
  out.integer(all);
  answer(connection, id, Op::check, body_of(out));
  return true;
}

bool Table::do_erase(uint64_t connection, uint64_t id, Reader in) {
  std::string_view key;
  if (!in.bytes(key) || !in.end()) return false;
  Writer out;
  out.integer(find(key) != nullptr);
  erase_key(key);
  answer(connection, id, Op::erase, body_of(out));
  return true;
}

bool Table::do_keys(uint64_t connection, uint64_t id, Reader in) {
  std::string_view prefix;
  if (!in.bytes(prefix) || !in.end()) return false;
  Writer found;
  int64_t count = 0;
  for (auto at = entries_.lower_bound(prefix); at != entries_.end(); ++at) {
    if (std::string_view(at->first).substr(0, prefix.size()) != prefix) break;
    found.bytes(at->first);
    if (++count; found.body.size() > max_answer_) {
      refuse(connection, id, Op::keys, "the keys have more than " + std::to_string(max_answer_) + " bytes");
      return true;
    }
  }
  Writer out;
  out.integer(count);
  answer(connection, id, Op::keys, body_of(out, std::make_shared<const std::string>(std::move(found.body))));
  return true;
}

bool Table::do_gather(uint64_t connection, uint64_t id, Reader in, double now) {
  std::string_view name, value;
  int64_t rank, size, microseconds;
  if (!in.bytes(name) || !in.integer(rank) || !in.integer(size) || !in.integer(microseconds) || !in.bytes(value) ||
      !in.end() || size < 1 || size > kMaxRanks || rank < 0 || rank >= size ||
      connections_[connection].pending.count(id)) {
    return false;
  }
  if (const std::string words = why_no_space(kEntry + value.size()); !words.empty()) {
    refuse(connection, id, Op::gather, words);
    return true;
  }
  auto& place = rendezvous_by_name_.try_emplace(std::string(name)).first->second;
  if (!place) {
    place = std::make_unique<Rendezvous>();
    place->name = name;
    place->size = size;
  }
  Rendezvous& rendezvous = *place;
  if (rendezvous.size != size) {
    refuse(connection, id, Op::gather,
           "rank " + std::to_string(rank) + " passed size " + std::to_string(size) + ", other ranks " +
               std::to_string(rendezvous.size));
    return true;
  }
  if (rendezvous.came.count(rank)) {
    refuse(connection, id, Op::gather,
           "rank " + std::to_string(rank) + " is there already: two processes or threads have the same rank");
    return true;
  }
  auto pending = std::make_unique<Pending>();
  pending->connection = connection;
  pending->id = id;
  pending->op = Op::gather;
  pending->deadline = deadline_after(microseconds, now);
  pending->rendezvous = &rendezvous;
  pending->rank = rank;
  pending->value = value_of(value);
  kept_ += kEntry + value.size();
  rendezvous.came[rank] = pending.get();
  rendezvous.left.erase(rank);
  await(std::move(pending));
  if (static_cast<int64_t>(rendezvous.came.size()) == size) hold(rendezvous);
  return true;
}

// Each rank gets the values of all ranks. If all values are empty, as in a barrier, the answer leaves them out.
void Table::hold(Rendezvous& rendezvous) {
  size_t bytes = 0;
  for (auto& [rank, pending] : rendezvous.came) bytes += pending->value->size();
  const bool any = bytes > 0, fits = !any || bytes + 5 * rendezvous.came.size() <= max_answer_;
  Writer values;
  if (any && fits) {
    values.body.reserve(bytes + 5 * rendezvous.came.size());
    for (auto& [rank, pending] : rendezvous.came) values.bytes(*pending->value);
  }
  const auto shared = std::make_shared<const std::string>(std::move(values.body));
  std::vector<std::pair<uint64_t, uint64_t>> to;
  for (auto& [rank, pending] : rendezvous.came) to.emplace_back(pending->connection, pending->id);
  const int64_t size = rendezvous.size;
  for (auto [connection, id] : to) {
    remove(connection, id);  // the last one also removes the rendezvous
    if (!fits) {
      refuse(connection, id, Op::gather, "the values have more than " + std::to_string(max_answer_) + " bytes");
      continue;
    }
    Writer out;
    out.integer(size);
    answer(connection, id, Op::gather, body_of(out, shared));
  }
}

bool Table::do_watch(uint64_t connection, uint64_t id, Reader in) {
  std::string_view prefix;
  if (!in.bytes(prefix) || !in.end()) return false;
  if (!connections_[connection].watches.try_emplace(id, prefix).second) return false;
  auto& subscribers = watches_[std::string(prefix)];
  if (subscribers.empty()) watched_lengths_[prefix.size()]++;
  subscribers.emplace(connection, id);
  answer(connection, id, Op::watch);
  return true;
}

bool Table::do_unwatch(uint64_t connection, uint64_t id, Reader in) {
  int64_t which;
  if (!in.integer(which) || !in.end()) return false;
  auto& watches = connections_[connection].watches;
  const auto at = watches.find(static_cast<uint64_t>(which));
  if (at != watches.end()) {
    remove_watch(connection, at->first, at->second);
    watches.erase(at);
  }
  answer(connection, id, Op::unwatch);
  return true;
}

void Table::remove_watch(uint64_t connection, uint64_t id, const std::string& prefix) {
  const auto at = watches_.find(prefix);
  at->second.erase({connection, id});
  if (!at->second.empty()) return;
  if (--watched_lengths_[prefix.size()] == 0) watched_lengths_.erase(prefix.size());
  watches_.erase(at);
}

bool Table::do_cancel(uint64_t connection, Reader in) {
  int64_t which;
  if (!in.integer(which) || !in.end()) return false;
  remove(connection, static_cast<uint64_t>(which));  // if it is still pending
  return true;
}

std::string Table::why_no_space(size_t more) const {
  if (more <= capacity_ - kept_) return "";
  return "no space for " + std::to_string(more) + " more bytes: keys and values take " + std::to_string(kept_) +
         " of the " + std::to_string(capacity_) + " bytes that they may (`capacity`, where the store is served)";
}

std::string Table::why_no_space(std::string_view key, size_t value) {
  const size_t whole = kEntry + key.size() + value;
  if (whole <= capacity_ - kept_) return "";
  const Entry* entry = find(key);
  const size_t before = entry ? kEntry + key.size() + entry->value->size() : 0;
  return whole > before ? why_no_space(whole - before) : "";
}

Table::Entry* Table::find(std::string_view key) {
  const auto at = entries_.find(key);
  return at == entries_.end() ? nullptr : &at->second;
}

void Table::put(std::string_view key, Value value, uint64_t owner) {
  auto at = entries_.lower_bound(key);
  if (at == entries_.end() || at->first != key) {
    at = entries_.emplace_hint(at, key, Entry{});
    kept_ += kEntry + key.size();
  } else {
    kept_ -= at->second.value->size();
  }
  kept_ += value->size();
  if (at->second.owner != owner) {
    disown(key, at->second.owner);
    if (owner) connections_[owner].owned.emplace(key);
  }
  at->second = {value, owner};
  notify_watches(key, value);

  const auto waiting = waiting_.find(at->first);
  if (waiting == waiting_.end()) return;
  const std::unordered_set<Pending*> woken = std::move(waiting->second);
  waiting_.erase(waiting);
  for (Pending* pending : woken) {
    pending->absent.erase(at->first);
    if (!pending->absent.empty()) continue;
    if (pending->op == Op::get) {
      Writer out;
      answer(pending->connection, pending->id, Op::get, body_with(out, value));
    } else {
      await_absent(*pending);  // keys may have been deleted since they were set
      if (!pending->absent.empty()) continue;
      met(*pending);
    }
    remove(pending->connection, pending->id);
  }
}

void Table::erase_key(std::string_view key) {
  const auto at = entries_.find(key);
  if (at == entries_.end()) return;
  kept_ -= kEntry + key.size() + at->second.value->size();
  disown(key, at->second.owner);
  notify_watches(key, nullptr);
  entries_.erase(at);
}

void Table::disown(std::string_view key, uint64_t owner) {
  const auto at = connections_.find(owner);
  if (at != connections_.end()) at->second.owned.erase(std::string(key));
}

// Sends a key's change to its watches.
void Table::notify_watches(std::string_view key, const Value& value) {
  for (const auto& [length, number] : watched_lengths_) {
    if (length > key.size()) break;
    const auto at = watches_.find(std::string(key.substr(0, length)));
    if (at == watches_.end()) continue;
    for (auto [connection, id] : at->second) {
      Writer out;
      out.bytes(key).integer(value != nullptr);
      post_.send(connection, id, Op::change, Status::ok, body_with(out, value ? value : value_of("")));
    }
  }
}

void Table::await(std::unique_ptr<Pending> pending) {
  Pending& it = *pending;
  if (it.deadline < kForever) deadlines_.emplace(it.deadline, &it);
  await_absent(it);
  connections_[it.connection].pending.emplace(it.id, std::move(pending));
}

void Table::await_absent(Pending& pending) {
  for (const std::string& key : pending.keys) {
    if (!find(key) && pending.absent.insert(key).second) waiting_[key].insert(&pending);
  }
}

std::unique_ptr<Table::Pending> Table::remove(uint64_t connection, uint64_t id) {
  const auto owner_at = connections_.find(connection);
  if (owner_at == connections_.end()) return nullptr;
  const auto at = owner_at->second.pending.find(id);
  if (at == owner_at->second.pending.end()) return nullptr;
  std::unique_ptr<Pending> pending = std::move(at->second);
  owner_at->second.pending.erase(at);
  deadlines_.erase({pending->deadline, pending.get()});
  for (const std::string& key : pending->absent) {
    const auto waiting = waiting_.find(key);
    if (waiting == waiting_.end()) continue;
    waiting->second.erase(pending.get());
    if (waiting->second.empty()) waiting_.erase(waiting);
  }
  if (Rendezvous* rendezvous = pending->rendezvous) {
    kept_ -= kEntry + pending->value->size();
    rendezvous->came.erase(pending->rank);
    if (rendezvous->came.empty()) rendezvous_by_name_.erase(rendezvous_by_name_.find(rendezvous->name));
    pending->rendezvous = nullptr;
  }
  return pending;
}

void Table::gone(uint64_t connection, bool goodbye) {
  const auto at = connections_.find(connection);
  if (at == connections_.end()) return;
  while (!at->second.pending.empty()) {
    const Pending& pending = *at->second.pending.begin()->second;
    std::vector<std::pair<uint64_t, uint64_t>> left;  // requests of the other ranks of the rendezvous, which fail
    std::string name;
    if (pending.rendezvous && !goodbye) {
      for (auto& [rank, other] : pending.rendezvous->came) {
        if (other->connection != connection) left.emplace_back(other->connection, other->id);
      }
    }
    const int64_t rank = pending.rank;
    remove(connection, pending.id);
    for (auto [other, id] : left) {
      remove(other, id);
      refuse(other, id, Op::gather,
             "rank " + std::to_string(rank) + " had arrived, and its process has ended or its host is gone");
    }
  }
  for (const auto& [id, prefix] : at->second.watches) remove_watch(connection, id, prefix);
  std::set<std::string> owned = std::move(at->second.owned);
  connections_.erase(at);
  for (const std::string& key : owned) erase_key(key);
}

void Table::expire(double now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const Pending& first = *deadlines_.begin()->second;
    late(first);
    if (first.rendezvous) first.rendezvous->left.insert(first.rank);
    remove(first.connection, first.id);
  }
}

double Table::next_deadline() const { return deadlines_.empty() ? kForever : deadlines_.begin()->first; }

void Table::late(const Pending& pending) {
  if (pending.op == Op::multi_get) {
    post_.send(pending.connection, pending.id, pending.op, Status::late, values_of(pending.keys));
    return;
  }
  Writer out;
  if (const Rendezvous* rendezvous = pending.rendezvous) {
    // Ranks that left at their own, slightly earlier deadlines had arrived: they are not counted as missing.
    const int64_t left = static_cast<int64_t>(rendezvous->left.size());
    const int64_t missing = rendezvous->size - static_cast<int64_t>(rendezvous->came.size()) - left;
    Writer ranks;
    int64_t listed = 0;
    auto came = rendezvous->came.begin();
    auto gone = rendezvous->left.begin();
    for (int64_t rank = 0; rank < rendezvous->size && listed < kListed; rank++) {
      if (came != rendezvous->came.end() && came->first == rank) {
        ++came;
      } else if (gone != rendezvous->left.end() && *gone == rank) {
        ++gone;
      } else {
        ranks.integer(rank);
        listed++;
      }
    }
    size_t sent = 0;
    for (auto each = rendezvous->left.begin(); each != rendezvous->left.end() && sent < kListedLeft; ++each, sent++) {
      ranks.integer(*each);
    }
    out.integer(missing).integer(listed);
    out.body += ranks.body;
  } else {
    size_t count = 0;
    std::set<std::string_view> listed;
    Writer keys;
    for (const std::string& key : pending.keys) {
      if (!find(key) && listed.insert(key).second) {
        keys.bytes(key);
        count++;
      }
    }
    out.integer(static_cast<int64_t>(count));
    out.body += keys.body;
  }
  post_.send(pending.connection, pending.id, pending.op, Status::late, body_of(out));
}

}  // namespace ncclpy::store
