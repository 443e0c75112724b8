// Kernels: every operator of the device is torch's kernel for the CPU, run at once on the device's own memory.
//
// Simulated: what the operator reads and writes, on the current stream; its time (its operations or bytes at the
// device's speed, or what a test says); the host's wait, where CUDA's kernel has one; the refusal of tensors of several
// devices. ``sim::work`` is x itself after exactly so many seconds. Not simulated: CUDA's rounding, and that it
// launches one kernel for a whole list of tensors (_foreach_*) where the CPU launches one for each.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/ones_like.h>

#include "copy.h"

namespace sim {
using Stack = torch::jit::Stack;
using Names = std::set<std::string>;
const std::string ITEM = "aten::_local_scalar_dense", WORK = "sim::work";

// Whose result's size, or value, the host has to know.
const Names HOST_WAITS = {
    ITEM, "aten::_coalesce", "aten::_linalg_check_errors", "aten::_unique2", "aten::bincount", "aten::equal",
    "aten::is_nonzero", "aten::masked_select", "aten::nonzero", "aten::unique_consecutive", "aten::unique_dim",
};
const Names INDEXED = {  // by tensors of the host, too; by a mask only after a wait
    "aten::_index_put_impl_", "aten::_unsafe_index", "aten::index", "aten::index_put", "aten::index_put_",
};
const Names OF_THE_HOST = {  // what a sparse tensor knows of itself
    "aten::_dimI", "aten::_dimV", "aten::_nnz", "aten::dense_dim", "aten::is_coalesced", "aten::sparse_dim",
    "aten::_coalesced_",
};

// Multiplications and additions; of a convolution as if the sizes stayed.
double operations(const std::string& name, const c10::IValue* arguments) {
  auto tensor = [&](size_t argument) { return arguments[argument].toTensor(); };
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
      : op(op), schema(op.schema()), name(schema.name()), label(name == ITEM ? "item" : name), stack(stack),
        first(stack->data() + stack->size() - schema.arguments().size()), waits(HOST_WAITS.count(name)) {}

  void run() {
    take_arguments();
    c10::DeviceGuard guard(c10::Device(DEVICE, device));
    stream = current_stream();
    bool looks = is_view() || OF_THE_HOST.count(name);  // puts nothing on the stream
    std::optional<double> own;
    if (name == WORK) own = first[1].toDouble();
    if (name == ITEM) own = cost("copy_latency");
    double work = looks ? 0 : operations(name, first);
    if (!looks) at = tick(stream);
    for (const Argument& argument : arguments)
      if (!looks) access_dense(argument.tensor, argument.write);
    op.callBoxed(stack);
    give_results();
    double seconds = std::max({cost("kernel"), work / cost("flops"), bytes / cost("bytes")});
    if (!looks) enqueue(stream, own ? *own : fixed_cost(name, seconds), label);
    if (waits) host_waits_for(stream, label);
  }

 private:
  struct Argument {  // or a part of a sparse one
    at::Tensor tensor, alias;  // of the device, of the host
    bool write;
    bool placeholder;  // of an output without a size
  };
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const std::string name, label;
  Stack* stack;
  c10::IValue* first;  // argument
  bool waits;
  std::vector<Argument> arguments;
  Aliases aliases;
  int device = -1, stream = HOST;
  uint64_t at = 0;
  double bytes = 0;

  // Each tensor in a value, or in a list, is replaced.
  template <class Replace>
  static void replace(c10::IValue& value, const Replace& by) {
    if (value.isTensor()) {
      value = by(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(by(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(by(*tensor)) : std::nullopt);
      value = list;
    }
  }

  void take_arguments() {
    c10::IValue* without_generator = nullptr;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      auto& argument = schema.arguments()[i];
      auto& value = first[i];
      bool write = argument.alias_info() && argument.alias_info()->isWrite();
      replace(value, [&](const at::Tensor& tensor) { return taken(tensor, write); });
      if (value.isDevice() && value.toDevice().type() == DEVICE) {
        device = value.toDevice().has_index() ? value.toDevice().index() : current_device;
        value = c10::Device(c10::kCPU);
      }
      if (value.isGenerator()) value = host_generator(value.toGenerator());
      if (value.isNone() && argument.name() == "generator") without_generator = &value;
    }
    if (device < 0) device = current_device;
    if (without_generator) *without_generator = host_generator(default_generator(device));
  }
  at::Tensor taken(const at::Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    bool here = on_device(tensor), host = tensor.device().type() == c10::kCPU;
    bool fits = here ? device < 0 || device == tensor.device().index() : !host || !tensor.dim() || INDEXED.count(name);
    TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found at least two devices, ",
                c10::Device(DEVICE, device), " and ", tensor.device(), "! (", op.operator_name(), ")");
    if (!here) return tensor;
    device = tensor.device().index();
    waits |= INDEXED.count(name) && !arguments.empty() && !write && tensor.scalar_type() == at::kBool;
    bool output = schema.overload_name().find("out") != std::string::npos;
    bool placeholder = write && output && !tensor.is_sparse() && tensor.numel() == 0;
    auto alias = placeholder ? at::empty({0}, tensor.options().device(c10::kCPU)) : aliases.of(tensor);
    arguments.push_back({tensor, alias, write, placeholder});
    if (tensor.is_sparse()) {
      arguments.push_back({indices_of(tensor), indices_of(alias), write, false});
      arguments.push_back({values_of(tensor), values_of(alias), write, false});
    }
    return alias;
  }

  bool is_view() const {
    bool view = !schema.returns().empty();
    for (auto& result : schema.returns()) view = view && result.alias_info() && !result.alias_info()->isWrite();
    return view;
  }
  void access_dense(const at::Tensor& tensor, bool write) {
    if (tensor.is_sparse()) return;
    bytes += tensor.numel() * tensor.itemsize();
    access(tensor, write, stream, at, c10::toString(op.operator_name()));
  }

  void give_results() {
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
      replace((*stack)[i], [&](const at::Tensor& result) { return given(result); });
  }
  at::Tensor given(const at::Tensor& result) {
    if (!result.defined() || result.device().type() != c10::kCPU) return result;
    for (const Argument& argument : arguments)
      if (argument.alias.is_same(result)) return written(argument);
    if (result.is_sparse()) return make_sparse(result, given(indices_of(result)), given(values_of(result)));
    for (auto& [tensor, alias, write, placeholder] : arguments)
      if (!tensor.is_sparse() && result.storage().is_alias_of(alias.storage()))
        return shaped(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                               tensor.key_set(), result.dtype()), result);
    auto made = copy_to_device(result, device);
    access_dense(made, true);
    return made;
  }
  at::Tensor written(const Argument& argument) {
    auto& [tensor, alias, write, placeholder] = argument;
    if (tensor.is_sparse()) {
      if (write) set_sparse(tensor, alias, given(indices_of(alias)), given(values_of(alias)));
      return tensor;
    }
    if (alias.sizes() != tensor.sizes()) resize_(tensor, alias.sizes(), {});
    if (placeholder && alias.numel()) on_host(tensor).copy_(alias);
    return tensor;
  }
};

void run_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Inside inside;
  Call(op, stack).run();
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
at::Tensor work_on_host(const at::Tensor& x, double, double) { return x.clone(at::MemoryFormat::Contiguous); }
at::Tensor work_on_meta(const at::Tensor& x, double, double) { return at::empty_like(x, at::MemoryFormat::Contiguous); }

TORCH_LIBRARY(sim, library) {
  library.def("work(Tensor x, float forward, float backward) -> Tensor", {at::Tag::pt2_compliant_tag});
}
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
  library.impl("native_dropout", TORCH_FN(native_dropout));
  // torch's own choose kernels of CUDA by themselves, which are not there
  for (auto name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}
}  // namespace sim
