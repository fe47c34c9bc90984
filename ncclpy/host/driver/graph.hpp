// Graphs: what streams are told while they are captured, to be run again and again.
//
// A node is a recipe: at each launch it makes the task that runs. An operation of a communicator must know at which
// launch it runs; a copy gives the same task every time. Nodes stand in the order in which they were captured, so that
// the nodes a node depends on stand before it.
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

// A capture in progress: the origin, where it began, and the streams that events have drawn into it.
class Capture {
 public:
  // Begins; `stream` is the origin. CUDA's rules are in calls_graph.cpp.
  static CUresult begin(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode);
  static CUresult end(const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>* graph);
  // The stream is destroyed: a capture that began on it is given up.
  static void give_up(const std::shared_ptr<Stream>& stream);

  CUstreamCaptureMode mode() const { return mode_; }
  bool begun_here() const { return thread_ == std::this_thread::get_id(); }
  // Whether a stream of the capture is such a one.
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

// Adds a node behind what these streams, all of one capture, have been told; each of them goes on behind it.
CUresult capture(const std::vector<std::shared_ptr<Stream>>& streams, int device, Recipe recipe);
// The stream goes on behind these nodes, and is drawn into their capture if it is in none.
CUresult capture_wait(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Capture>& capture,
                      const std::vector<std::size_t>& nodes);
// Where a capturing stream stands, for an event.
CUresult captured_place(Stream& stream, std::shared_ptr<Capture>* capture, std::vector<std::size_t>* nodes);

// Spoils a capture, if it is still in progress.
void invalidate_capture(const std::shared_ptr<Capture>& capture);
// A call that may not be made on a capturing stream: spoils the capture.
CUresult forbid_capture(Stream& stream);
// As above for whatever captures on a device (a negative one: anywhere) would be waited for.
CUresult forbid_captures(int device);
// A call that CUDA holds to be unsafe while something is captured, unless the thread's mode allows it.
CUresult unsafe_while_capturing();
// A use of the legacy stream, which would depend on blocking streams that are captured.
CUresult forbid_legacy(Stream& stream);
CUstreamCaptureMode exchange_thread_mode(CUstreamCaptureMode mode);
CUresult capture_status(Stream& stream, CUstreamCaptureStatus* status);

// Whether anything is captured at all: what all those checks cost when nothing is.
extern std::atomic<int> captures_in_progress;

// A graph that can be launched. Its branches run on streams of its own, beside the one that it is launched on.
class GraphExec {
 public:
  explicit GraphExec(std::shared_ptr<const Graph> graph);
  ~GraphExec();
  void launch(Stream& stream);

 private:
  struct Place {
    std::size_t lane;
    bool first;  // of its lane
  };

  const std::shared_ptr<const Graph> graph_;
  std::vector<Place> places_;                    // of each node
  std::vector<std::shared_ptr<Stream>> lanes_;   // lane 0 is the stream of the launch
  Mutex<NCCLPY_LOCK_GRAPH> mutex_;               // one launch at a time
  Point previous_;                               // the end of the last launch: launches of one graph follow each other
};

}  // namespace ncclpy::host
