// Copies: on the device, between devices, and between the host and a device.
//
// Simulated: on the current stream, at the speed of the link or of the memory; the host waits, but for a non_blocking
// copy whose side of the host is pinned, which arrives late (pinned.h). Not simulated: a copy between devices takes no
// longer than one on the device, and is reported.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "device.h"
#include "memory.h"
#include "pinned.h"
#include "report.h"
#include "tensor.h"

namespace sim {
namespace {
bool can_be_late(const at::Tensor& host, bool non_blocking) {
  return non_blocking && host.is_contiguous() && is_pinned(host.const_data_ptr());
}
void wait_for_copy(int stream, const std::string& what, bool non_blocking, const std::string& unpinned) {
  host_waits_for(stream);
  report("sync", non_blocking ? what + unpinned : what);
}
std::string bytes_of(const at::Tensor& host) {
  return std::string(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
}

void copy_on_device(const at::Tensor& self, const at::Tensor& source) {
  if (self.device() != source.device()) report("peer", "a copy between two devices");
  on_host(self).copy_(on_host(source));
}
void copy_to_device(const at::Tensor& self, const at::Tensor& source, bool non_blocking, int stream, uint64_t at) {
  if (can_be_late(source, non_blocking)) {
    auto bytes = copy_in_later(stream, at, static_cast<char*>(source.data_ptr()), source.nbytes());
    flush_reports();
    on_host(self).copy_(at::from_blob(bytes.data(), source.sizes(), source.options()));
  } else {
    on_host(self).copy_(source);
    wait_for_copy(stream, "copy to the device", non_blocking, ", of memory that is not pinned");
  }
}
void copy_to_host(const at::Tensor& self, const at::Tensor& source, bool non_blocking, int stream, uint64_t at) {
  if (can_be_late(self, non_blocking)) {
    auto data = at::empty_like(self).copy_(on_host(source));
    copy_out_later(stream, at, static_cast<char*>(self.data_ptr()), bytes_of(data));
  } else {
    wait_for_copy(stream, "copy to the host", non_blocking, ", into memory that is not pinned");
    self.copy_(on_host(source));
  }
}

double seconds(const at::Tensor& self, bool between) {
  double bytes = self.numel() * self.itemsize();
  if (between) return costs.copy_latency + bytes / costs.copy_bytes;
  auto fixed = fixed_costs.find("aten::copy_");
  return fixed != fixed_costs.end() ? fixed->second : std::max(costs.kernel, 2 * bytes / costs.bytes);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (!self.numel() || self.is_same(given)) return self;
  Inside inside;
  Below below;
  auto source = given.expand(self.sizes());
  bool to = on_device(self), from = on_device(source);
  c10::DeviceGuard guard((to ? self : source).device());
  int stream = current_stream();
  uint64_t at = tick(stream);
  if (from) access(source, false, stream, at, "copy_");
  if (to) access(self, true, stream, at, "copy_");
  flush_reports();
  enqueue(stream, seconds(self, to != from), to && from ? "aten::copy_" : to ? "copy to the device" : "copy to the host");
  if (to && from)
    copy_on_device(self, source);
  else if (to)
    copy_to_device(self, source, non_blocking, stream, at);
  else
    copy_to_host(self, source, non_blocking, stream, at);
  return self;
}

at::Tensor& copy_sparse(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Below below;
  TORCH_CHECK(self.is_sparse() && source.is_sparse(), "copy_() between dense and sparse tensors is not implemented");
  auto moved = [&](const at::Tensor& part) { return part.to(self.device(), non_blocking, /*copy=*/true); };
  set_sparse(self, source, moved(indices_of(source)), moved(values_of(source)).to(self.scalar_type()));
  return self;
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("copy_", TORCH_FN(copy_)); }
TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) { library.impl("copy_", TORCH_FN(copy_sparse)); }
}  // namespace sim
