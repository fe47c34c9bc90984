// A backend of torch.distributed that forwards its operations to methods of a Python object, and works that do the
// same: for releases of torch with a Backend that Python cannot derive from. It is built against the installed torch
// when it is first needed. Backends and works hold their Python objects, which are not freed before them. Torch calls
// them with or without the GIL. An operation that needs nothing of the Python layer (one dense tensor that the engine
// reaches, no block, no timeout of its own) is begun on the process group directly: most calls are of this kind, and
// through the Python layer they would take twice as long.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <array>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "heartbeat.hpp"
#include "python.hpp"
#include "reader.hpp"

#define TORCH_IS_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
// A method that torch 2.6, the oldest release, may lack is not marked `override`: where torch has a virtual method of
// the same signature, it is overridden without the mark too.

namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Started = c10::intrusive_ptr<c10d::Work>;
using Future = c10::ivalue::Future;
using c10d::kUnsetTimeout;

double seconds(std::chrono::milliseconds timeout) { return timeout.count() * 1e-3; }

// What Python gets for an argument: for a timeout its seconds, or None if the caller has given none.
py::object given(std::chrono::milliseconds timeout) {
  return timeout < std::chrono::milliseconds(0) ? py::object(py::none()) : py::float_(seconds(timeout));
}

// For an operator its number, and for a pre-multiplied sum the number and the factor: an object of torch's enum would
// take microseconds to make.
py::object given(const c10d::ReduceOp& op) {
  const int which = static_cast<int>(static_cast<c10d::ReduceOp::RedOpType>(op));
  if (which != c10d::ReduceOp::PREMUL_SUM) return py::int_(which);
  return py::make_tuple(which, py::cast(op).attr("__getstate__")()[py::int_(1)]);
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const Tensors& each : lists) all.insert(all.end(), each.begin(), each.end());
  return all;
}

template <class T>
const T& given(const T& other) {
  return other;
}

// A range of torch's profiler, which ends once.
class Range {
 public:
  explicit Range(std::function<void()> end) : end_(std::move(end)) {}
  void end() { std::call_once(once_, end_); }

 private:
  std::function<void()> end_;
  std::once_flag once_;
};

// Names of methods of a process group, as strings that are never freed.
struct Methods {
  PyObject* const broadcast = interned("broadcast");
  PyObject* const all_reduce = interned("all_reduce");
  PyObject* const reduce = interned("reduce");
  PyObject* const all_gather = interned("all_gather");
  PyObject* const reduce_scatter = interned("reduce_scatter");
  PyObject* const send = interned("send");
  PyObject* const recv = interned("recv");
};

// The Python layer of a backend, a `TorchBackend`, and the process group below it.
class Layer {
 public:
  explicit Layer(py::object backend) : python(std::move(backend)) {}

  const Methods methods;

  // With the GIL. Whether operations may be begun on the group directly: it is made, no block is open, and the timeout
  // was not changed.
  bool is_open() {
    if (!direct_) {
      py::object found = call(python, "direct");
      if (found.is_none()) return false;
      if (!direct_) direct_.emplace(std::move(found));  // unless another thread has done so during the call
    }
    static PyObject* const timeout = interned("changed_timeout");
    const auto changed = py::reinterpret_steal<py::object>(PyObject_GetAttr(python.get().ptr(), timeout));
    if (!changed) throw py::error_already_set();
    return changed.is_none() && PyDict_Size(at(1)) == 0;
  }

  // Items of `TorchBackend.direct`, borrowed; valid once is_open() has returned true.
  PyObject* group() const { return at(0); }
  PyObject* operator_of(c10d::ReduceOp::RedOpType which) const { return PyTuple_GetItem(at(2), which); }
  PyObject* stream_of() const { return at(3); }  // None on CPUs
  PyObject* own_error() const { return at(4); }

  const Held python;

 private:
  PyObject* at(Py_ssize_t i) const { return PyTuple_GET_ITEM(direct_->get().ptr(), i); }

  std::optional<Held> direct_;
};

// Called with the GIL and an error of Python set: throws the error. `TorchBackend.fail` turns an error of ncclpy into
// torch's DistBackendError.
[[noreturn]] void raise_as_torch_error(const Layer& layer) {
  py::error_already_set error;
  if (error.matches(layer.own_error())) call(layer.python, "fail", error.value());
  throw error;
}

class ForwardedWork : public c10d::Work {
 public:
  // If torch's profiler runs, its range begins here, before the operation.
  ForwardedWork(int rank, c10d::OpType type, const char* title, const std::optional<Tensors>& inputs)
      : Work(rank, type, title, inputs) {}

  // With the GIL: an operation that the group itself has begun.
  ForwardedWork(int rank, c10d::OpType type, std::shared_ptr<Layer> layer, py::object begun, Tensors outputs, int source)
      : Work(rank, type), layer_(std::move(layer)), begun_(std::in_place, std::move(begun)), outputs_(std::move(outputs)),
        source_(source) {
    static PyObject* const seq = interned("seq");
    const auto number = py::reinterpret_steal<py::object>(PyObject_GetAttr(layer_->group(), seq));
    if (!number) throw py::error_already_set();
    sequence_ = number.cast<uint64_t>();
  }

  // With the GIL, before another thread has this work: sets what was begun.
  void begin(py::object work) {
    python_ = std::make_unique<Held>(std::move(work));
    if (!recordFunctionEndCallback_) return;
    range_ = std::make_shared<Range>(std::move(recordFunctionEndCallback_));
    if (py::len(call(python(), "future_devices")) != 0) {
      range_->end();  // on a GPU the range is that of the call: a wait for the end would be part of a capture
      return;
    }
    call(python(), "when_done", py::cpp_function([range = range_](const py::object&, const py::object&) { range->end(); }));
  }

  bool wait(std::chrono::milliseconds timeout) override {
    {
      const Gil gil;
      if (timeout != kNoTimeout || !waits_at_once()) call(python(), "wait", seconds(timeout));
    }
    if (range_) range_->end();  // the profiler may be asked before the other thread has ended the range
    return true;
  }
  bool isCompleted() override { return ask<bool>("is_completed"); }
  bool isSuccess() const override { return ask<bool>("is_success"); }
  void synchronize() override {
    const Gil gil;
    if (!waits_at_once()) call(python(), "synchronize");
  }
  void abort() override {
    const Gil gil;
    call(python(), "abort");
  }
  void blockCurrentStream() { synchronize(); }
  Tensors result() override { return ask<Tensors>("result"); }
  float getDuration() const override { return ask<float>("duration"); }
  uint64_t getSequencenumber() const override { return begun_ ? sequence_ : ask<uint64_t>("sequence_number"); }
  int sourceRank() const override { return begun_ ? source_ : ask<int>("source_rank"); }

  std::exception_ptr exception() const override {
    const Gil gil;
    const py::object text = call(python(), "failure");
    if (text.is_none()) return nullptr;
    return failure(text.cast<std::string>());
  }

  // Python calls `tell` at the end, with the tensors or with the text of an error: C++ would take an exception that
  // Python sets in a future for a value like any other.
  c10::intrusive_ptr<Future> getFuture() override {
    std::vector<c10::Device> devices;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      if (future_) return future_;
    }
    const Gil gil;
    for (const py::handle each : call(python(), "future_devices")) devices.push_back(each.cast<c10::Device>());
    auto made = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
    {
      const std::lock_guard<std::mutex> hold(mutex_);  // not held while waiting for the GIL
      if (future_) return future_;
      future_ = made;
    }
    const auto fail = [made](const std::exception_ptr& raised) { without_gil([&] { made->setErrorIfNeeded(raised); }); };
    const auto tell = [made, fail](const py::object& tensors, const py::object& error) {
      try {  // whatever happens, the future has to end
        if (!error.is_none()) return fail(failure(error.cast<std::string>()));
        const c10::IValue value(tensors.cast<Tensors>());
        without_gil([&] { made->markCompleted(value); });
      } catch (const std::exception& raised) {
        fail(failure(raised.what()));
      }
    };
    try {
      call(python(), "when_done", py::cpp_function(tell));
    } catch (const std::exception& raised) {
      {
        const std::lock_guard<std::mutex> hold(mutex_);
        future_.reset();  // a later call gets the error too, or a future that ends
      }
      fail(failure(raised.what()));
      throw;
    }
    return made;
  }

  // With the GIL: the `TorchWork`, which is made now if it was not needed before.
  const py::object& python() const {
    if (!python_) {
      py::object made = call(layer_->python, "stand_for", begun_->get(), outputs_, source_, sequence_);
      if (!python_) python_ = std::make_unique<Held>(std::move(made));
    }
    return python_->get();
  }

 private:
  // With the GIL: has the current stream wait or, for data in CPU memory, this thread. False if there is a
  // `TorchWork`, which has to do that.
  bool waits_at_once() const {
    static PyObject* const wait = interned("wait");
    static PyObject* const synchronize = interned("synchronize");
    if (python_) return false;
    py::object done;
    if (layer_->stream_of() == Py_None) {
      done = call_known(wait, begun_->get().ptr());
    } else {
      const py::int_ where(outputs_[0].get_device());
      PyObject* given[] = {nullptr, where.ptr()};
      const auto stream = py::reinterpret_steal<py::object>(
          PyObject_Vectorcall(layer_->stream_of(), given + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
      if (stream) done = call_known(synchronize, begun_->get().ptr(), stream.ptr());
    }
    if (!done) raise_as_torch_error(*layer_);  // a signal handler may also have raised the error
    return true;
  }

  // Returns torch's error for a failed operation; torch's futures raise it.
  static std::exception_ptr failure(std::string text) {
    return std::make_exception_ptr(c10::DistBackendError(std::move(text)));
  }

  template <class T>
  T ask(const char* name) const {
    const Gil gil;
    return call(python(), name).template cast<T>();
  }

  mutable std::unique_ptr<Held> python_;
  std::shared_ptr<Layer> layer_;  // from here to `sequence_`: only for what the group itself has begun
  std::optional<Held> begun_;
  Tensors outputs_;
  int source_ = -1;
  uint64_t sequence_ = 0;
  std::shared_ptr<Range> range_;
  std::mutex mutex_;
  c10::intrusive_ptr<Future> future_;
};

#if TORCH_IS_AT_LEAST(2, 8)
// Options that torch copies before it splits a group: Python cannot copy objects of torch's own Options.
struct ForwardedOptions : c10d::Backend::Options {
  explicit ForwardedOptions(std::chrono::milliseconds timeout) : Options("ncclpy", timeout) {}
};
#endif

class ForwardedBackend : public c10d::Backend {
 public:
  ForwardedBackend(int rank, int size, py::object backend)
      : Backend(rank, size), layer_(std::make_shared<Layer>(std::move(backend))), python_(layer_->python) {}

  const std::string getBackendName() const override { return "ncclpy"; }
  bool supportsCoalescing() const { return true; }
  bool supportsSplitting() const override {
    const Gil gil;
    return python_.attr("supports_splitting").cast<bool>();
  }

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (auto work = at_once({c10d::OpType::BROADCAST, only(tensors), options.timeout}, &Methods::broadcast, only(tensors), nullptr, options.rootRank)) return work;
    return begin({c10d::OpType::BROADCAST, "ncclpy:broadcast"}, tensors, "broadcast", tensors, options.rootRank, options.timeout);
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (auto work = at_once({c10d::OpType::ALLREDUCE, only(tensors), options.timeout}, &Methods::all_reduce, only(tensors), nullptr, options.reduceOp)) return work;
    return begin({c10d::OpType::ALLREDUCE, "ncclpy:all_reduce"}, tensors, "allreduce", tensors, options.reduceOp, options.timeout);
  }
  Started allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return begin({c10d::OpType::ALLREDUCE, "ncclpy:all_reduce"}, tensors, "allreduce", tensors, options.reduceOp, options.timeout);
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return begin({c10d::OpType::ALLREDUCE_COALESCED, "ncclpy:all_reduce"}, tensors, "allreduce_coalesced", tensors, options.reduceOp, options.timeout);
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (auto work = at_once({c10d::OpType::REDUCE, only(tensors), options.timeout}, &Methods::reduce, only(tensors), nullptr, options.reduceOp, options.rootRank)) return work;
    return begin({c10d::OpType::REDUCE, "ncclpy:reduce"}, tensors, "reduce", tensors, options.reduceOp, options.rootRank, options.timeout);
  }
  Started allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return begin({c10d::OpType::ALLGATHER, "ncclpy:all_gather"}, inputs, "allgather", outputs, inputs, options.timeout);
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (auto work = at_once({c10d::OpType::_ALLGATHER_BASE, output, options.timeout}, &Methods::all_gather, input, output)) return work;
    return begin({c10d::OpType::_ALLGATHER_BASE, "ncclpy:_all_gather_base"}, Tensors{input}, "all_gather_single", output, input, options.timeout);
  }
  Started allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return begin({c10d::OpType::ALLGATHER_COALESCED, "ncclpy:all_gather"}, inputs, "allgather_coalesced", outputs, inputs, options.timeout);
  }
  Started allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return begin({c10d::OpType::ALLGATHER_COALESCED, "ncclpy:all_gather_into_tensor_coalesced"}, inputs, "all_gather_single_coalesced", outputs, inputs, options.timeout);
  }
  Started gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return begin({c10d::OpType::GATHER, "ncclpy:gather"}, inputs, "gather", outputs, inputs, options.rootRank, options.timeout);
  }
  Started scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    return begin({c10d::OpType::SCATTER, "ncclpy:scatter"}, flat(inputs), "scatter", outputs, inputs, options.rootRank, options.timeout);
  }
  Started reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    return begin({c10d::OpType::REDUCE_SCATTER, "ncclpy:reduce_scatter"}, flat(inputs), "reduce_scatter", outputs, inputs, options.reduceOp, options.timeout);
  }
  Started _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (auto work = at_once({c10d::OpType::_REDUCE_SCATTER_BASE, output, options.timeout}, &Methods::reduce_scatter, input, output, options.reduceOp)) return work;
    return begin({c10d::OpType::_REDUCE_SCATTER_BASE, "ncclpy:_reduce_scatter_base"}, Tensors{input}, "reduce_scatter_single", output, input, options.reduceOp, options.timeout);
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return begin({c10d::OpType::COALESCED, "ncclpy:reduce_scatter_tensor_coalesced"}, inputs, "reduce_scatter_single_coalesced", outputs, inputs, options.reduceOp, options.timeout);
  }
  Started alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    return begin({c10d::OpType::ALLTOALL_BASE, "ncclpy:all_to_all"}, Tensors{input}, "all_to_all_single", output, input, output_splits, input_splits, options.timeout);
  }
  Started alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return begin({c10d::OpType::ALLTOALL, "ncclpy:all_to_all"}, inputs, "alltoall", outputs, inputs, options.timeout);
  }
  Started send(Tensors& tensors, int peer, int tag) override {
    if (auto work = at_once({c10d::OpType::SEND, only(tensors)}, &Methods::send, only(tensors), peer, tag)) return work;
    return begin({c10d::OpType::SEND, "ncclpy:send"}, tensors, "send", tensors, peer, tag);
  }
  Started recv(Tensors& tensors, int peer, int tag) override {
    if (auto work = at_once({c10d::OpType::RECV, only(tensors), kUnsetTimeout, peer}, &Methods::recv, only(tensors), peer, tag)) return work;
    return begin({c10d::OpType::RECV, "ncclpy:recv"}, tensors, "recv", tensors, peer, tag);
  }
  Started recvAnysource(Tensors& tensors, int tag) override { return begin({c10d::OpType::RECVANYSOURCE, "ncclpy:recvAnySource"}, tensors, "recv_anysource", tensors, tag); }
  Started barrier(const c10d::BarrierOptions& options) override {
    {
      const Gil gil;
      prefer_bound();
    }
    if (options.device) {
      prefer(*options.device);
    } else if (!options.device_ids.empty()) {
      prefer(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device_ids[0])));
    }
    return begin({c10d::OpType::BARRIER, "ncclpy:barrier"}, Tensors{}, "barrier", options.timeout);
  }

  void monitoredBarrier(const c10d::BarrierOptions& options, bool all) override {
    tell("monitored_barrier", options.timeout, all);
  }
  void startCoalescing() override { tell("start_coalescing"); }
  Started endCoalescing() override { return begin({c10d::OpType::COALESCED, "ncclpy:coalesced"}, Tensors{}, "end_coalescing"); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    const Gil gil;
    return call(python_, "sequence_number").cast<uint64_t>();
  }
  void setTimeout(std::chrono::milliseconds timeout) { tell("set_timeout", timeout); }
  void eagerConnectSingleDevice(at::Device device) override { tell("connect", device); }
  void waitForPendingWorks() override { tell("wait_for_pending_works"); }
#if TORCH_IS_AT_LEAST(2, 7)
  c10d::ErrorType getError() override {
    const Gil gil;
    return static_cast<c10d::ErrorType>(call(python_, "error_type").cast<int>());
  }
#endif
  void abort() { tell("abort"); }
  void shutdown() { tell("shutdown"); }

#if TORCH_IS_AT_LEAST(2, 8)
  c10::intrusive_ptr<Options> getBackendOptions() override { return options(); }
  c10::intrusive_ptr<ForwardedOptions> options() {
    const Gil gil;
    return c10::make_intrusive<ForwardedOptions>(std::chrono::milliseconds(call(python_, "timeout_ms").cast<int64_t>()));
  }
  // All ranks of this group call it with the ranks of the new group, also ranks outside of the new one; no rank waits.
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    const Gil gil;
    const py::object made = call(python_, "split", store, ranks, options->timeout.count() * 1e-3, options->group_name);
    if (made.is_none()) return nullptr;
    auto part = made.cast<c10::intrusive_ptr<ForwardedBackend>>();
    if (getBoundDeviceId()) part->prefer(*getBoundDeviceId());  // torch binds only its own ProcessGroup
    return part;
  }
#endif

  // With the GIL. As supportsSplitting(), but false if `_get_split_source` asks, by which torch looks for a group that
  // nccl can split: torch would pass this backend to nccl.
  bool supports_splitting_for_caller() const { return !is_called_by("_get_split_source") && supportsSplitting(); }

  py::object python() const { return python_.get(); }

 private:
  struct Kind {
    c10d::OpType type;
    const char* title;  // in torch's profiler
  };

  template <class... Arguments>
  Started begin(Kind kind, const Tensors& inputs, const char* name, const Arguments&... arguments) {
    auto work = c10::make_intrusive<ForwardedWork>(rank_, kind.type, kind.title, inputs);
    const Gil gil;
    prefer_bound();
    work->begin(call(python_, name, given(arguments)...));
    return work;
  }
  template <class... Arguments>
  void tell(const char* name, const Arguments&... arguments) {
    const Gil gil;
    prefer_bound();
    call(python_, name, given(arguments)...);
  }

  // Sets the GPU of a group that is made before a tensor determines it.
  void prefer(const at::Device& device) {
    if (device.is_cpu() || !device.has_index()) return;
    const Gil gil;
    call(python_, "prefer", device);
  }
  // With the GIL. Sets the device that torch has bound the group to; torch does so after it has made the backend.
  void prefer_bound() {
    if (bound_ || !getBoundDeviceId()) return;
    bound_ = true;
    prefer(*getBoundDeviceId());
  }

  struct Plain {
    c10d::OpType type;
    const at::Tensor& output;
    std::chrono::milliseconds timeout = kUnsetTimeout;
    int source = -1;
  };

  // Begins an operation on the group itself; null if the Python layer has to.
  template <class... Arguments>
  Started at_once(const Plain& asked, PyObject* const Methods::* method, const Arguments&... arguments) {
    if (asked.timeout != kUnsetTimeout || at::hasCallbacks() || !(is_plain(arguments) && ...)) {
      return nullptr;
    }
    const Gil gil;
    if (!layer_->is_open() || !(reaches(arguments) && ...)) return nullptr;
    const std::array<py::object, sizeof...(arguments)> given = {plain(arguments)...};
    py::object begun = std::apply(
        [&](const auto&... each) { return call_known(layer_->methods.*method, layer_->group(), each.ptr()...); }, given);
    if (!begun) raise_as_torch_error(*layer_);
    return c10::make_intrusive<ForwardedWork>(rank_, asked.type, layer_, std::move(begun), Tensors{asked.output}, asked.source);
  }

  static const at::Tensor& only(const Tensors& tensors) {
    static const at::Tensor none;
    return tensors.size() == 1 ? tensors[0] : none;
  }

  // Whether an argument can be passed as it is.
  static bool is_plain(const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj();
  }
  static bool is_plain(const c10d::ReduceOp& op) { return static_cast<c10d::ReduceOp::RedOpType>(op) <= c10d::ReduceOp::MAX; }
  static bool is_plain(int64_t) { return true; }
  static bool is_plain(std::nullptr_t) { return true; }

  // Whether the engine reaches the memory of an argument.
  bool reaches(const at::Tensor& tensor) const { return tensor.is_cpu() == (layer_->stream_of() == Py_None); }
  template <class Other>
  bool reaches(const Other&) const {
    return true;
  }

  // Another tensor over the same storage: the operation keeps that memory, whatever memory the caller gives its
  // tensor meanwhile (`x.data = y`, `x.set_(y)`).
  py::object plain(const at::Tensor& tensor) const {
    const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    return py::cast(at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false)));
  }
  py::object plain(const c10d::ReduceOp& op) const { return py::reinterpret_borrow<py::object>(layer_->operator_of(op)); }
  py::object plain(int64_t number) const { return py::int_(number); }
  py::object plain(std::nullptr_t) const { return py::none(); }

  std::shared_ptr<Layer> layer_;
  const Held& python_;
  bool bound_ = false;
};

// Before an operation torch copies tensors with a lazy conjugation or negation: c10d's operations do not declare that
// they write. A backend would receive into the copies. So groups of this backend get the tensors as they are, and the
// backend handles them.
bool is_ours(const torch::jit::Stack& stack, size_t arguments) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::optional<c10::DeviceType> device;
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor() && value.toTensor().defined()) device = value.toTensor().device().type();
    if (value.isTensorList() && value.toTensorList().size() > 0) device = value.toTensorVector()[0].device().type();
    if (value.isObject() && value.type()->str() == "__torch__.torch.classes.c10d.ProcessGroup") {
      group = value.toCustomClass<c10d::ProcessGroup>();
    }
  }
  return group && device && dynamic_cast<ForwardedBackend*>(group->getBackend(*device).get()) != nullptr;
}

template <c10::DispatchKey key>
void pass_lazy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  if (!is_ours(*stack, arguments)) {  // as torch does
    for (size_t i = stack->size() - arguments; i < stack->size(); ++i) {
      c10::IValue& value = (*stack)[i];
      if (value.isTensor() && value.toTensor().defined()) {
        value = value.toTensor().resolve_conj().resolve_neg();
      } else if (value.isTensorList()) {
        Tensors tensors = value.toTensorVector();
        for (at::Tensor& each : tensors) each = each.resolve_conj().resolve_neg();
        value = tensors;
      }
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

template <c10::DispatchKey key>
void pass_all(torch::Library& library) {
  for (const char* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "allgather_", "_allgather_base_",
        "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_", "scatter_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "send", "recv_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&pass_lazy<key>>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(c10d, Conjugate, library) { pass_all<c10::DispatchKey::Conjugate>(library); }
TORCH_LIBRARY_IMPL(c10d, Negative, library) { pass_all<c10::DispatchKey::Negative>(library); }

PYBIND11_MODULE(ncclpy_torch_backend, module) {
  module.def("tensor_reader", &tensor_reader);
  module.def("end_process", [] {
    ender = std::this_thread::get_id();
    has_ended = true;
    // Threads that have just left this code ask for the GIL in torch's frames: this gives them time for that.
    without_gil([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  });
  py::class_<Heartbeat>(module, "Heartbeat")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, std::string, std::string, double, int>())
      .def("close", &Heartbeat::close, py::call_guard<py::gil_scoped_release>());
#if TORCH_IS_AT_LEAST(2, 8)
  py::class_<ForwardedOptions, c10d::Backend::Options, c10::intrusive_ptr<ForwardedOptions>>(module, "ForwardedOptions")
      .def("__deepcopy__", [](const ForwardedOptions& options, const py::dict&) {
        return c10::make_intrusive<ForwardedOptions>(options);
      });
#endif
  py::class_<ForwardedWork, c10d::Work, c10::intrusive_ptr<ForwardedWork>>(module, "ForwardedWork")
      .def_property_readonly("python", &ForwardedWork::python);
  py::class_<ForwardedBackend, c10d::Backend, c10::intrusive_ptr<ForwardedBackend>>(module, "ForwardedBackend")
      .def(py::init<int, int, py::object>())
      // Torch 2.6 calls this on ranks outside of the new group of a split: no rank waits for them, so it does nothing.
      .def("perform_nocolor_split", [](ForwardedBackend&, const c10::Device&) {})
      .def_property_readonly("supports_splitting", &ForwardedBackend::supports_splitting_for_caller)
#if TORCH_IS_AT_LEAST(2, 8)
      .def_property_readonly("options", &ForwardedBackend::options)
#endif
      .def_property_readonly("mem_allocator", [](const ForwardedBackend& backend) { return backend.python().attr("mem_allocator"); })
      .def("register_mem_pool", [](const ForwardedBackend& backend, const py::object& pool, bool symmetric) {
        call(backend.python(), "register_mem_pool", pool, symmetric);
      }, py::arg("pool"), py::arg("symm") = false)
      .def("deregister_mem_pool", [](const ForwardedBackend& backend, const py::object& pool) {
        call(backend.python(), "deregister_mem_pool", pool);
      }, py::arg("pool"))
      .def_property_readonly("python", &ForwardedBackend::python);
}
