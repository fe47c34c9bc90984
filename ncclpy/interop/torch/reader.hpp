// Reads a plain tensor from torch's own fields: DLPack's exchange would make another tensor and call Python.
// A tensor is plain if it has only the dispatch keys of dense memory on a CPU or a GPU, of autograd and of autocast.
// The caller has to read all others: lazy negations and conjugations, zeros without memory, sparse, quantized, nested
// and named tensors, the wrappers of torch.func and __torch_dispatch__, and what later releases of torch add.
#pragma once

#include <ATen/DLConvertor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>

#include "../../abi/tensor_reader.h"

namespace {

constexpr c10::DispatchKeySet kPlain =
    c10::DispatchKeySet(c10::BackendComponent::CPUBit) | c10::DispatchKeySet(c10::BackendComponent::CUDABit) |
    c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradFunctionality,
                         c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});

// DLPack's type for a type of torch, as torch gives it for the first tensor of that type. kNone are types for which
// torch throws, types with several lanes, and types of less than a byte, which torch reports as if they had 8 bits.
struct DLPackType {
  enum : uint8_t { kUnknown, kKnown, kNone } state = kUnknown;
  uint8_t code = 0;
  uint8_t bits = 0;
};

// Called with the GIL, which guards `known`.
const DLPackType& type_of(const at::Tensor& tensor) {
  static std::array<DLPackType, static_cast<size_t>(c10::ScalarType::NumOptions)> known;
  DLPackType& type = known.at(static_cast<size_t>(tensor.scalar_type()));
  if (C10_UNLIKELY(type.state == DLPackType::kUnknown)) {
    type.state = DLPackType::kNone;
    const DLDataType told = at::getDLDataType(tensor);
    type.code = static_cast<uint8_t>(told.code);
    type.bits = told.bits;
    if (told.lanes == 1 && at::toScalarType(told) == tensor.scalar_type()) type.state = DLPackType::kKnown;
  }
  return type;
}

// An `ncclpy_tensor_reader`, for objects of the types torch.Tensor and torch.nn.Parameter.
int read_tensor(void* object, ncclpy_read_tensor* out) noexcept {
  try {
    const at::Tensor& tensor = THPVariable_Unpack(static_cast<PyObject*>(object));
    if (!tensor.defined() || !kPlain.isSupersetOf(tensor.key_set())) return 1;
    if (!tensor.has_storage() || !tensor.is_contiguous()) return 1;
    const at::Device device = tensor.device();
    if (!device.is_cpu() && !device.is_cuda()) return 1;
    const DLPackType& type = type_of(tensor);
    if (type.state != DLPackType::kKnown) return 1;
    out->count = static_cast<uint64_t>(tensor.numel());
    // As for DLPack's export: copy-on-write memory is copied now.
    out->data = tensor.mutable_data_ptr();
    if (!out->data && out->count) return 1;
    out->device = device.is_cpu() ? NCCLPY_ON_CPU : device.index();
    out->code = type.code;
    out->bits = type.bits;
    return 0;
  } catch (...) {
    PyErr_Clear();  // the caller reads the object in another way, which reports the error
    return 1;
  }
}

py::object tensor_reader() {
  PyObject* const capsule = PyCapsule_New(reinterpret_cast<void*>(&read_tensor), NCCLPY_TENSOR_READER_NAME, nullptr);
  if (!capsule) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace
