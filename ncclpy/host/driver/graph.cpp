// Capturing streams into graphs, and launching graphs.
#include "graph.hpp"

#include <algorithm>
#include <utility>

#include "device.hpp"
#include "memory_use.hpp"

namespace ncclpy::host {

std::atomic<int> captures_in_progress{0};

namespace {

// Guards all captures and all streams' capture states. Captures are rare and short.
auto& captures_mutex() {
  static auto* const mutex = new Mutex<NCCLPY_LOCK_CAPTURES>;
  return *mutex;
}

std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* const all = new std::vector<std::shared_ptr<Capture>>;
  return *all;
}

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult invalidate_capture(Capture& capture, CUresult error) {
  if (capture.invalidated()) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  capture.invalidate();
  return error;
}

CUresult illegal() {
  last_free_refusal.clear();  // cuGetErrorString must not report the text of an earlier refusal
  return CUDA_ERROR_ILLEGAL_STATE;
}

void add_sorted(std::vector<std::size_t>& nodes, const std::vector<std::size_t>& more) {
  nodes.insert(nodes.end(), more.begin(), more.end());
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
}

}  // namespace

CUresult Capture::begin(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode) {
  std::lock_guard lock(captures_mutex());
  if (stream->kind() == Stream::Kind::legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  CaptureState& state = stream->capture_state;
  if (state.capture != nullptr) return illegal();
  auto made = std::make_shared<Capture>();
  made->mode_ = mode;
  made->thread_ = std::this_thread::get_id();
  made->origin_ = stream;
  made->streams_.push_back(stream);
  captures().push_back(made);
  state.capture = std::move(made);
  stream->capturing.store(true, std::memory_order_release);
  captures_in_progress.fetch_add(1);
  return CUDA_SUCCESS;
}

// Whether all nodes of the capture precede the end of the origin stream, that is, lead to its last nodes (`last`).
bool Capture::joined(const std::vector<std::size_t>& last) const {
  std::vector<bool> before(graph_->nodes.size(), false);
  for (const std::size_t node : last) before[node] = true;
  for (std::size_t i = graph_->nodes.size(); i-- > 0;) {
    if (!before[i]) continue;
    for (const std::size_t node : graph_->nodes[i].after) before[node] = true;
  }
  return std::find(before.begin(), before.end(), false) == before.end();
}

// Ends the capture: detaches all streams from it and removes it from captures().
void Capture::leave() {
  for (const auto& member : streams_) {
    const auto alive = member.lock();
    if (alive == nullptr) continue;
    alive->capture_state = {};
    alive->capturing.store(false, std::memory_order_release);
  }
  const auto self = [this](const std::shared_ptr<Capture>& one) { return one.get() == this; };
  captures().erase(std::find_if(captures().begin(), captures().end(), self));
  captures_in_progress.fetch_sub(1);
}

void Capture::give_up(const std::shared_ptr<Stream>& stream) {
  if (!stream->capturing.load(std::memory_order_acquire)) return;
  std::lock_guard lock(captures_mutex());
  const std::shared_ptr<Capture> capture = stream->capture_state.capture;
  if (capture != nullptr && capture->origin_.lock() == stream) capture->leave();
}

CUresult Capture::end(const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>* graph) {
  std::lock_guard lock(captures_mutex());
  const std::shared_ptr<Capture> capture = stream->capture_state.capture;
  if (capture == nullptr) return illegal();
  if (capture->origin_.lock() != stream) return invalidate_capture(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  CUresult result = CUDA_SUCCESS;
  if (capture->mode_ != CU_STREAM_CAPTURE_MODE_RELAXED && !capture->begun_here())
    result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;  // the capture ends all the same, as in CUDA
  else if (capture->invalidated_) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  else if (!capture->joined(stream->capture_state.last)) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  capture->leave();
  if (result == CUDA_SUCCESS) *graph = capture->graph_;
  return result;
}

CUresult capture(const std::vector<std::shared_ptr<Stream>>& streams, int device, Recipe recipe) {
  std::lock_guard lock(captures_mutex());
  const std::shared_ptr<Capture> target = streams[0]->capture_state.capture;
  std::vector<std::size_t> after;
  for (const auto& stream : streams) {
    const auto& state = stream->capture_state;
    if (state.capture != target || target == nullptr) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    add_sorted(after, state.last);
  }
  if (target->invalidated_) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  target->graph_->nodes.push_back({std::move(recipe), device, std::move(after)});
  for (const auto& stream : streams) stream->capture_state.last = {target->graph_->nodes.size() - 1};
  return CUDA_SUCCESS;
}

CUresult capture_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Capture>& from,
                      const std::vector<std::size_t>& nodes) {
  std::lock_guard lock(captures_mutex());
  CaptureState& state = stream->capture_state;
  if (from == nullptr) {
    // The event was recorded outside the capture, so a launch of the graph could not wait for it.
    if (state.capture == nullptr) return CUDA_SUCCESS;
    return invalidate_capture(*state.capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  }
  if (state.capture != nullptr && state.capture != from) {
    from->invalidate();
    return invalidate_capture(*state.capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  if (from->invalidated_) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (std::find(captures().begin(), captures().end(), from) == captures().end()) {
    // The capture in which the event was recorded has ended: no work can be made to depend on its nodes any more.
    return state.capture == nullptr ? CUDA_ERROR_CAPTURED_EVENT : CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (state.capture == nullptr) {
    if (stream->kind() == Stream::Kind::legacy) return invalidate_capture(*from, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    state.capture = from;
    from->streams_.push_back(stream);
    stream->capturing.store(true, std::memory_order_release);
  }
  add_sorted(state.last, nodes);
  return CUDA_SUCCESS;
}

CUresult captured_place(Stream& stream, std::shared_ptr<Capture>* capture, std::vector<std::size_t>* nodes) {
  std::lock_guard lock(captures_mutex());
  *capture = stream.capture_state.capture;
  *nodes = stream.capture_state.last;
  return *capture != nullptr && (*capture)->invalidated_ ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

void invalidate_capture(const std::shared_ptr<Capture>& capture) {
  std::lock_guard lock(captures_mutex());
  capture->invalidate();
}

CUresult forbid_capture(Stream& stream) {
  if (!stream.capturing.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  std::lock_guard lock(captures_mutex());
  const auto& capture = stream.capture_state.capture;
  return capture == nullptr ? CUDA_SUCCESS : invalidate_capture(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

namespace {

// Invalidates the captures for which `matters` is true. Returns `error` if there is one, else CUDA_SUCCESS.
template <class Matters>
CUresult invalidate_matching(CUresult error, Matters matters) {
  std::lock_guard lock(captures_mutex());
  CUresult result = CUDA_SUCCESS;
  for (const auto& capture : captures()) {
    if (!matters(*capture)) continue;
    capture->invalidate();
    result = error;
  }
  return result;
}

}  // namespace

CUresult forbid_captures(int device) {
  if (captures_in_progress.load(std::memory_order_acquire) == 0) return CUDA_SUCCESS;
  return invalidate_matching(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                     [device](Capture& capture) {
                       return capture.holds([device](Stream& s) { return s.device() == device; });
                     });
}

CUresult forbid_legacy(Stream& stream) {
  if (captures_in_progress.load(std::memory_order_acquire) == 0 || stream.kind() != Stream::Kind::legacy)
    return CUDA_SUCCESS;
  return invalidate_matching(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, [&stream](Capture& capture) {
    return capture.holds(
        [&stream](Stream& s) { return s.device() == stream.device() && s.kind() == Stream::Kind::blocking; });
  });
}

CUresult unsafe_while_capturing() {
  if (captures_in_progress.load(std::memory_order_acquire) == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_SUCCESS;
  return invalidate_matching(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [](Capture& capture) {
    if (capture.mode() == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (capture.begun_here()) return true;
    return capture.mode() == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
  });
}

CUstreamCaptureMode exchange_thread_mode(CUstreamCaptureMode mode) { return std::exchange(thread_mode, mode); }

CUresult capture_status(Stream& stream, CUstreamCaptureStatus* status) {
  std::lock_guard lock(captures_mutex());
  const auto& capture = stream.capture_state.capture;
  if (capture == nullptr) *status = CU_STREAM_CAPTURE_STATUS_NONE;
  else *status = capture->invalidated() ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

// A node continues the lane of its first predecessor that has no successor in its lane yet; otherwise it starts a
// lane. So nodes that may have to run at the same time, such as the ranks of a collective, are never in one lane.
GraphExec::GraphExec(std::shared_ptr<const Graph> graph) : graph_(std::move(graph)) {
  const auto& nodes = graph_->nodes;
  std::vector<bool> continued(nodes.size(), false);
  lanes_.push_back(nullptr);
  bool main_lane_taken = false;
  for (const Node& node : nodes) {
    Place place = {0, false};
    const auto free = std::find_if(node.after.begin(), node.after.end(), [&](std::size_t i) { return !continued[i]; });
    if (free != node.after.end()) {
      place.lane = places_[*free].lane;
      continued[*free] = true;
    } else if (!std::exchange(main_lane_taken, true)) {
      place = {0, true};
    } else {
      place = {lanes_.size(), true};
      lanes_.push_back(make_private_stream(node.device));
    }
    places_.push_back(place);
  }
}

GraphExec::~GraphExec() {
  for (std::size_t i = 1; i < lanes_.size(); i++) lanes_[i]->close();
}

void GraphExec::launch(Stream& stream) {
  std::lock_guard lock(mutex_);
  const auto& nodes = graph_->nodes;
  std::vector<Point> done(nodes.size());
  stream.enqueue([previous = previous_] { previous.wait(); });
  const Point begin = stream.last();
  for (std::size_t i = 0; i < nodes.size(); i++) {
    Stream& lane = places_[i].lane == 0 ? stream : *lanes_[places_[i].lane];
    std::vector<Point> before;
    if (places_[i].first && &lane != &stream) before.push_back(begin);
    for (const std::size_t node : nodes[i].after) {
      if (places_[node].lane != places_[i].lane) before.push_back(done[node]);
    }
    if (!before.empty()) {
      lane.enqueue([before = std::move(before)] {
        for (const Point& point : before) point.wait();
      });
    }
    done[i].number = lane.enqueue(nodes[i].recipe());
    done[i].stream = lane.shared_from_this();
  }
  if (lanes_.size() > 1) {
    stream.enqueue([done] {
      for (const Point& point : done) point.wait();
    });
  }
  previous_ = stream.last();
}

}  // namespace ncclpy::host
