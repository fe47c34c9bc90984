// The driver calls that this library exports, and what their definitions share.
//
// Every call of NCCLPY_DRIVER_FUNCTIONS is declared here, with C linkage and visible: a definition that differs from
// the list does not compile, and a missing definition does not link (calls_device.cpp refers to all of them).
#pragma once

#include <memory>
#include <new>
#include <system_error>

#include "device.hpp"
#include "driver_abi.h"
#include "graph.hpp"
#include "stream.hpp"

extern "C" {
#define NCCLPY_DECLARE(ret, name, params) __attribute__((visibility("default"))) ret name params;
NCCLPY_DRIVER_FUNCTIONS(NCCLPY_DECLARE)
#undef NCCLPY_DECLARE
}

namespace ncclpy::host {

// Whether cuInit has succeeded. False in a process that was forked after the engine was loaded: see after_fork().
bool initialised();

// Whether the calling thread runs a function of cuLaunchHostFunc, which must not wait for anything.
bool in_host_function();

// Runs the body of a call. A lack of memory or threads becomes an error code.
template <class Body>
CUresult driver_call(Body body) noexcept {
  if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::system_error&) {  // no thread for a stream
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
}

// Adds a step to the stream's queue or, while the stream is captured, to the graph.
template <class Step>
CUresult add_step(Stream& stream, Step step) {
  if (stream.capturing.load(std::memory_order_acquire))
    return capture({stream.shared_from_this()}, stream.device(), [step] { return Task(step); });
  stream.enqueue(std::move(step));
  return CUDA_SUCCESS;
}

// As driver_call, for a body that takes the Stream& of a handle.
template <class Body>
CUresult stream_call(CUstream handle, Body body) noexcept {
  return driver_call([&]() -> CUresult {
    if (is_default_stream(handle) && current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const std::shared_ptr<Stream> stream = stream_of(handle, current_device());
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const CUresult legacy = forbid_legacy(*stream);
    return legacy != CUDA_SUCCESS ? legacy : body(*stream);
  });
}

}  // namespace ncclpy::host
