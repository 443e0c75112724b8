// Reports of what was found: "race" and "lifetime" are faults of the program; "sync" is a wait of the host, "peer" a
// copy between devices, "early" memory that its stream may give away while another stream still uses it.
#pragma once
#include <functional>
#include <string>

namespace sim {
using Reporter = std::function<void(const std::string& kind, const std::string& text)>;
void report_to(Reporter reporter);  // nullptr: to nobody

void report(const std::string& kind, const std::string& text);        // never while the mutex is held
void report_later(const std::string& kind, const std::string& text);  // by the next flush_reports
void flush_reports();
}  // namespace sim
