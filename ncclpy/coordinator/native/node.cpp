#include "node.hpp"

#include <algorithm>
#include <iterator>

#include "records.hpp"

namespace ncclpy::coordinator {

Node::Node(Place place, size_t cache, double timeout, double stall_after)
    : place_(std::move(place)), self_(single(place_.rank)), timeout_(timeout), stall_after_(stall_after), slots_(cache) {
  Bits all;
  for (uint32_t rank = 0; rank < place_.size; ++rank) all.add(rank);
  groups_.push_back(all);
  below_ = self_;
  for (const auto& child : place_.children) below_.add(child.second);
  closed_.resize(place_.children.size());
  seen_.resize(place_.children.size());
}

// Look-ups.

Members Node::members(const Name& name) const {
  if (name.first != kSets) return Members(name.first < groups_.size() ? &groups_[name.first] : nullptr);
  Reader in(name.second);
  Bits found = Bits::read(in, place_.size);
  if (!in.done()) found.clear();
  return Members(std::move(found));
}

Bits Node::have(uint32_t group, const std::string& key) const {
  const auto found = entries_.find({group, key});
  Bits have;
  if (found == entries_.end()) return have;
  have = found->second.have;
  have.add(found->second.hinted);
  return have;
}

Node::Entry& Node::entry(const Name& name, double now) {
  const auto [found, made] = entries_.try_emplace(name);
  if (made) {
    found->second.since = now;
    found->second.patience = stall_after_;
    found->second.warn = now + stall_after_;
    due_ = std::min({due_, found->second.warn, timeout_ > 0 ? now + timeout_ : found->second.warn});
  }
  return found->second;
}

std::string Node::fixed_of(const Name& name, const Entry& entry) const {
  if (!entry.parts.empty()) return entry.parts.front().fixed;
  if (entry.have.empty()) return entry.hinted_fixed;
  const auto slot = by_name_.find(name);
  return slot == by_name_.end() ? std::string() : slots_[slot->second].fixed;
}

// Calls of this rank.

Brought Node::bring(uint32_t group, std::string key, std::string fixed, std::string own, bool joinable, double now) {
  if (ended_) return Brought::ended;
  if (closing_) return Brought::closing;
  if (joining_ || has_joined_) return Brought::joined;
  Name name{group, std::move(key)};
  const Members all = members(name);
  if (!all || !all->has(place_.rank)) return Brought::no_group;
  if (mine_.count(name) != 0) return Brought::twice;
  ++counters.brought;
  if (Record condemned; condemned_.size() > 0 && condemned_.take(name, condemned)) {
    records.push_back({std::move(condemned)});
    return Brought::taken;
  }
  const auto added = mine_.emplace(name, Mine{std::move(fixed), std::move(own), joinable}).first;
  add_mine(added->first, added->second, now);
  return Brought::taken;
}

void Node::add_mine(const Name& name, const Mine& mine, double now) {
  const auto cached = by_name_.find(name);
  if (cached != by_name_.end()) {
    const Slot& slot = slots_[cached->second];
    if (slot.fixed == mine.fixed && slot.owns[position(*members(name), place_.rank)] == mine.own) {
      ++counters.hits;
      add_bit(cached->second, self_, now);
      return;
    }
  }
  Entry& one = entry(name, now);
  if (one.have.has(place_.rank)) return;
  one.joinable = mine.joinable;
  merge(one.parts, mine.fixed, single(place_.rank));
  one.owns[place_.rank] = mine.own;
  one.have.add(place_.rank);
  complete(name, one);
}

Brought Node::join() {
  if (ended_) return Brought::ended;
  if (joining_ || has_joined_) return Brought::twice;
  joining_ = true;
  return Brought::taken;
}

void Node::shut_down(bool drain, const std::string& reason) {
  if (!ended_) ask_shut_down(place_.rank, drain, reason);
}

void Node::launched(uint32_t group) { launching_.erase(group); }

// Merging what the ranks of this subtree bring.

void Node::add_bit(uint32_t slot, const Bits& ranks, double now) {
  const Name& name = slots_[slot].name;
  Entry& one = entry(name, now);
  one.cached.add_unknown(ranks, one.have);
  one.have.add(ranks);
  complete(name, one);
}

void Node::complete(const Name& name, Entry& one) {
  if (one.forwarded || one.have.empty()) return;
  if (!one.have.covers(*members(name), below_, seen_joined_)) return;
  one.forwarded = true;
  if (place_.root) {
    ready_[name.first].push_back(name);
  } else if (one.parts.empty()) {
    bits_up_.add(by_name_.at(name));
  } else {
    expand(name, one);
    up_.number(kUpFull);
    up_.number(name.first);
    up_.text(name.second);
    up_.number(one.joinable);
    write_parts(up_, one.parts);
    up_.number(one.owns.size());
    for (const auto& own : one.owns) {
      up_.number(own.first);
      up_.text(own.second);
    }
  }
}

void Node::complete_all() {
  for (auto& each : entries_) complete(each.first, each.second);
}

void Node::expand(const Name& name, Entry& one) {
  if (one.cached.empty()) return;
  const Slot& slot = slots_[by_name_.at(name)];
  merge(one.parts, slot.fixed, one.cached);
  one.joinable = slot.joinable;
  const std::vector<uint32_t> all = members(name)->list();
  for (size_t i = 0; i < all.size() && i < slot.owns.size(); ++i)
    if (one.cached.has(all[i])) one.owns[all[i]] = slot.owns[i];
  one.cached.clear();
}

void Node::send_hint(const Name& name, const std::string& fixed, const Bits& have, double age, bool overdue) {
  up_.number(kUpHint);
  up_.number(name.first);
  up_.text(name.second);
  up_.text(fixed);
  have.write(up_);
  up_.number(static_cast<uint64_t>(std::max(0.0, age) * 1e3));
  up_.number(overdue);
}

void Node::from_child(size_t child, std::string_view frame, double now) {
  if (ended_) return;
  counters.bytes_up += frame.size();
  const Bits& theirs = place_.children.at(child).second;
  Reader in(frame);
  const uint64_t seen = seen_[child] = in.below(applied_ + 1);
  if (!done_.empty()) {
    const uint64_t all = *std::min_element(seen_.begin(), seen_.end());
    for (auto done = done_.begin(); done != done_.end();) done = done->second <= all ? done_.erase(done) : std::next(done);
  }
  while (!in.done()) {
    switch (in.below(kUpCount)) {
      case kUpFull: {
        Name name;
        name.first = static_cast<uint32_t>(in.below(uint64_t{kSets} + 1));
        name.second = in.text();
        const Members all = members(name);
        if (!all) throw Malformed("a set of ranks that is not defined");
        Bits allowed = *all;
        allowed.keep(theirs);
        const bool joinable = in.below(2) != 0;
        std::vector<Part> parts;
        for (size_t left = in.count(); left > 0; --left) {
          std::string fixed = in.text();
          Bits ranks = Bits::read(in, place_.size);
          if (!allowed.covers(ranks, {})) throw Malformed("an operation of ranks that are not below");
          parts.push_back({std::move(fixed), std::move(ranks)});
        }
        std::map<uint32_t, std::string> owns;
        for (size_t left = in.count(); left > 0; --left) {
          const auto rank = static_cast<uint32_t>(in.below(place_.size));
          if (!allowed.has(rank)) throw Malformed("an operation of ranks that are not below");
          owns[rank] = in.text();
        }
        if (is_late(name, seen)) break;
        Entry& one = entry(name, now);
        one.joinable = joinable;
        for (Part& part : parts) {
          part.ranks.remove(one.have);
          if (part.ranks.empty()) continue;
          merge(one.parts, part.fixed, part.ranks);
          one.have.add(part.ranks);
          for (const uint32_t rank : part.ranks.list()) one.owns[rank] = owns[rank];
        }
        if (one.have.empty() && one.hinted.empty()) {
          entries_.erase(name);
        } else {
          complete(name, one);
        }
        break;
      }
      case kUpBits:
        for (const uint32_t slot : Bits::read(in, slots_.size()).list()) {
          // The slot was reused after the frame was made: the ranks below bring the former operation again, in full.
          if (!slots_[slot].used || seen < slots_[slot].assigned) continue;
          if (was_done(slots_[slot].name, seen)) continue;
          Bits ranks = *members(slots_[slot].name);
          ranks.keep(theirs);
          ranks.remove(seen_joined_);
          if (!ranks.empty()) add_bit(slot, ranks, now);
        }
        break;
      case kUpJoin: {
        Bits ranks = Bits::read(in, place_.size);
        if (!theirs.covers(ranks, {})) throw Malformed("ranks have joined that are not below");
        note_joined(ranks);
        break;
      }
      case kUpShutDown: {
        const auto rank = static_cast<int64_t>(in.below(place_.size));
        const bool drain = in.below(2) != 0;
        ask_shut_down(rank, drain, in.text());
        break;
      }
      case kUpClosed:
        closed_[child] = true;
        break;
      case kUpLost: {
        const Bits lost = Bits::read(in, place_.size);
        tell_lost(lost, in.text());
        break;
      }
      case kUpHint: {
        Name name;
        name.first = static_cast<uint32_t>(in.below(uint64_t{kSets} + 1));
        name.second = in.text();
        if (!members(name)) throw Malformed("a set of ranks that is not defined");
        std::string fixed = in.text();
        const Bits have = Bits::read(in, place_.size);
        const double age = static_cast<double>(in.below(uint64_t{1} << 52)) * 1e-3;
        const bool overdue = in.below(2) != 0;
        if (have.empty() || is_late(name, seen)) break;
        if (!place_.root) {
          send_hint(name, fixed, have, age, overdue);
          break;
        }
        Entry& one = entry(name, now - age);
        one.hinted.add(have);
        if (one.hinted_fixed.empty()) one.hinted_fixed = std::move(fixed);
        one.overdue = one.overdue || overdue;
        one.warn = std::min(one.warn, std::max(one.since + stall_after_, now));
        due_ = std::min(due_, overdue ? now : one.warn);
        break;
      }
      default:
        throw Malformed("unknown kind of record");
    }
    if (ended_) return;
  }
}

bool Node::was_done(const Name& name, uint64_t seen) const {
  const auto done = done_.find(name);
  return done != done_.end() && seen < done->second;
}

// An operation may be received again after it was forwarded: if its slot was reused, the ranks below that have sent a
// bit for the slot bring the operation once more, in full.
bool Node::is_late(const Name& name, uint64_t seen) const {
  if (was_done(name, seen)) return true;
  const auto found = entries_.find(name);
  return found != entries_.end() && found->second.forwarded;
}

void Node::note_joined(const Bits& ranks) {
  seen_joined_.add(ranks);
  if (!place_.root) {
    up_.number(kUpJoin);
    ranks.write(up_);
  } else {
    send_bits();
    Writer record;
    record.number(kDownJoined);
    ranks.write(record);
    send_down(std::move(record));
    if (joined_.covers(groups_[kAllRanks], {})) {
      Writer over;
      over.number(kDownAllJoined);
      over.number(ranks.list().back());
      send_down(std::move(over));
    }
  }
  complete_all();
}

void Node::ask_shut_down(int64_t rank, bool drain, const std::string& reason) {
  if (!place_.root) {
    up_.number(kUpShutDown);
    up_.number(static_cast<uint64_t>(rank));
    up_.number(drain);
    up_.text(reason);
    return;
  }
  if (drain && closing_) return;
  Writer record;
  if (drain) {
    record.number(kDownClosing);
    record.number(static_cast<uint64_t>(rank));
  } else {
    record.number(kDownEnded);
    record.number(static_cast<uint64_t>(rank) + 1);
    Bits().write(record);
  }
  record.text(reason);
  send_down(std::move(record));
}

void Node::tell_lost(const Bits& lost, const std::string& reason) {
  if (!place_.root) {
    up_.number(kUpLost);
    lost.write(up_);
    up_.text(reason);
    return;
  }
  Writer record;
  record.number(kDownEnded);
  record.number(0);
  lost.write(record);
  record.text(reason);
  send_down(std::move(record));
}

void Node::lost_child(size_t child, const std::string& why) {
  if (!ended_) tell_lost(single(place_.children.at(child).first), why);
}

void Node::lost_parent(uint32_t parent, const std::string& why) {
  if (ended_) return;
  Writer record;  // this rank tells the ranks below
  record.number(kDownEnded);
  record.number(0);
  single(parent).write(record);
  record.text(why);
  send_down(std::move(record));
}

}  // namespace ncclpy::coordinator
