// Python from torch's C++: the GIL while the process may be ending, calls of methods, objects that C++ holds.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cxxabi.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace {

// At the end of the process Python ends a thread that asks for the GIL, by unwinding its stack. Neither objects here
// nor torch's frames allow that: the process would be aborted. So such a thread stays where it is, without the GIL.
std::atomic<bool> has_ended{false};
std::thread::id ender;  // the thread that ends the process, which does not stay
constexpr auto kExitPatience = std::chrono::seconds(2);

[[noreturn]] void stay() {
  for (;;) pause();
}

// Without the GIL: keeps the calling thread here while the process ends. If Python has not ended after kExitPatience,
// the thread continues, as other threads may wait for it.
void stay_at_the_end() {
  if (!has_ended || std::this_thread::get_id() == ender || PyGILState_Check()) return;
  const auto until = std::chrono::steady_clock::now() + kExitPatience;
  while (std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (!Py_IsInitialized()) stay();
}

// Holds the GIL.
class Gil {
 public:
  Gil() {
    stay_at_the_end();
    try {
      held_.emplace();
    } catch (const abi::__forced_unwind&) {
      stay();
    }
  }
  ~Gil() {
    held_.reset();
    stay_at_the_end();
  }

 private:
  std::optional<py::gil_scoped_acquire> held_;
};

// Calls without the GIL.
template <class Callable>
void without_gil(const Callable& callable) {
  PyThreadState* const state = PyEval_SaveThread();
  std::exception_ptr raised;
  try {
    callable();
  } catch (const abi::__forced_unwind&) {
    stay();
  } catch (...) {
    raised = std::current_exception();
  }
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {
    stay();
  }
  if (raised) std::rethrow_exception(raised);
}

// Calls Python, where a thread may be ended; the thread then stays here, with no C++ object between the call and this
// function.
PyObject* call_raw(PyObject* name, PyObject* const* arguments, size_t count) {
  try {
    return PyObject_VectorcallMethod(name, arguments, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  } catch (const abi::__forced_unwind&) {
    stay();
  }
}

// Interned, as Python caches where a class has an attribute only for interned names.
PyObject* interned(const char* name) {
  PyObject* const found = PyUnicode_InternFromString(name);
  if (!found) throw py::error_already_set();
  return found;
}

PyObject* self_of(const py::object& object) { return object.ptr(); }

// Calls a method by its interned name; null if it has raised.
template <class... Arguments>
py::object call_known(PyObject* name, PyObject* object, Arguments*... arguments) {
  PyObject* raw[] = {nullptr, object, arguments...};  // Python may overwrite the first item during the call
  return py::reinterpret_steal<py::object>(call_raw(name, raw + 1, sizeof...(arguments) + 1));
}

template <class Object, class... Arguments>
py::object call(const Object& object, const char* name, Arguments&&... arguments) {
  const auto method = py::reinterpret_steal<py::object>(interned(name));
  const std::array<py::object, sizeof...(arguments)> given = {
      py::reinterpret_steal<py::object>(py::detail::make_caster<Arguments>::cast(
          std::forward<Arguments>(arguments), py::return_value_policy::automatic_reference, nullptr))...};
  for (const py::object& each : given) {
    if (!each) throw py::error_already_set();
  }
  py::object result = std::apply(
      [&](const auto&... each) { return call_known(method.ptr(), self_of(object), each.ptr()...); }, given);
  if (!result) throw py::error_already_set();
  return result;
}

// Whether the Python function that is running has this name.
bool is_called_by(const char* name) {
  PyFrameObject* const frame = PyEval_GetFrame();
  if (!frame) return false;
  const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  return code.attr("co_name").cast<std::string>() == name;
}

// A Python object that is released with the GIL. It is never released once Python has ended, or while the process ends
// in a thread without the GIL, except in the thread that ends the process.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (!Py_IsInitialized() || (has_ended && std::this_thread::get_id() != ender && !PyGILState_Check())) {
      object_.release();
      return;
    }
    const Gil gil;
    object_ = py::object();
  }

  py::object attr(const char* name) const { return object_.attr(name); }
  const py::object& get() const { return object_; }

 private:
  py::object object_;
};

PyObject* self_of(const Held& held) { return held.get().ptr(); }

}  // namespace
