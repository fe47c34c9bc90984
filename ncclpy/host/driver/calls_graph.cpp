// Driver calls about capture and graphs.
#include "base/handles.hpp"
#include "exports.hpp"
#include "graph.hpp"

using namespace ncclpy::host;

namespace {

HandleTable<Graph>& graphs() {
  static auto* const table = new HandleTable<Graph>('G');
  return *table;
}

HandleTable<GraphExec>& execs() {
  static auto* const table = new HandleTable<GraphExec>('X');
  return *table;
}

}  // namespace

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return driver_call([&]() -> CUresult {
    if (mode != CU_STREAM_CAPTURE_MODE_GLOBAL && mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL &&
        mode != CU_STREAM_CAPTURE_MODE_RELAXED)
      return CUDA_ERROR_INVALID_VALUE;
    const auto found = stream_of(stream, current_device());
    return found == nullptr ? CUDA_ERROR_INVALID_HANDLE : Capture::begin(found, mode);
  });
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return driver_call([&]() -> CUresult {
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *graph = nullptr;
    const auto found = stream_of(stream, current_device());
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Graph> made;
    const CUresult result = Capture::end(found, &made);
    if (result == CUDA_SUCCESS) *graph = reinterpret_cast<CUgraph>(graphs().add(std::move(made)));
    return result;
  });
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return driver_call([&]() -> CUresult {
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto found = stream_of(stream, current_device());
    if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const CUresult legacy = forbid_legacy(*found);
    return legacy != CUDA_SUCCESS ? legacy : capture_status(*found, status);
  });
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return driver_call([&] {
    if (mode == nullptr || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    *mode = exchange_thread_mode(*mode);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return driver_call([&] {
    if (exec == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto found = graphs().find(reinterpret_cast<std::uint64_t>(graph));
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *exec = reinterpret_cast<CUgraphExec>(execs().add(std::make_shared<GraphExec>(found)));
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return stream_call(stream, [&](Stream& target) -> CUresult {
    const auto found = execs().find(reinterpret_cast<std::uint64_t>(exec));
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    // Child graphs are not supported here; CUDA would add the graph as a node.
    const CUresult captured = forbid_capture(target);
    if (captured != CUDA_SUCCESS) return captured;
    found->launch(target);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
  return driver_call([&] {
    const bool known = execs().remove(reinterpret_cast<std::uint64_t>(exec)) != nullptr;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuGraphDestroy(CUgraph graph) {
  return driver_call([&] {
    const bool known = graphs().remove(reinterpret_cast<std::uint64_t>(graph)) != nullptr;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}
