// Tensors of the device, and the same memory as tensors of the CPU.
//
// Simulated: dense and sparse (COO) tensors. Not simulated: compressed sparse, quantised and nested ones.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/set_native.h>
#include <torch/library.h>

#include "device.h"

namespace sim {
using c10::IntArrayRef;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Flag = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == DEVICE; }

void refuse_pinned(Flag pin) { TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned"); }
at::Tensor empty(IntArrayRef sizes, Dtype dtype, Layout, Device device, Flag pin, Format format) {
  refuse_pinned(pin);
  c10::DeviceGuard guard(c10::device_or_default(device));
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(sizes, &allocator, keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, Dtype dtype, Layout, Device device, Flag pin) {
  refuse_pinned(pin);
  c10::DeviceGuard guard(c10::device_or_default(device));
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, keys, c10::dtype_or_default(dtype));
}

void resize_storage(const at::Storage& storage, size_t bytes) {
  auto* held = storage.unsafeGetStorageImpl();
  if (held->nbytes() == bytes) return;
  c10::DeviceGuard guard(storage.device());
  auto data = allocator.allocate(bytes);
  size_t kept = std::min(bytes, held->nbytes());
  if (kept) allocator.copy_data(data.get(), held->data(), kept);
  held->set_data_ptr_noswap(std::move(data));
  held->set_nbytes(bytes);
}
const at::Tensor& resize_(const at::Tensor& self, IntArrayRef sizes, Format format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  auto contiguous = at::detail::defaultStrides(sizes);
  bool given = strides.size() == sizes.size();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, given ? strides : IntArrayRef(contiguous), offset);
  return self;
}
at::Tensor& set_nothing(at::Tensor& self) { return self.set_(at::empty({0}, self.options())); }
void record_stream(at::Tensor& self, c10::Stream stream) { use_on_stream(self.storage().data_ptr(), stream); }

// Sparse tensors: the tensors inside of one, and one that has these.
at::SparseTensorImpl* sparse(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}
at::Tensor indices_of(const at::Tensor& tensor) { return sparse(tensor)->indices(); }
at::Tensor values_of(const at::Tensor& tensor) { return sparse(tensor)->values(); }
void set_sparse(const at::Tensor& tensor, const at::Tensor& like, at::Tensor indices, at::Tensor values) {
  auto* form = sparse(like);  // like.sparse_dim() would be an operator
  sparse(tensor)->raw_resize_(form->sparse_dim(), form->dense_dim(), form->sizes());
  sparse(tensor)->set_indices_and_values_unsafe(indices, values);
  sparse(tensor)->set_coalesced(form->coalesced());
}
at::Tensor make_sparse(const at::Tensor& like, at::Tensor indices, at::Tensor values) {
  c10::DispatchKeySet keys(on_device(values) ? c10::DispatchKey::SparseCUDA : c10::DispatchKey::SparseCPU);
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(keys, values.dtype());
  set_sparse(made, like, std::move(indices), std::move(values));
  return made;
}

// A new tensor becomes the same part of its storage.
at::Tensor shaped(at::Tensor made, const at::Tensor& like) {
  auto* tensor = made.unsafeGetTensorImpl();
  tensor->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) tensor->set_wrapped_number(true);
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}
// One storage of the CPU for each of the device, so that views of one memory stay that.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (tensor.is_sparse()) return make_sparse(tensor, of(indices_of(tensor)), of(values_of(tensor)));
    TORCH_CHECK(tensor.layout() == c10::kStrided, "simulated device: no tensors of the layout ", tensor.layout());
    auto& alias = storages[tensor.storage().unsafeGetStorageImpl()];
    if (!alias) {
      size_t bytes = tensor.storage().nbytes();
      c10::DataPtr data(bytes ? memory_behind(tensor.storage().data()) : nullptr, c10::Device(c10::kCPU));
      alias = c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false);
    }
    c10::DispatchKeySet keys(c10::DispatchKey::CPU);
    return shaped(at::detail::make_tensor<c10::TensorImpl>(c10::Storage(alias), keys, tensor.dtype()), tensor);
  }

 private:
  std::map<c10::StorageImpl*, c10::Storage> storages;
};
at::Tensor on_host(const at::Tensor& tensor) { return on_device(tensor) ? Aliases().of(tensor) : tensor; }
at::Tensor copy_to_device(const at::Tensor& host, int device) {  // what a kernel has made; dense
  auto made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, c10::Device(DEVICE, device), {});
  if (host.numel()) on_host(made).copy_(host);
  if (host.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_", TORCH_FN(set_nothing));
  library.impl("record_stream", TORCH_FN(record_stream));
}
}  // namespace sim
