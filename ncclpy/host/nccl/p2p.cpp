// Point-to-point messages: read in place between threads, in pieces through the segment between processes.
//
// Channel::state between threads, for the k-th message of the channel: 4k idle; 4k + 1 offered; 4k + 2 taken, the
// receiver is copying; then 4(k + 1). A sender that aborts turns 4k + 1 into 4k + 3 and nobody follows.
#include "p2p.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "collective.hpp"
#include "missing.hpp"

namespace ncclpy::host {
namespace {
constexpr int many_looks = 64;  // before the first sleep, see wait_until
enum : uint64_t { idle, offered, taken, withdrawn, states };
}

void Messages::add(const Operation& operation) {
  const size_t bytes = operation.count * size_of(operation.dtype);
  if (bytes == 0) return;
  const bool sends = operation.kind == Operation::send;
  Line* line = nullptr;
  for (Line& known : lines_) {
    if (known.peer == operation.root && known.sends == sends) line = &known;
  }
  if (line == nullptr) {
    lines_.push_back(
        {operation.root, sends, comm_.segment->same_process(operation.root, comm_.rank), {}});
    line = &lines_.back();
  }
  line->messages.push_back(
      {operation.sendbuff, operation.recvbuff, {operation.count, uint64_t(operation.dtype)}, bytes});
}

bool Messages::finished() const {
  return std::all_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.finished(); });
}

void Messages::finish() {
  Bell& bell = comm_.segment->slot(comm_.rank).bell;
  Awaited awaited(comm_, data_side);
  while (!finished()) {
    int looks = 0;
    wait_until(bell, comm_.segment->spin(), [&] {
      if (advance() || comm_.health.stopped()) return true;
      if (++looks == many_looks) awaited.tell(peers());  // once it is going to last
      return false;
    });
    if (comm_.health.stopped()) {
      for (Line& line : lines_) withdraw(line);
      return;
    }
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

// Does what can be done now; whether that was anything.
bool Messages::advance() {
  bool moved = false;
  for (Line& line : lines_) {
    while (!line.finished() && advance(line)) moved = true;
  }
  return moved;
}

bool Messages::advance(Line& line) {
  if (line.direct) return line.sends ? send_direct(line) : receive_direct(line);
  return line.sends ? send_pieces(line) : receive_pieces(line);
}

bool Messages::send_direct(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  const uint64_t state = way.state.load(std::memory_order_acquire);
  if (state % states != idle) return false;
  if (!message.started) {
    way.data = message.source;
    way.offer = message.kind;
    message.started = true;
    way.state.store(state + offered, std::memory_order_release);
    tell(line.peer);
    return true;
  }
  if (!(way.wanted == message.kind)) complain(line, message.kind, way.wanted);
  line.at++;
  return true;
}

bool Messages::receive_direct(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  uint64_t state = way.state.load(std::memory_order_acquire);
  if (state % states != offered) return false;
  if (!way.state.compare_exchange_strong(state, state - offered + taken, std::memory_order_acq_rel)) return false;
  if (way.offer == message.kind) std::memmove(message.target, way.data, message.bytes);
  else complain(line, way.offer, message.kind);
  way.wanted = message.kind;
  way.state.store(state - offered + states, std::memory_order_release);
  tell(line.peer);
  line.at++;
  return true;
}

bool Messages::send_pieces(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  const uint64_t written = way.written.load(std::memory_order_relaxed);
  if (written - way.read.load(std::memory_order_acquire) == channel_slots) return false;
  const size_t slot = written % channel_slots;
  const size_t n = std::min(piece_bytes, message.bytes - message.done);
  std::memcpy(comm_.segment->piece(comm_.rank, line.peer, slot),
              static_cast<const char*>(message.source) + message.done, n);
  way.messages[slot] = message.kind;
  way.written.store(written + 1, std::memory_order_release);
  tell(line.peer);
  message.done += n;
  if (message.done == message.bytes) line.at++;
  return true;
}

bool Messages::receive_pieces(Line& line) {
  Channel& way = channel(line);
  Message& message = line.now();
  const uint64_t read = way.read.load(std::memory_order_relaxed);
  if (read == way.written.load(std::memory_order_acquire)) return false;
  const size_t slot = read % channel_slots;
  const MessageKind sent = way.messages[slot];
  const size_t sent_bytes = sent.count * size_of(ncclDataType_t(sent.dtype));
  const size_t n = std::min(piece_bytes, sent_bytes - message.done);
  // A message of another kind is read to its end all the same, so that the next one is found where it begins.
  if (sent == message.kind) {
    std::memcpy(static_cast<char*>(message.target) + message.done, comm_.segment->piece(line.peer, comm_.rank, slot), n);
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

// Takes back what is offered; what a peer has taken is waited for, since it is being copied at this moment.
void Messages::withdraw(Line& line) {
  if (!line.sends || !line.direct || line.finished() || !line.now().started) return;
  Channel& way = channel(line);
  uint64_t state = way.state.load(std::memory_order_acquire);
  if (state % states == offered && way.state.compare_exchange_strong(state, state - offered + withdrawn)) return;
  wait_until(comm_.segment->slot(comm_.rank).bell,
             [&] { return way.state.load(std::memory_order_acquire) % states != taken; });
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
}

}  // namespace ncclpy::host
