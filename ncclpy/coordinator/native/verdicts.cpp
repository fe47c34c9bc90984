// The root's responses, their application by all ranks in one order, and the frames that a rank sends.
#include <algorithm>
#include <limits>

#include "node.hpp"
#include "records.hpp"

namespace ncclpy::coordinator {

namespace {

constexpr size_t kMaxNeighbours = 64;  // other waiting operations in a warning
constexpr size_t kMaxWarnings = 16;    // warnings at a time
constexpr size_t kCondemnedBytes = 1 << 20;  // bytes of records that are kept for names which may never be brought
constexpr size_t kRecordOverhead = 512;  // bytes of a record besides its texts
constexpr double kMaxPatience = 64;  // most seconds between two warnings, in units of stall_after
constexpr double kForever = std::numeric_limits<double>::infinity();

}  // namespace

// The root's responses.

uint32_t Node::find_slot(const Name& name) {
  const auto own = by_name_.find(name);
  if (own != by_name_.end()) return own->second;
  if (closing_) return kNoSlot;  // ranks that are closing cannot bring a replaced operation again
  if (used_ < slots_.size()) return used_;
  // The CLOCK algorithm: a slot that was used since the hand last passed it stays for another round.
  for (size_t looks = 2 * slots_.size(); looks > 0; --looks) {
    hand_ = static_cast<uint32_t>((hand_ + 1) % slots_.size());
    Slot& slot = slots_[hand_];
    if (slot.touched) {
      slot.touched = false;
    } else if (entries_.count(slot.name) == 0) {
      return hand_;
    }
  }
  return kNoSlot;
}

void Node::respond(const Name& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return;
  Entry& one = found->second;
  const Bits all = *members(name);
  Writer record;
  Bits absent = all;
  absent.keep(joined_);
  if (name.first == kSets && absent.empty()) {
    send_bits();
    record.number(kDownGroup);
    record.number(groups_.size());
    all.write(record);
    send_down(std::move(record));
    return;
  }
  if (one.parts.empty()) {
    const uint32_t slot = by_name_.at(name);
    if (slots_[slot].joinable || absent.empty()) {
      bits_down_.add(slot);
      return;
    }
  }
  send_bits();
  expand(name, one);
  const bool differs = one.parts.size() > 1;
  if (differs || (!one.joinable && !absent.empty())) {
    record.number(differs ? kDownMismatch : kDownAfterJoin);
    record.number(name.first);
    record.text(name.second);
    if (differs) {
      std::sort(one.parts.begin(), one.parts.end(), [](const Part& a, const Part& b) {
        return a.ranks.list().front() < b.ranks.list().front();  // the order of arrival differs from run to run
      });
      write_parts(record, one.parts);
    } else {
      record.text(one.parts.front().fixed);
    }
    send_down(std::move(record));
    return;
  }
  const uint32_t slot = find_slot(name);
  record.number(kDownNew);
  record.number(name.first);
  record.text(name.second);
  record.text(one.parts.front().fixed);
  record.number(one.joinable);
  record.number(slot == kNoSlot ? 0 : uint64_t{slot} + 1);
  for (const uint32_t member : all.list()) record.text(one.owns[member]);
  send_down(std::move(record));
}

void Node::send_bits() {
  if (bits_down_.empty()) return;
  Writer record;
  record.number(kDownBits);
  bits_down_.write(record);
  bits_down_.clear();
  send_down(std::move(record));
}

// The sender applies its own frames as all other ranks do.
void Node::send_down(Writer record) {
  if (down_.empty()) current_ = applied_ + 1;
  const std::string bytes = record.take();
  down_.raw(bytes);
  Reader in(bytes);
  apply(in, 0);
}

// Applying frames, by all ranks in one order.

void Node::from_parent(std::string_view frame, double now) {
  if (ended_) return;
  counters.bytes_down += frame.size();
  Reader in(frame);
  if (in.number() != applied_ + 1) throw Malformed("a frame is missing");
  current_ = applied_ + 1;
  down.emplace_back(frame);
  apply(in, now);
  end_frame();
}

void Node::apply(Reader& in, double now) {
  while (!in.done() && !ended_) {
    Name name;
    Record record;
    switch (in.below(kDownCount)) {
      case kDownBits:
        for (const uint32_t number : Bits::read(in, slots_.size()).list()) {
          Slot& slot = slots_[number];
          if (!slot.used) throw Malformed("a slot that holds nothing");
          slot.touched = true;
          run(slot.name, slot.fixed, slot.owns);
        }
        break;
      case kDownNew: {
        name.first = static_cast<uint32_t>(in.below(groups_.size()));
        name.second = in.text();
        Slot filled;
        filled.fixed = in.text();
        filled.joinable = in.below(2) != 0;
        const uint64_t slot = in.below(slots_.size() + 1);
        for (size_t left = members(name)->count(); left > 0; --left) filled.owns.push_back(in.text());
        run(name, filled.fixed, filled.owns);
        if (slot > 0) fill_slot(static_cast<uint32_t>(slot - 1), name, std::move(filled), now);
        break;
      }
      case kDownMismatch:
        name.first = static_cast<uint32_t>(in.below(groups_.size()));
        name.second = in.text();
        record.kind = Kind::mismatch;
        for (size_t left = in.count(); left > 0; --left) {
          std::string fixed = in.text();
          record.parts.push_back({std::move(fixed), Bits::read(in, place_.size)});
        }
        finish(name, std::move(record));
        break;
      case kDownAfterJoin:
        name.first = static_cast<uint32_t>(in.below(uint64_t{kSets} + 1));
        name.second = in.text();
        if (!members(name)) throw Malformed("a set of ranks that is not defined");
        record.kind = Kind::after_join;
        record.fixed = in.text();
        record.have = *members(name);
        record.have.keep(joined_);
        finish(name, std::move(record));
        break;
      case kDownOverdue:
        name.first = static_cast<uint32_t>(in.below(uint64_t{kSets} + 1));
        name.second = in.text();
        record.kind = Kind::overdue;
        record.fixed = in.text();
        record.have = Bits::read(in, place_.size);
        record.missing = Bits::read(in, place_.size);
        if (!members(name)) throw Malformed("a set of ranks that is not defined");
        if (!place_.children.empty()) done_[name] = current_;  // parts that cross this frame on their way up are late
        if (record.missing.has(place_.rank) && mine_.count(name) == 0) {
          record.group = name.first;
          record.key = name.second;
          entries_.erase(name);
          condemned_.add(name, std::move(record));
        } else {
          finish(name, std::move(record));
        }
        break;
      case kDownJoined:
        joined_.add(Bits::read(in, place_.size));
        break;
      case kDownAllJoined:
        record.kind = Kind::all_joined;
        record.rank = static_cast<int64_t>(in.below(place_.size));
        joined_.clear();
        seen_joined_.clear();
        has_joined_ = false;
        telling_.push_back(std::move(record));
        break;
      case kDownGroup: {
        record.kind = Kind::group;
        record.group = static_cast<uint32_t>(in.number());
        record.have = Bits::read(in, place_.size);
        if (record.group != groups_.size() || record.have.empty()) throw Malformed("unknown set of ranks");
        Writer key;
        record.have.write(key);
        entries_.erase({kSets, key.bytes()});
        mine_.erase({kSets, key.bytes()});
        groups_.push_back(record.have);
        telling_.push_back(std::move(record));
        break;
      }
      case kDownClosing:
        record.kind = Kind::closing;
        record.rank = closer_ = static_cast<int64_t>(in.below(place_.size));
        record.reason = close_reason_ = in.text();
        closing_ = true;
        telling_.push_back(std::move(record));
        break;
      case kDownEnded:
        record.kind = Kind::ended;
        record.rank = static_cast<int64_t>(in.below(uint64_t{place_.size} + 1)) - 1;
        record.have = Bits::read(in, place_.size);
        record.reason = in.text();
        telling_.push_back(std::move(record));
        ended_ = true;
        entries_.clear();
        mine_.clear();
        ready_.clear();
        bits_down_.clear();
        condemned_.clear();
        joining_ = false;
        break;
      default:
        throw Malformed("unknown kind of record");
    }
  }
}

// A member that has joined gets a record too, since it takes part in the launch.
void Node::run(const Name& name, const std::string& fixed, const std::vector<std::string>& owns) {
  ++counters.runs;
  Record record;
  record.kind = Kind::run;
  record.fixed = fixed;
  record.owns = owns;
  record.have = *members(name);
  record.have.keep(joined_);
  finish(name, std::move(record));
}

void Node::finish(const Name& name, Record record) {
  record.group = name.first;
  record.key = name.second;
  const Members all = members(name);
  if (all && all->has(place_.rank)) telling_.push_back(std::move(record));
  const Name copied = name;  // `name` may belong to the entry
  const auto found = entries_.find(copied);
  if (found != entries_.end()) {
    if (found->second.again) done_[copied] = current_;
    entries_.erase(found);
  }
  mine_.erase(copied);
}

void Node::fill_slot(uint32_t number, const Name& name, Slot filled, double now) {
  Slot& slot = slots_[number];
  const Name before = slot.name;
  const bool taken = slot.used && before != name;
  filled.used = true;
  filled.name = name;
  filled.assigned = current_;
  if (!slot.used) used_ = std::max(used_, number + 1);
  slot = std::move(filled);
  if (taken) {
    by_name_.erase(before);
    ++counters.evicted;
  }
  by_name_[name] = number;
  if (!taken) return;
  // Bits for the former operation, on any connection, mean nothing any more: a rank that has sent one brings the
  // operation again, in full.
  const auto found = entries_.find(before);
  // Parts that were forwarded in full stay valid. So the operation may end before a part that is brought again has
  // arrived: `again` makes finish() note the end, so that this part is ignored.
  if (found != entries_.end()) {
    Entry& one = found->second;
    one.again = true;
    one.have.remove(one.cached);
    one.cached.clear();
    one.forwarded = one.forwarded && !one.parts.empty();
  }
  const auto mine = mine_.find(before);
  if (mine != mine_.end()) add_mine(before, mine->second, now);
}

// Operations that have failed without this rank.

namespace {

size_t size_of(const Condemned::Name& name, const Record& record) {
  return 3 * name.second.size() + record.fixed.size() + kRecordOverhead;  // the name is in two maps and in the record
}

}  // namespace

void Condemned::add(const Name& name, Record record) {
  Record before;
  take(name, before);
  bytes_ += size_of(name, record);
  by_turn_[++turns_] = name;
  records_[name] = {std::move(record), turns_};
  while (bytes_ > kCondemnedBytes && records_.size() > 1) {
    const Name oldest = by_turn_.begin()->second;
    take(oldest, before);
  }
}

bool Condemned::take(const Name& name, Record& record) {
  const auto found = records_.find(name);
  if (found == records_.end()) return false;
  record = std::move(found->second.record);
  bytes_ -= size_of(name, record);
  by_turn_.erase(found->second.turn);
  records_.erase(found);
  return true;
}

void Condemned::clear() {
  records_.clear();
  by_turn_.clear();
  bytes_ = 0;
}

// Operations that wait.

Record Node::stalled(const Name& name, const Entry& one, double now) const {
  Record record;
  record.kind = Kind::stalled;
  record.group = name.first;
  record.key = name.second;
  record.fixed = fixed_of(name, one);
  record.have = one.have;
  record.have.add(one.hinted);
  record.missing = *members(name);
  record.missing.remove(record.have);
  record.missing.remove(joined_);
  record.seconds = now - one.since;
  for (const auto& other : entries_) {
    if (record.near.size() == kMaxNeighbours) break;
    if (other.first == name || other.second.forwarded || other.first.first != name.first) continue;
    Bits ranks = other.second.have;
    ranks.add(other.second.hinted);
    record.near.push_back({other.first.second, ranks});
  }
  return record;
}

double Node::look(double now) {
  if (now < due_) return due_;
  double next = kForever;
  std::vector<Name> late;
  std::vector<Record> waiting;
  for (auto& each : entries_) {
    Entry& one = each.second;
    if (one.forwarded) continue;
    const double age = now - one.since;
    const bool is_late = timeout_ > 0 && age >= timeout_;
    if (place_.root && (is_late || one.overdue)) {
      late.push_back(each.first);
      continue;
    }
    if (now >= one.warn || (is_late && !one.overdue)) {
      one.patience = std::min(one.patience * 2, stall_after_ * kMaxPatience);
      one.warn = now + one.patience;
      one.overdue = is_late;
      if (place_.root && waiting.size() == kMaxWarnings) {
        one.patience /= 2;  // not reported now, so the pause before the next report does not grow
      } else if (place_.root) {
        waiting.push_back(stalled(each.first, one, now));
      } else {
        Bits all = one.have;
        all.add(one.hinted);
        send_hint(each.first, fixed_of(each.first, one), all, age, is_late);
      }
    }
    next = std::min(next, one.warn);
    if (timeout_ > 0 && !one.overdue) next = std::min(next, one.since + timeout_);
  }
  if (!waiting.empty()) records.push_back(std::move(waiting));
  for (const Name& name : late) {
    const Record record = stalled(name, entries_.at(name), now);
    Writer out;
    out.number(kDownOverdue);
    out.number(name.first);
    out.text(name.second);
    out.text(record.fixed);
    record.have.write(out);
    record.missing.write(out);
    send_bits();
    send_down(std::move(out));
  }
  due_ = next;
  return next;
}

// Sending.

bool Node::check_joined() {
  if (!joining_ || !mine_.empty()) return false;
  joining_ = false;
  has_joined_ = true;
  note_joined(single(place_.rank));
  return true;
}

bool Node::all_closed() const { return std::find(closed_.begin(), closed_.end(), false) == closed_.end(); }

void Node::end_frame() {
  applied_ = current_;
  ++counters.frames;
  if (telling_.empty()) return;
  if (place_.root)
    for (const Record& record : telling_)
      if (record.kind == Kind::run) launching_.insert(record.group);
  records.push_back(std::move(telling_));
  telling_.clear();
}

void Node::settle() {
  do {
    if (!place_.root) continue;
    for (auto set = ready_.begin(); set != ready_.end();) {
      if (launching_.count(set->first) != 0) {
        ++set;
        continue;
      }
      const std::deque<Name> names = std::move(set->second);
      set = ready_.erase(set);
      for (const Name& name : names) respond(name);
    }
    send_bits();
    if (closing_ && !ended_ && all_closed() && ready_.empty()) {
      Writer record;
      record.number(kDownEnded);
      record.number(static_cast<uint64_t>(closer_ + 1));
      Bits().write(record);
      record.text(close_reason_);
      send_down(std::move(record));
    }
  } while (check_joined());
  if (!down_.empty()) {
    Writer frame;
    frame.number(current_);
    down.push_back(frame.take() + down_.take());
    end_frame();
  }
  if (ended_) {
    up_.take();
    bits_up_.clear();
    return;
  }
  if (!bits_up_.empty()) {
    up_.number(kUpBits);
    bits_up_.write(up_);
    bits_up_.clear();
  }
  if (closing_ && !closed_sent_ && !place_.root && all_closed()) {
    closed_sent_ = true;
    up_.number(kUpClosed);
  }
  if (!up_.empty()) {
    Writer frame;
    frame.number(applied_);
    up.push_back(frame.take() + up_.take());
  }
}

}  // namespace ncclpy::coordinator
