// Tensors of the device, and the same memory as tensors of the CPU: see tensor.h.
#include "tensor.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"
#include "memory.h"

namespace sim {
namespace {
constexpr auto DENSE = c10::DispatchKey::CUDA;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Format = std::optional<at::MemoryFormat>;

at::SparseTensorImpl* sparse(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::Tensor empty(c10::IntArrayRef sizes, Dtype dtype, Layout, Device device, std::optional<bool> pin, Format format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  c10::DispatchKeySet keys(DENSE);
  return at::detail::empty_generic(sizes, device_allocator(), keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_with_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides, Dtype dtype, Layout, Device device,
                              std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return empty_strided(sizes, strides, c10::dtype_or_default(dtype), c10::device_or_default(device).index());
}
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, Format format) {
  resize_tensor(self, sizes);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  bool given = strides.size() == sizes.size();
  auto contiguous = at::detail::defaultStrides(sizes);
  tensor->set_sizes_and_strides(sizes, given ? strides : c10::IntArrayRef(contiguous), offset);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {size}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  auto* allocator = device_allocator();
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator->allocate(0), allocator, true);
  return set_storage(self, none, 0, {0}, {1});
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  use_on_stream(self.storage().data(), stream_number(stream.device_index(), stream.id()));
}
}  // namespace

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == DEVICE; }

at::Tensor Aliases::of(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return make_sparse(tensor, of(indices_of(tensor)), of(values_of(tensor)));
  TORCH_CHECK(tensor.layout() == c10::kStrided, "simulated device: no tensors of the layout ", tensor.layout());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto known = storages.find(storage);
  if (known == storages.end()) {
    void* memory = storage->nbytes() ? memory_behind(storage->data()) : nullptr;
    c10::DataPtr data(memory, c10::Device(c10::kCPU));
    c10::Storage alias(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), nullptr, false);
    known = storages.emplace(storage, std::move(alias)).first;
  }
  c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(known->second), keys, tensor.dtype());
  auto* made = alias.unsafeGetTensorImpl();
  made->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}
at::Tensor on_host(const at::Tensor& tensor) { return Aliases().of(tensor); }

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, int device) {
  c10::DeviceGuard guard(c10::Device(DEVICE, device));
  c10::DispatchKeySet keys(DENSE);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), keys, dtype);
}
at::Tensor copy_to_device(const at::Tensor& host, int device) {
  auto made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), device);
  if (host.numel()) on_host(made).copy_(host);
  if (host.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
void resize_storage(const at::Storage& storage, size_t bytes) {
  auto* held = storage.unsafeGetStorageImpl();
  if (held->nbytes() == bytes) return;
  c10::DeviceGuard guard(storage.device());
  auto data = device_allocator()->allocate(bytes);
  size_t kept = std::min(bytes, held->nbytes());
  if (kept) memcpy(memory_behind(data.get()), memory_behind(held->data()), kept);
  held->set_data_ptr_noswap(std::move(data));
  held->set_nbytes(bytes);
}
void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  size_t needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  if (tensor.numel() && needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
}

at::Tensor make_sparse(const at::Tensor& like, at::Tensor indices, at::Tensor values) {
  c10::DispatchKeySet keys(on_device(values) ? c10::DispatchKey::SparseCUDA : c10::DispatchKey::SparseCPU);
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(keys, values.dtype());
  set_sparse(made, like, std::move(indices), std::move(values));
  return made;
}
void set_sparse(const at::Tensor& tensor, const at::Tensor& like, at::Tensor indices, at::Tensor values) {
  auto* form = sparse(like);  // like.sparse_dim() would be an operator
  sparse(tensor)->raw_resize_(form->sparse_dim(), form->dense_dim(), form->sizes());
  sparse(tensor)->set_indices_and_values_unsafe(indices, values);
  sparse(tensor)->set_coalesced(form->coalesced());
}
at::Tensor indices_of(const at::Tensor& tensor) { return sparse(tensor)->indices(); }
at::Tensor values_of(const at::Tensor& tensor) { return sparse(tensor)->values(); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_with_strides));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(set_nothing));
  library.impl("record_stream", TORCH_FN(record_stream));
}
}  // namespace sim
