// Graphs: the work that is queued on streams while they are captured, to be launched any number of times.
//
// A node has a recipe, which each launch of the graph calls to make the task that runs. The task of a communicator's
// operation differs from launch to launch; that of a copy is always the same. Nodes are stored in the order of their
// capture, so the predecessors of a node come before it.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.hpp"
#include "driver_abi.h"
#include "stream.hpp"
#include "task.hpp"

namespace ncclpy::host {

using Recipe = std::function<Task()>;

struct Node {
  Recipe recipe;
  int device;
  std::vector<std::size_t> after;  // nodes that must have run
};

struct Graph {
  std::vector<Node> nodes;
};

// A capture in progress: its origin, the stream on which it began, and the streams that joined it through events.
class Capture {
 public:
  // Begins a capture with `stream` as the origin. The functions after this class enforce CUDA's rules for other calls
  // during a capture.
  static CUresult begin(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode);
  static CUresult end(const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>* graph);
  // Called when a stream is destroyed: ends the capture, if any, that began on the stream.
  static void give_up(const std::shared_ptr<Stream>& stream);

  CUstreamCaptureMode mode() const { return mode_; }
  bool begun_here() const { return thread_ == std::this_thread::get_id(); }
  // Whether any stream of the capture satisfies `such`.
  template <class Such>
  bool holds(Such such) const {
    for (const auto& member : streams_) {
      const auto stream = member.lock();
      if (stream != nullptr && such(*stream)) return true;
    }
    return false;
  }
  bool invalidated() const { return invalidated_; }
  void invalidate() { invalidated_ = true; }

 private:
  friend CUresult capture(const std::vector<std::shared_ptr<Stream>>& streams, int device, Recipe recipe);
  friend CUresult capture_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Capture>& capture,
                               const std::vector<std::size_t>& nodes);
  friend CUresult captured_place(Stream& stream, std::shared_ptr<Capture>* capture, std::vector<std::size_t>* nodes);
  void leave();
  bool joined(const std::vector<std::size_t>& last) const;

  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread_;
  std::weak_ptr<Stream> origin_;
  std::vector<std::weak_ptr<Stream>> streams_;
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
  bool invalidated_ = false;
};

// Adds a node after the last nodes of these streams, which must be in one capture, and makes it the last node of each
// stream.
CUresult capture(const std::vector<std::shared_ptr<Stream>>& streams, int device, Recipe recipe);
// Makes the stream's next node depend on `nodes`; the stream joins their capture if it is in none. `capture` is null
// for an event that was recorded outside captures: if the stream is in a capture, this invalidates the capture and
// returns an error.
CUresult capture_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Capture>& capture,
                      const std::vector<std::size_t>& nodes);
// Returns what an event that is recorded on a capturing stream refers to: the stream's capture and last nodes.
CUresult captured_place(Stream& stream, std::shared_ptr<Capture>* capture, std::vector<std::size_t>* nodes);

// Invalidates a capture, which may have ended already.
void invalidate_capture(const std::shared_ptr<Capture>& capture);
// The next four functions check whether a call is permitted now: they return CUDA_SUCCESS or the error for the call.
//
// For a call that is not permitted on a capturing stream: invalidates the capture.
CUresult forbid_capture(Stream& stream);
// For a call that would wait for capturing streams of a device: invalidates their captures.
CUresult forbid_captures(int device);
// For a call that CUDA considers unsafe during a capture: invalidates the captures that forbid the call, which depends
// on their modes and on the calling thread's.
CUresult unsafe_while_capturing();
// For a use of the legacy stream, which would depend on capturing blocking streams: invalidates their captures.
CUresult forbid_legacy(Stream& stream);
CUstreamCaptureMode exchange_thread_mode(CUstreamCaptureMode mode);
CUresult capture_status(Stream& stream, CUstreamCaptureStatus* status);

// The number of captures in progress: while it is 0, the checks above cost one load.
extern std::atomic<int> captures_in_progress;

// A graph that can be launched. Its branches run on the graph's own streams, beside the stream of the launch.
class GraphExec {
 public:
  explicit GraphExec(std::shared_ptr<const Graph> graph);
  ~GraphExec();
  // Puts one run of the graph on the stream.
  void launch(Stream& stream);

 private:
  struct Place {
    std::size_t lane;
    bool first;  // the first node of its lane
  };

  const std::shared_ptr<const Graph> graph_;
  std::vector<Place> places_;                   // of each node
  std::vector<std::shared_ptr<Stream>> lanes_;  // lane 0 is the stream of the launch
  Mutex<NCCLPY_LOCK_GRAPH> mutex_;              // one launch at a time
  Point previous_;                              // the end of the last launch: launches of one graph do not overlap
};

}  // namespace ncclpy::host
