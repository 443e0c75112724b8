// Copies: on the device, between devices, and between the host and a device.
//
// Simulated: on the current stream, at the speed of the link or of the memory; the host waits, but for a non_blocking
// copy whose side of the host is pinned, which arrives late (pinned.h). Not simulated: a copy between devices takes no
// longer than one on the device, and is reported.
#pragma once
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include "tensor.h"

namespace sim {
double copy_seconds(double bytes, bool over_link) {
  if (over_link) return cost("copy_latency") + bytes / cost("copy_bytes");
  return fixed_cost("aten::copy_", std::max(cost("kernel"), 2 * bytes / cost("bytes")));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (!self.numel() || self.is_same(given)) return self;
  Inside inside;
  auto source = given.expand(self.sizes());
  bool to = on_device(self), from = on_device(source);
  c10::DeviceGuard guard((to ? self : source).device());
  int stream = current_stream();
  uint64_t at = tick(stream);
  access(source, false, stream, at, "copy_");
  access(self, true, stream, at, "copy_");
  std::string what = to && from ? "aten::copy_" : to ? "copy to the device" : "copy to the host";
  enqueue(stream, copy_seconds(self.numel() * self.itemsize(), to != from), what);
  if (self.device() != source.device() && to && from) report("peer", "a copy between two devices");

  const at::Tensor& host = to ? source : self;
  bool pinned = !on_device(host) && host.is_contiguous() && is_pinned(host.const_data_ptr());
  if (non_blocking && pinned && to) {
    auto bytes = copy_in_later(stream, at, static_cast<char*>(host.data_ptr()), host.nbytes());
    on_host(self).copy_(at::from_blob(bytes.data(), source.sizes(), source.options()));
  } else if (non_blocking && pinned) {
    auto data = at::empty_like(host).copy_(on_host(source));
    std::string bytes(static_cast<const char*>(data.const_data_ptr()), data.nbytes());
    copy_out_later(stream, at, static_cast<char*>(host.data_ptr()), std::move(bytes));
  } else {
    const char* unpinned = to ? ", of memory that is not pinned" : ", into memory that is not pinned";
    if (to != from) host_waits_for(stream, non_blocking ? what + unpinned : what);
    on_host(self).copy_(on_host(source));
  }
  return self;
}

at::Tensor& copy_sparse(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Inside inside;
  TORCH_CHECK(self.is_sparse() && source.is_sparse(), "copy_() between dense and sparse tensors is not implemented");
  auto moved = [&](const at::Tensor& part) { return part.to(self.device(), non_blocking, /*copy=*/true); };
  set_sparse(self, source, moved(indices_of(source)), moved(values_of(source)).to(self.scalar_type()));
  return self;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("copy_", TORCH_FN(copy_)); }
TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) { library.impl("copy_", TORCH_FN(copy_sparse)); }
}  // namespace sim
