// Point-to-point messages. A sender offers its buffer, and the receiver reads it there: between threads, and between
// processes for large messages if the kernel permits one process to read the other. Small messages, and those that
// cannot be read, pass in pieces through the segment.
//
// Channel::state, for the k-th offered message of the channel: 4k idle; 4k + 1 offered; 4k + 2 taken, the receiver is
// copying; then 4(k + 1). A sender that withdraws its offer sets the state back to 4k. If the receiver is copying, a
// sender in the same process waits for it. A sender in another process does not, since the wait might never end. The
// receiver then reads on, which does no harm, and finds the state no longer `taken`: it has not received the message.
#include "p2p.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "collective.hpp"
#include "comm/stragglers.hpp"
#include "faults/abandon.hpp"
#include "peer_memory.hpp"
#include "segment/abort_corruption.hpp"

namespace ncclpy::host {
namespace {
constexpr int many_polls = 64;  // a rank that has polled longer publishes the ranks that it waits for
enum : uint64_t { idle, offered, taken, states = 4 };

// From this size on, one copy by the kernel takes less time than two through the cache. A smaller message fits into
// the channel, and its send need not wait for the receiver.
constexpr size_t offer_min_bytes = channel_slots * piece_bytes;
}

void Messages::add(const Operation& operation) {
  const size_t bytes = operation.count * size_of(operation.dtype);
  if (bytes == 0) return;
  const bool sends = operation.kind == Operation::send;
  const Message message{operation.sendbuff, operation.recvbuff, {operation.count, uint64_t(operation.dtype)}, bytes};
  for (PeerQueue& known : queues_) {
    if (known.peer == operation.root && known.sends == sends) return known.more.push_back(message);
  }
  if (queues_.empty()) queues_.reserve(2);  // an exchange with a neighbour
  queues_.push_back({operation.root, sends, comm_.segment->same_process(operation.root, comm_.rank), message, {}});
}

bool Messages::finished() const {
  return std::all_of(queues_.begin(), queues_.end(), [](const PeerQueue& queue) { return queue.finished(); });
}

bool Messages::finish() {
  FutexEvent& changed = comm_.segment->slot(comm_.rank).changed;
  AwaitedRanks awaited(comm_, data_side);
  const Rendezvous::WaiterRegistration registration(comm_.rendezvous);
  while (!finished()) {
    int polls = 0;
    wait_until(changed, comm_.segment->spin(), [&] {
      if (advance() || comm_.health.stopped() || WaitControl::must_leave()) return true;
      if (++polls < many_polls) return false;
      if (polls == many_polls) awaited.set(peers());  // the wait will last
      return finds_disagreement(comm_);
    });
    const bool stopped = comm_.health.stopped() || comm_.rendezvous.has_disagreed();
    if (finished() || !(stopped || WaitControl::must_leave())) continue;
    retract();
    if (!stopped || !hang_until_released(comm_)) return false;
    abandon();
    return true;
  }
  return !mismatched_ || hang_until_released(comm_);
}

void Messages::abandon() {
  for (const PeerQueue& queue : queues_) {
    if (!queue.finished()) abandon_messages(comm_, queue.peer, queue.sends, queue.more.size() + 1 - queue.at);
  }
}

// The peers that this rank still waits for.
std::vector<int> Messages::peers() const {
  std::vector<int> found;
  for (const PeerQueue& queue : queues_) {
    if (!queue.finished()) found.push_back(queue.peer);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

bool Messages::advance() {
  bool moved = false;
  for (PeerQueue& queue : queues_) {
    while (!queue.finished() && advance(queue)) moved = true;
  }
  return moved;
}

bool Messages::advance(PeerQueue& queue) {
  return (queue.sends ? send(queue) : receive(queue)) || complete_corrupted(queue);
}

bool Messages::complete_corrupted(PeerQueue& queue) {
  Channel& link = channel(queue);
  std::atomic<uint32_t>& abandoned = queue.sends ? link.abandoned_receives : link.abandoned_sends;
  if (abandoned.load(std::memory_order_acquire) == 0) return false;
  if (queue.sends ? send(queue) : receive(queue)) return true;  // the peer executed its side of this message before
  if (!take_abandoned_message(abandoned)) return false;
  Message& message = queue.now();
  if (queue.sends && message.offers && message.started) retract(queue);
  if (!queue.sends) overwrite_with_garbage(message.target, message.bytes);
  queue.at++;
  return true;
}

bool Messages::send(PeerQueue& queue) {
  Message& message = queue.now();
  // The decision is final after the first offer or piece: a receiver may still read the fields of a withdrawn offer,
  // so in the same state the same message must be offered again.
  if (message.idle_state == never && message.done == 0) {
    message.offers = queue.local || (message.bytes >= offer_min_bytes && offering_is_faster() &&
                                    !channel(queue).refused.load(std::memory_order_relaxed));
  }
  return message.offers ? offer(queue) : send_pieces(queue);
}

// Whether there is other work for this rank, or for another rank on its core, while the receiver copies an offered
// message. If not, it is faster that this rank copies pieces into the segment while the receiver copies them out.
bool Messages::offering_is_faster() const {
  const auto receives = [](const PeerQueue& queue) { return !queue.sends && !queue.local && !queue.finished(); };
  return comm_.segment->spin().is_crowded() || std::any_of(queues_.begin(), queues_.end(), receives);
}

bool Messages::receive(PeerQueue& queue) {
  if (queue.local) return receive_offered(queue);
  // The state is read first: a receiver that sees an offer then also sees the pieces that were sent before the offer.
  const bool is_offered = channel(queue).state.load(std::memory_order_acquire) % states == offered;
  return receive_pieces(queue) || (is_offered && receive_offered(queue));
}

bool Messages::offer(PeerQueue& queue) {
  Channel& link = channel(queue);
  Message& message = queue.now();
  const uint64_t state = link.state.load(std::memory_order_acquire);
  if (state % states != idle) return false;
  if (!message.started) {
    // If the message was offered before, a receiver may be reading these fields.
    if (message.idle_state == never) {
      link.data = message.source;
      link.offer = message.kind;
      message.idle_state = state;
    }
    message.started = true;
    link.state.store(state + offered, std::memory_order_release);
    notify(queue.peer);
    return true;
  }
  if (state == message.idle_state) {  // the receiver has refused
    message.started = message.offers = false;
    return true;
  }
  if (!(link.wanted == message.kind)) report_mismatch(queue, message.kind, link.wanted);
  queue.at++;
  return true;
}

bool Messages::receive_offered(PeerQueue& queue) {
  Channel& link = channel(queue);
  Message& message = queue.now();
  uint64_t state = link.state.load(std::memory_order_acquire);
  if (state % states != offered) return false;
  const uint64_t idle_state = state - offered;
  if (!queue.local && !reads_peers(comm_)) return refuse(queue, state, idle_state);
  if (!link.state.compare_exchange_strong(state, idle_state + taken, std::memory_order_acq_rel)) return false;
  const MessageKind sent = link.offer;
  link.wanted = message.kind;
  if (sent == message.kind && !copy_offered(queue, idle_state)) return false;
  state = idle_state + taken;
  if (!link.state.compare_exchange_strong(state, idle_state + states, std::memory_order_acq_rel)) return false;
  if (!(sent == message.kind)) report_mismatch(queue, sent, message.kind);
  notify(queue.peer);
  queue.at++;
  return true;
}

// Refuses an offer that this rank cannot read.
bool Messages::refuse(PeerQueue& queue, uint64_t state, uint64_t idle_state) {
  Channel& link = channel(queue);
  link.refused.store(1, std::memory_order_relaxed);
  if (!link.state.compare_exchange_strong(state, idle_state, std::memory_order_acq_rel)) return false;
  notify(queue.peer);
  return true;
}

// Returns false if not everything was copied.
bool Messages::copy_offered(PeerQueue& queue, uint64_t idle_state) {
  Channel& link = channel(queue);
  Message& message = queue.now();
  if (queue.local) {
    std::memmove(message.target, link.data, message.bytes);
    return true;
  }
  const auto is_taken = [&] { return link.state.load(std::memory_order_acquire) == idle_state + taken; };
  const auto on_failure = [&](const void*, int error) {
    // The peer can still send its memory in pieces.
    if (is_taken() && !has_gone(comm_, queue.peer, error)) refuse(queue, idle_state + taken, idle_state);
  };
  return copy_from_peer(comm_, queue.peer, link.data, message.target, message.bytes, is_taken, on_failure);
}

bool Messages::send_pieces(PeerQueue& queue) {
  Channel& link = channel(queue);
  Message& message = queue.now();
  const uint64_t written = link.written;
  // read only when the ring seems full: the receiver writes this line with each piece
  if (written - link.seen_read == channel_slots) {
    link.seen_read = link.read.load(std::memory_order_acquire);
    if (written - link.seen_read == channel_slots) return false;
  }
  const size_t slot = written % channel_slots;
  const size_t n = std::min(piece_bytes, message.bytes - message.done);
  std::memcpy(comm_.segment->piece(comm_.rank, queue.peer, slot, n),
              static_cast<const char*>(message.source) + message.done, n);
  link.pieces[slot].message = message.kind;
  link.written = written + 1;
  link.pieces[slot].number.store(written + 1, std::memory_order_release);
  prefetch_for_write(&link.pieces[link.written % channel_slots]);
  notify(queue.peer);
  message.done += n;
  if (message.done == message.bytes) queue.at++;
  return true;
}

bool Messages::receive_pieces(PeerQueue& queue) {
  Channel& link = channel(queue);
  Message& message = queue.now();
  const uint64_t read = link.read.load(std::memory_order_relaxed);
  const size_t slot = read % channel_slots;
  if (link.pieces[slot].number.load(std::memory_order_acquire) != read + 1) return false;
  const MessageKind sent = link.pieces[slot].message;
  const size_t sent_bytes = sent.count * size_of(ncclDataType_t(sent.dtype));
  const size_t n = std::min(piece_bytes, sent_bytes - message.done);
  // A mismatched message is read to its end as well, so that the next message is read from its start.
  if (sent == message.kind) {
    std::memcpy(static_cast<char*>(message.target) + message.done,
                comm_.segment->piece(queue.peer, comm_.rank, slot, n), n);
  } else if (!message.started) {
    report_mismatch(queue, sent, message.kind);
  }
  message.started = true;
  link.read.store(read + 1, std::memory_order_release);
  notify(queue.peer);
  message.done += n;
  if (message.done == sent_bytes) queue.at++;
  return true;
}

void Messages::retract() {
  for (PeerQueue& queue : queues_) {
    if (queue.sends && !queue.finished() && queue.now().offers && queue.now().started) retract(queue);
  }
}

void Messages::retract(PeerQueue& queue) {
  Channel& link = channel(queue);
  Message& message = queue.now();
  uint64_t state = message.idle_state + offered;
  if (link.state.compare_exchange_strong(state, message.idle_state, std::memory_order_acq_rel)) {
    message.started = false;
    return;
  }
  const auto is_taken = [&] { return link.state.load(std::memory_order_acquire) == message.idle_state + taken; };
  if (queue.local) return wait_until(comm_.segment->slot(comm_.rank).changed, [&] { return !is_taken(); });
  if (state == message.idle_state + taken && link.state.compare_exchange_strong(state, message.idle_state))
    message.started = false;
}

void Messages::report_mismatch(const PeerQueue& queue, const MessageKind& sent, const MessageKind& wanted) {
  const int from = queue.sends ? comm_.rank : queue.peer;
  const int to = queue.sends ? queue.peer : comm_.rank;
  const auto text = [](const MessageKind& kind) {
    return std::to_string(kind.count) + " " + type_name(ncclDataType_t(kind.dtype));
  };
  fail(ncclInvalidUsage, "the ranks do not agree: rank %d sends %s to rank %d, which receives %s (%s)", from,
       text(sent).c_str(), to, text(wanted).c_str(), comm_.title().c_str());
  mismatched_ = true;
  comm_.health.set_async(ncclInvalidUsage, last_error());
  comm_.segment->report_disagreement(last_error());
}

}  // namespace ncclpy::host
