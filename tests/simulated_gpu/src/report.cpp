// Reports of what was found: see report.h. The reporter takes Python's lock, for which no other lock may be held.
#include "report.h"

#include <utility>
#include <vector>

#include "clock.h"

namespace sim {
namespace {
Reporter& reporter() {
  static auto* kept = new Reporter();  // never destroyed: threads report until the process is gone
  return *kept;
}
std::vector<std::pair<std::string, std::string>> waiting;
}  // namespace

void report_to(Reporter to) {
  Lock lock(mutex);
  reporter() = std::move(to);
}
void report(const std::string& kind, const std::string& text) {
  Reporter to;
  {
    Lock lock(mutex);
    to = reporter();
  }
  if (to) to(kind, text);
}
void report_later(const std::string& kind, const std::string& text) {
  Lock lock(mutex);
  waiting.emplace_back(kind, text);
}
void flush_reports() {
  std::vector<std::pair<std::string, std::string>> now;
  {
    Lock lock(mutex);
    now.swap(waiting);
  }
  for (auto& [kind, text] : now) report(kind, text);
}
}  // namespace sim
