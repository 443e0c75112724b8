// Tensors of the device, and the same memory as tensors of the CPU.
//
// Simulated: dense and sparse (COO) tensors. Not simulated: compressed sparse, quantised and nested ones.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <map>

namespace sim {
struct Below {  // what torch does above kernels
  c10::impl::ExcludeDispatchKeyGuard excluded{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA})};
};

bool on_device(const at::Tensor& tensor);

// One storage of the CPU for each of the device, so that views of one memory stay that.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);  // dense or sparse
  bool has(const c10::Storage& storage) const { return storages.count(storage.unsafeGetStorageImpl()); }

 private:
  std::map<c10::StorageImpl*, c10::Storage> storages;
};
at::Tensor on_host(const at::Tensor& tensor);  // its memory, as a tensor of the CPU

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, int device);
at::Tensor copy_to_device(const at::Tensor& host, int device);  // what a kernel has made; dense
void resize_storage(const at::Storage& storage, size_t bytes);
void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes);

// Sparse tensors: a tensor that has these, and the device's tensors inside of one.
at::Tensor make_sparse(const at::Tensor& like, at::Tensor indices, at::Tensor values);
void set_sparse(const at::Tensor& tensor, const at::Tensor& like, at::Tensor indices, at::Tensor values);
at::Tensor indices_of(const at::Tensor& sparse);
at::Tensor values_of(const at::Tensor& sparse);
}  // namespace sim
