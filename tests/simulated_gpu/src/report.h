// Reports of what was found: "race" and "lifetime" are faults of the program; "sync" is a wait of the host, "peer" a
// copy between devices, "early" memory that its stream may give away while another stream still uses it.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace sim {
std::atomic<py::object*> reporter = nullptr;  // a function; never destroyed: threads call it until the process is gone
thread_local std::vector<std::pair<std::string, std::string>> reports;  // that Python has not been given yet

void report(const std::string& kind, const std::string& text) { reports.emplace_back(kind, text); }

void flush_reports() {  // takes Python's lock, for which no other lock may be held
  auto now = std::exchange(reports, {});
  auto* function = reporter.load();
  if (now.empty() || !function) return;
  py::gil_scoped_acquire python;
  for (auto& [kind, text] : now) (*function)(kind, text);
}
}  // namespace sim
