// What Python calls: the extension module simulated_gpu._device.
#include <torch/csrc/utils/pybind.h>

#include <thread>

#include "device.h"
#include "generator.h"
#include "group.h"
#include "lane.h"
#include "memory.h"
#include "report.h"
#include "tensor.h"

namespace sim {
void choose_attention();  // kernel.cpp

namespace {
void report_to_python(const py::object& function) {
  auto* kept = new py::object(function);  // threads may call it until the process is gone
  report_to([kept](const std::string& kind, const std::string& text) {
    py::gil_scoped_acquire python;
    (*kept)(kind, text);
  });
}
// No thread needs Python any more. autograd's thread of a device lets go of what may belong to Python behind the backward
// that has returned already. It works off one task after the other: once it has come to this one, of a thread that has
// nothing of Python, it has let go of all others.
void end(const std::vector<int>& used) {
  py::gil_scoped_release released;
  report_to(nullptr);
  end_lanes();
  std::thread([&] {
    for (int device : used) {
      auto* last = new at::Tensor(at::zeros({}, at::device({at::kCUDA, static_cast<c10::DeviceIndex>(device)})));
      last->requires_grad_().add(1).backward();
    }
  }).join();
}
std::map<std::string, double> set_costs(const std::map<std::string, double>& given) {
  Lock lock(mutex);
  for (auto& [name, value] : given) {
    double* cost = cost_named(name);
    TORCH_CHECK_VALUE(cost, "there is no cost '", name, "'");
    *cost = value;
  }
  std::map<std::string, double> all;
  for (auto& name : cost_names()) all[name] = *cost_named(name);
  return all;
}
py::list take_trace(bool on) {
  py::list spans;
  for (auto& span : trace(on)) spans.append(py::make_tuple(span.what, span.stream, span.start, span.end));
  return spans;
}
double now() {
  Inside inside;
  return std::max(time_of(current_stream()), time_of(HOST));
}
double host_now() {
  Inside inside;
  return time_of(HOST);
}
}  // namespace
}  // namespace sim

PYBIND11_MODULE(_device, module) {
  using namespace sim;
  choose_attention();
  module.def("report_to", &report_to_python);
  module.def("end", &end);
  module.def("device_count", &device_count);
  module.def("streams_given", &streams_given);
  module.def("resize_storage", [](const at::Tensor& tensor, size_t bytes) { resize_storage(tensor.storage(), bytes); });
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("group", &make_group);
  module.def("costs", &set_costs);
  module.def("fix", [](std::map<std::string, double> seconds) {
    Lock lock(mutex);
    fixed_costs = std::move(seconds);
  });
  module.def("now", &now);
  module.def("host_now", &host_now);
  module.def("host_reaches", [](double time) { reaches(HOST, time); });
  module.def("processor_seconds", &processor_seconds);
  module.def("counts", &counts);
  module.def("trace", &take_trace);
  module.def("event_time", [](intptr_t event) {
    TORCH_CHECK(event, "the event must be recorded first");
    return reinterpret_cast<Event*>(event)->time;
  });
}
