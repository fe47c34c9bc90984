// Point-to-point messages. What a rank sends is offered, and the receiver reads it where it lies: between threads, and between
// processes if it is much and the kernel lets one read the other. What is little, or cannot be read, passes in pieces through
// the segment.
//
// Channel::state, for the k-th message of the channel that is offered: 4k idle; 4k + 1 offered; 4k + 2 taken, the receiver is
// copying; then 4(k + 1). A sender that takes its offer back turns it into 4k again. Between threads it waits for a receiver
// that is copying. Between processes it does not, as that could take for ever: to read what has been given back does no harm,
// and a receiver that finds its message no longer taken has not received it.
#include "p2p.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "collective.hpp"
#include "comm/missing.hpp"
#include "faults/broken_off.hpp"
#include "peer_memory.hpp"
#include "segment/corruption.hpp"

namespace ncclpy::host {
namespace {
constexpr int many_looks = 64;  // who waits longer says for whom
enum : uint64_t { idle, offered, taken, states = 4 };

// From here on one copy by the kernel takes less time than two through the cache; what is less fits into the channel, and a
// send of it need not wait for the receiver.
constexpr size_t least_offered = channel_slots * piece_bytes;
}

void Messages::add(const Operation& operation) {
  const size_t bytes = operation.count * size_of(operation.dtype);
  if (bytes == 0) return;
  const bool sends = operation.kind == Operation::send;
  const Message message{operation.sendbuff, operation.recvbuff, {operation.count, uint64_t(operation.dtype)}, bytes};
  for (Line& known : lines_) {
    if (known.peer == operation.root && known.sends == sends) return known.more.push_back(message);
  }
  if (lines_.empty()) lines_.reserve(2);  // an exchange with a neighbour
  lines_.push_back({operation.root, sends, comm_.segment->same_process(operation.root, comm_.rank), message, {}});
}

bool Messages::finished() const {
  return std::all_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.finished(); });
}

bool Messages::finish() {
  Bell& bell = comm_.segment->slot(comm_.rank).bell;
  Awaited awaited(comm_, data_side);
  const Rendezvous::Lookout lookout(comm_.rendezvous);
  while (!finished()) {
    int looks = 0;
    wait_until(bell, comm_.segment->spin(), [&] {
      if (advance() || comm_.health.stopped() || Interruption::wants_out()) return true;
      if (++looks < many_looks) return false;
      if (looks == many_looks) awaited.tell(peers());  // once it is going to last
      return finds_disagreement(comm_);
    });
    const bool stopped = comm_.health.stopped() || comm_.rendezvous.has_disagreed();
    if (finished() || !(stopped || Interruption::wants_out())) continue;
    retract();
    if (!stopped || !stand_still(comm_)) return false;
    break_off();
    return true;
  }
  return true;
}

void Messages::break_off() {
  for (const Line& line : lines_) {
    if (!line.finished()) break_off_messages(comm_, line.peer, line.sends, line.more.size() + 1 - line.at);
  }
}

// Those that this rank still waits for.
std::vector<int> Messages::peers() const {
  std::vector<int> found;
  for (const Line& line : lines_) {
    if (!line.finished()) found.push_back(line.peer);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

bool Messages::advance() {
  bool moved = false;
  for (Line& line : lines_) {
    while (!line.finished() && advance(line)) moved = true;
  }
  return moved;
}

bool Messages::advance(Line& line) { return (line.sends ? send(line) : receive(line)) || complete_corrupted(line); }

bool Messages::complete_corrupted(Line& line) {
  Channel& way = channel(line);
  std::atomic<uint32_t>& broken_off = line.sends ? way.broken_receives : way.broken_sends;
  if (broken_off.load(std::memory_order_acquire) == 0) return false;
  if (line.sends ? send(line) : receive(line)) return true;  // the peer's side of this one has come before
  if (!take_broken_off(broken_off)) return false;
  Message& message = line.now();
  if (line.sends && message.offers && message.started) retract(line);
  if (!line.sends) overwrite(message.target, message.bytes);
  line.at++;
  return true;
}

bool Messages::send(Line& line) {
  Message& message = line.now();
  if (message.place == never && message.done == 0) {  // once: its place must not become that of another message
    message.offers = line.local || (message.bytes >= least_offered && saves_to_offer() &&
                                    !channel(line).refused.load(std::memory_order_relaxed));
  }
  return message.offers ? offer(line) : send_pieces(line);
}

// Whether this rank has else to do than to copy what it sends. If not, it copies pieces while the receiver copies them out.
bool Messages::saves_to_offer() const {
  const auto receives = [](const Line& line) { return !line.sends && !line.local && !line.finished(); };
  return comm_.segment->spin().is_crowded() || std::any_of(lines_.begin(), lines_.end(), receives);
}

bool Messages::receive(Line& line) {
  if (line.local) return receive_offered(line);
  // Pieces that were sent before something was offered are seen by whoever sees the offer.
  const bool is_offered = channel(line).state.load(std::memory_order_acquire) % states == offered;
  return receive_pieces(line) || (is_offered && receive_offered(line));
}

bool Messages::offer(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  const uint64_t state = way.state.load(std::memory_order_acquire);
  if (state % states != idle) return false;
  if (!message.started) {
    if (message.place == never) {  // else it was taken back, and who took it may be reading this
      way.data = message.source;
      way.offer = message.kind;
      message.place = state;
    }
    message.started = true;
    way.state.store(state + offered, std::memory_order_release);
    tell(line.peer);
    return true;
  }
  if (state == message.place) {  // the receiver has given it back
    message.started = message.offers = false;
    return true;
  }
  if (!(way.wanted == message.kind)) complain(line, message.kind, way.wanted);
  line.at++;
  return true;
}

bool Messages::receive_offered(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  uint64_t state = way.state.load(std::memory_order_acquire);
  if (state % states != offered) return false;
  const uint64_t place = state - offered;
  if (!line.local && !reads_peers(comm_)) return refuse(line, state, place);
  if (!way.state.compare_exchange_strong(state, place + taken, std::memory_order_acq_rel)) return false;
  const MessageKind sent = way.offer;
  way.wanted = message.kind;
  if (sent == message.kind && !copy_offered(line, place)) return false;
  state = place + taken;
  if (!way.state.compare_exchange_strong(state, place + states, std::memory_order_acq_rel)) return false;
  if (!(sent == message.kind)) complain(line, sent, message.kind);
  tell(line.peer);
  line.at++;
  return true;
}

// Gives back what it cannot read.
bool Messages::refuse(Line& line, uint64_t state, uint64_t place) {
  Channel& way = channel(line);
  way.refused.store(1, std::memory_order_relaxed);
  if (!way.state.compare_exchange_strong(state, place, std::memory_order_acq_rel)) return false;
  tell(line.peer);
  return true;
}

// False if not all of it was copied.
bool Messages::copy_offered(Line& line, uint64_t place) {
  Channel& way = channel(line);
  Message& message = line.now();
  if (line.local) {
    std::memmove(message.target, way.data, message.bytes);
    return true;
  }
  const auto is_taken = [&] { return way.state.load(std::memory_order_acquire) == place + taken; };
  return copy_from_peer(comm_, line.peer, way.data, message.target, message.bytes, is_taken, [&](const void*, int error) {
    // Of its own memory the peer can still make pieces.
    if (is_taken() && !has_gone(comm_, line.peer, error)) refuse(line, place + taken, place);
  });
}

bool Messages::send_pieces(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  const uint64_t written = way.written;
  if (written - way.seen_read == channel_slots) {  // the receiver writes there with each piece: it is not read with each
    way.seen_read = way.read.load(std::memory_order_acquire);
    if (written - way.seen_read == channel_slots) return false;
  }
  const size_t slot = written % channel_slots;
  const size_t n = std::min(piece_bytes, message.bytes - message.done);
  std::memcpy(comm_.segment->piece(comm_.rank, line.peer, slot, n),
              static_cast<const char*>(message.source) + message.done, n);
  way.pieces[slot].message = message.kind;
  way.written = written + 1;
  way.pieces[slot].number.store(written + 1, std::memory_order_release);
  expect_writing(&way.pieces[way.written % channel_slots]);
  tell(line.peer);
  message.done += n;
  if (message.done == message.bytes) line.at++;
  return true;
}

bool Messages::receive_pieces(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  const uint64_t read = way.read.load(std::memory_order_relaxed);
  const size_t slot = read % channel_slots;
  if (way.pieces[slot].number.load(std::memory_order_acquire) != read + 1) return false;
  const MessageKind sent = way.pieces[slot].message;
  const size_t sent_bytes = sent.count * size_of(ncclDataType_t(sent.dtype));
  const size_t n = std::min(piece_bytes, sent_bytes - message.done);
  // A message of another kind is read to its end all the same, so that the next one is found where it begins.
  if (sent == message.kind) {
    std::memcpy(static_cast<char*>(message.target) + message.done, comm_.segment->piece(line.peer, comm_.rank, slot, n), n);
  } else if (!message.started) {
    complain(line, sent, message.kind);
  }
  message.started = true;
  way.read.store(read + 1, std::memory_order_release);
  tell(line.peer);
  message.done += n;
  if (message.done == sent_bytes) line.at++;
  return true;
}

void Messages::retract() {
  for (Line& line : lines_) {
    if (line.sends && !line.finished() && line.now().offers && line.now().started) retract(line);
  }
}

void Messages::retract(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  uint64_t state = message.place + offered;
  if (way.state.compare_exchange_strong(state, message.place, std::memory_order_acq_rel)) {
    message.started = false;
    return;
  }
  const auto is_taken = [&] { return way.state.load(std::memory_order_acquire) == message.place + taken; };
  if (line.local) return wait_until(comm_.segment->slot(comm_.rank).bell, [&] { return !is_taken(); });
  if (state == message.place + taken && way.state.compare_exchange_strong(state, message.place)) message.started = false;
}

void Messages::complain(const Line& line, const MessageKind& sent, const MessageKind& wanted) {
  const int from = line.sends ? comm_.rank : line.peer;
  const int to = line.sends ? line.peer : comm_.rank;
  const auto text = [](const MessageKind& kind) {
    return std::to_string(kind.count) + " " + type_name(ncclDataType_t(kind.dtype));
  };
  fail(ncclInvalidUsage, "the ranks do not agree: rank %d sends %s to rank %d, which receives %s (%s)", from,
       text(sent).c_str(), to, text(wanted).c_str(), comm_.title().c_str());
  comm_.health.set_async(ncclInvalidUsage, last_error());
  comm_.segment->disagree(last_error());
}

}  // namespace ncclpy::host
