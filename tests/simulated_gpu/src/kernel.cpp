// Kernels: every operator of the device is torch's kernel for the CPU, run at once on the device's own memory.
//
// Simulated: what the operator reads and writes, on the current stream; its time (its operations or bytes at the
// device's speed, or what a test says); the host's wait, where CUDA's kernel has one; the refusal of tensors of several
// devices. ``sim::work`` is x itself after exactly so many seconds. Not simulated: CUDA's rounding, and that it
// launches one kernel for a whole list of tensors (_foreach_*) where the CPU launches one for each.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <set>

#include "device.h"
#include "generator.h"
#include "memory.h"
#include "report.h"
#include "tensor.h"

namespace sim {
namespace {
using Stack = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

// Whose result's size, or value, the host has to know.
const std::set<std::string> HOST_WAITS = {
    "aten::_coalesce",      "aten::_linalg_check_errors",
    "aten::_local_scalar_dense", "aten::_unique2",
    "aten::bincount",       "aten::equal",
    "aten::is_nonzero",     "aten::masked_select",
    "aten::nonzero",        "aten::unique_consecutive",
    "aten::unique_dim",
};
const std::set<std::string> INDEXED = {  // by tensors of the host, too; by a mask only after a wait
    "aten::_index_put_impl_", "aten::_unsafe_index", "aten::index", "aten::index_put", "aten::index_put_",
};
const std::set<std::string> OF_THE_HOST = {  // what a sparse tensor knows of itself
    "aten::_dimI", "aten::_dimV", "aten::_nnz", "aten::dense_dim", "aten::is_coalesced", "aten::sparse_dim",
    "aten::_coalesced_",
};

// Multiplications and additions; of a convolution as if the sizes stayed.
double operations(const std::string& name, const Stack& stack, size_t first) {
  auto tensor = [&](size_t argument) { return stack[first + argument].toTensor(); };
  auto convolution = [&](size_t image, size_t weight) {
    double places = 1.0 * tensor(image).numel() / std::max<int64_t>(tensor(image).size(1), 1);
    return 2 * places * tensor(weight).numel();
  };
  if (name == "aten::mm") return 2.0 * tensor(0).numel() * tensor(1).size(1);
  if (name == "aten::addmm") return 2.0 * tensor(1).numel() * tensor(2).size(1);
  if (name == "aten::bmm") return 2.0 * tensor(0).numel() * tensor(1).size(2);
  if (name == "aten::baddbmm") return 2.0 * tensor(1).numel() * tensor(2).size(2);
  if (name == "aten::mv" || name == "aten::dot") return 2.0 * tensor(0).numel();
  if (name == "aten::addmv") return 2.0 * tensor(1).numel();
  if (name.find("convolution_backward") != std::string::npos) return 2 * convolution(1, 2);
  if (name.find("convolution") != std::string::npos) return convolution(0, 1);
  return 0;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op(op), name(op.schema().name()), stack(stack), first(stack->size() - op.schema().arguments().size()) {}

  void run() {
    waits = HOST_WAITS.count(name);
    take_arguments();
    c10::DeviceGuard guard(c10::Device(DEVICE, device));
    stream = current_stream();
    bool looks = is_view() || OF_THE_HOST.count(name);  // puts nothing on the stream
    double work = looks ? 0 : operations(name, *stack, first);
    if (!looks) access_arguments();
    op.callBoxed(stack);
    give_results();
    if (!looks) enqueue(stream, seconds(work), name);
    flush_reports();
    if (!waits) return;
    host_waits_for(stream);
    report("sync", name);
  }

 private:
  struct Argument {
    at::Tensor tensor, alias;  // of the device, of the host
    bool write;
    bool placeholder;  // of an output without a size
  };
  const c10::OperatorHandle& op;
  const std::string name;
  Stack* stack;
  size_t first;
  std::vector<Argument> arguments;
  std::vector<std::pair<at::Tensor, at::Tensor>> dense;  // each dense tensor among them, or in them, and its alias
  Aliases aliases;
  int device = -1, stream = HOST;
  uint64_t at = 0;
  double bytes = 0;
  bool waits = false;

  void take_arguments() {
    auto& schema = op.schema().arguments();
    for (size_t i = 0; i < schema.size(); i++) {
      auto& value = (*stack)[first + i];
      bool write = schema[i].alias_info() && schema[i].alias_info()->isWrite();
      if (value.isTensor()) {
        value = taken(value.toTensor(), write);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& tensor : value.toTensorVector()) list.push_back(taken(tensor, write));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> tensor : value.toOptionalTensorVector())
          list.push_back(tensor ? std::optional(taken(*tensor, write)) : std::nullopt);
        value = list;
      } else if (value.isDevice() && value.toDevice().type() == DEVICE) {
        device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
        value = c10::Device(c10::kCPU);
      } else if (value.isGenerator()) {
        value = host_generator(value.toGenerator());
      }
    }
    if (device < 0) device = current_device();
    for (size_t i = 0; i < schema.size(); i++)
      if (schema[i].name() == "generator" && (*stack)[first + i].isNone())
        (*stack)[first + i] = host_generator(default_generator(device));
  }

  at::Tensor taken(const at::Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      bool host = tensor.device().type() == c10::kCPU;
      TORCH_CHECK(!host || tensor.dim() == 0 || INDEXED.count(name),
                  "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! (",
                  op.operator_name(), ")");
      return tensor;
    }
    TORCH_CHECK(device < 0 || device == tensor.device().index(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                " and cuda:", tensor.device().index(), "! (", op.operator_name(), ")");
    device = tensor.device().index();
    bool masks = INDEXED.count(name) && !arguments.empty() && !write && tensor.scalar_type() == at::kBool;
    waits = waits || masks;
    bool output = op.schema().overload_name().find("out") != std::string::npos;
    bool placeholder = write && output && !tensor.is_sparse() && tensor.numel() == 0;
    auto alias = placeholder ? at::empty({0}, tensor.options().device(c10::kCPU)) : aliases.of(tensor);
    arguments.push_back({tensor, alias, write, placeholder});
    if (tensor.is_sparse()) {
      dense.emplace_back(indices_of(tensor), indices_of(alias));
      dense.emplace_back(values_of(tensor), values_of(alias));
    } else {
      dense.emplace_back(tensor, alias);
    }
    return alias;
  }

  bool is_view() const {
    bool view = !op.schema().returns().empty();
    for (auto& result : op.schema().returns())
      view = view && result.alias_info() && !result.alias_info()->isWrite();
    return view;
  }

  void access_arguments() {
    Lock lock(mutex);
    std::string operation = c10::toString(op.operator_name());
    at = tick(stream);
    for (const Argument& argument : arguments) access_all(argument.tensor, argument.write, operation);
  }
  void access_all(const at::Tensor& tensor, bool write, const std::string& operation) {
    if (tensor.is_sparse()) {
      access_all(indices_of(tensor), write, operation);
      access_all(values_of(tensor), write, operation);
      return;
    }
    bytes += tensor.numel() * tensor.itemsize();
    access(tensor, write, stream, at, operation);
  }

  double seconds(double work) const {
    auto fixed = fixed_costs.find(name);
    if (fixed != fixed_costs.end()) return fixed->second;
    return std::max({costs.kernel, work / costs.flops, bytes / costs.bytes});
  }

  void give_results() {
    size_t count = op.schema().returns().size();
    for (size_t i = stack->size() - count; i < stack->size(); i++) {
      auto& value = (*stack)[i];
      if (value.isTensor()) {
        value = given(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& tensor : value.toTensorVector()) list.push_back(given(tensor));
        value = list;
      }
    }
  }

  at::Tensor given(const at::Tensor& result) {
    if (!result.defined() || result.device().type() != c10::kCPU) return result;
    for (const Argument& argument : arguments)
      if (argument.alias.is_same(result)) return written(argument);
    if (result.is_sparse()) return make_sparse(result, given(indices_of(result)), given(values_of(result)));
    for (auto& [tensor, alias] : dense)
      if (result.storage().is_alias_of(alias.storage())) return view_of(tensor, result);
    auto made = copy_to_device(result, device);
    bytes += made.numel() * made.itemsize();
    access(made, true, stream, at, c10::toString(op.operator_name()));
    return made;
  }
  at::Tensor written(const Argument& argument) {
    auto& [tensor, alias, write, placeholder] = argument;
    if (tensor.is_sparse()) {
      if (write) set_sparse(tensor, alias, given(indices_of(alias)), given(values_of(alias)));
      return tensor;
    }
    if (alias.sizes() != tensor.sizes()) resize_tensor(tensor, alias.sizes());
    if (placeholder && alias.numel()) on_host(tensor).copy_(alias);
    return tensor;
  }
  static at::Tensor view_of(const at::Tensor& tensor, const at::Tensor& result) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                         tensor.key_set(), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    view._set_conj(result.is_conj());
    view._set_neg(result.is_neg());
    return view;
  }
};

void run_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Inside inside;
  Below below;
  Call(op, stack).run();
}

at::Scalar local_scalar(const at::Tensor& self) {
  Inside inside;
  c10::DeviceGuard guard(self.device());
  int stream = current_stream();
  {
    Lock lock(mutex);
    access(self, false, stream, tick(stream), "item");
  }
  enqueue(stream, costs.copy_latency, "item");
  host_waits_for(stream);
  flush_reports();
  report("sync", "item");
  return at::_local_scalar_dense(on_host(self));
}
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, at::kBool)};
  auto kept = at::empty_like(x, x.options().dtype(at::kBool));
  kept.bernoulli_(1 - p, default_generator(x.device().index()));
  return {p == 1 ? x * kept : x * kept / (1 - p), kept};
}
int64_t attention_by_parts(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                           double, bool, std::optional<double>, bool) {
  return 0;  // the "math" backend
}

at::Tensor copy_of(const at::Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }
at::Tensor work(const at::Tensor& x, double forward, double) {
  Inside inside;
  Below below;
  c10::DeviceGuard guard(x.device());
  int stream = current_stream();
  uint64_t at = tick(stream);
  access(x, false, stream, at, "sim::work");
  auto made = copy_to_device(copy_of(on_host(x)), x.device().index());
  access(made, true, stream, at, "sim::work");
  enqueue(stream, forward, "sim::work");
  flush_reports();
  return made;
}
at::Tensor work_on_host(const at::Tensor& x, double, double) { return copy_of(x); }
at::Tensor work_on_meta(const at::Tensor& x, double, double) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}
}  // namespace

TORCH_LIBRARY(sim, library) {
  library.def("work(Tensor x, float forward, float backward) -> Tensor", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(sim, CUDA, library) { library.impl("work", TORCH_FN(work)); }
TORCH_LIBRARY_IMPL(sim, CPU, library) { library.impl("work", TORCH_FN(work_on_host)); }
TORCH_LIBRARY_IMPL(sim, Meta, library) { library.impl("work", TORCH_FN(work_on_meta)); }

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}
// Each of the CPU's by its name: the fallback stands behind kernels for any backend, which know no sparse tensors.
TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& operation : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(operation);
    bool sparse = op && op->hasKernelForDispatchKey(c10::DispatchKey::SparseCPU);
    if (!sparse || operation.getNamespace() != "aten" || operation.name == "aten::copy_") continue;
    auto kernel = torch::CppFunction::makeFromBoxedFunction<&run_kernel>();
    library.impl(c10::toString(operation).c_str(), std::move(kernel));
  }
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  library.impl("native_dropout", TORCH_FN(native_dropout));
  // torch's own picks a kernel of CUDA by itself, which is not there
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

void choose_attention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_by_parts); }
}  // namespace sim
