// The operators that cannot be the host's: they make tensors, copy between devices, or swap storages.
#pragma once

#include <ATen/EmptyTensor.h>

#include "operators.hpp"

namespace simulated {

using c10::IntArrayRef;
using c10::Storage;

inline int check_empty(std::optional<at::Layout> layout, std::optional<c10::Device> device) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided,
      "simulated GPUs have strided tensors only");
  return index_of(c10::device_or_default(device));
}

inline Tensor empty_memory_format(IntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<c10::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(c10::Device(CUDA, check_empty(layout, device)));
  auto key = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &allocator, key, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride,
    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard on(c10::Device(CUDA, check_empty(layout, device)));
  auto key = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &allocator, key, type);
}

inline Tensor borrowed_by_host(const Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  void* address = const_cast<void*>(tensor.storage().data());
  c10::DataPtr borrowed(address, c10::Device(c10::kCPU));
  Storage storage(Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(borrowed),
      nullptr, false);
  auto host = host_tensor(std::move(storage), tensor);
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

// As PyTorch: between two devices on the current stream of the source, which waits for that of the
// target and is waited for by it. For a copy from or to the host, the host waits, unless that is
// non-blocking.
inline Tensor& copy_(Tensor& target, const Tensor& source, bool non_blocking) {
  if (target.is_same(source) || target.numel() == 0) return target;
  borrowed_by_host(target).copy_(borrowed_by_host(source));
  std::lock_guard<std::mutex> lock(simulation().mutex);
  auto& streams = simulation().streams;
  auto stream_of = [](const Tensor& tensor) { return index_of(current_stream(tensor.get_device())); };
  int copies = stream_of(source.is_cuda() ? source : target);
  int arrives = target.is_cuda() ? stream_of(target) : copies;
  if (copies != arrives) {
    streams.tick(arrives);
    streams.wait(copies, streams.clock(arrives));
  }
  streams.tick(copies);
  if (source.is_cuda()) note(source, copies, false, "aten::copy_");
  if (target.is_cuda()) note(target, copies, true, "aten::copy_");
  if (copies != arrives) streams.wait(arrives, streams.clock(copies));
  bool with_host = !source.is_cuda() || !target.is_cuda();
  if (with_host && !non_blocking) streams.host_waits_for_stream(copies);
  return target;
}

inline void record_stream(Tensor& tensor, c10::Stream stream) {
  Allocator::record(tensor.storage().data(), stream);
}

inline Tensor& set_storage(
    Tensor& tensor, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}
inline Tensor& set_whole_storage(Tensor& tensor, Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes()) / tensor.element_size();
  return set_storage(tensor, std::move(storage), 0, {count}, {1});
}
inline Tensor& set_as(Tensor& tensor, const Tensor& other) {
  return set_storage(
      tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

}  // namespace simulated
