// What Python calls: the extension module simulated_gpu._device.
//
// All files are one translation unit, since torch's headers are most of what the compiler reads: each of them here
// defines what it names, and module.cpp alone is compiled.
#include "group.h"

namespace sim {
// No thread needs Python any more. autograd's thread of a device lets go of what may belong to Python behind the
// backward that has returned already. It works off one task after the other: once it has come to this one, of a thread
// that has nothing of Python, it has let go of all others.
void end(const std::vector<int>& used) {
  py::gil_scoped_release released;
  reporter = nullptr;
  {
    std::unique_lock<std::shared_mutex> alone(ending);
    ended = true;
  }
  std::thread([&] {
    for (int device : used) {
      auto* last = new at::Tensor(at::zeros({}, at::TensorOptions().device(c10::Device(DEVICE, device))));
      last->requires_grad_().add(1).backward();
    }
  }).join();
}
Numbers set_costs(const Numbers& given) {
  Lock lock(mutex);
  for (auto& [name, value] : given) {
    TORCH_CHECK_VALUE(costs.count(name), "there is no cost '", name, "'");
    costs[name] = value;
  }
  return costs;
}
py::list trace(bool on) {
  py::list taken;
  for (auto& span : take_spans(on)) taken.append(py::make_tuple(span.what, span.stream, span.start, span.end));
  return taken;
}
double host_now() {
  Inside inside;
  return time_of(HOST);
}
double now() { return std::max(host_now(), time_of(current_stream())); }
}  // namespace sim

PYBIND11_MODULE(_device, module) {
  using namespace sim;
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_by_parts);
  module.def("report_to", [](const py::object& function) { reporter = new py::object(function); });
  module.def("end", &end);
  module.def("device_count", &device_count);
  module.def("resize_storage", [](const at::Tensor& tensor, size_t bytes) { resize_storage(tensor.storage(), bytes); });
  module.def("default_generator", &default_generator);
  module.def("group", &make_group);
  module.def("costs", &set_costs);
  module.def("fix", [](const Numbers& seconds) {
    Lock lock(mutex);
    fixed_costs = seconds;
  });
  module.def("now", &now);
  module.def("host_now", &host_now);
  module.def("host_reaches", [](double time) { join(HOST, Event{{}, time}); });
  module.def("counts", [] {
    Lock lock(mutex);
    return counts;
  });
  module.def("trace", &trace);
  module.def("event_time", [](intptr_t event) {
    TORCH_CHECK(event, "the event must be recorded first");
    return event_at(reinterpret_cast<void*>(event)).time;
  });
}
