// Virtual time: see clock.h.
#include "clock.h"

#include <time.h>

#include <algorithm>

namespace sim {
std::recursive_mutex mutex;
Costs costs;
std::map<std::string, double> fixed_costs;

namespace {
std::map<int, double> times;
std::map<std::string, uint64_t> numbers;
std::vector<Span> spans;
bool tracing = false;
double spent = 0;
thread_local double seen = -1;
thread_local int depth = 0;

const std::map<std::string, double*> NAMED = {
    {"launch", &costs.launch},
    {"event", &costs.event},
    {"query", &costs.query},
    {"kernel", &costs.kernel},
    {"flops", &costs.flops},
    {"bytes", &costs.bytes},
    {"copy_latency", &costs.copy_latency},
    {"copy_bytes", &costs.copy_bytes},
    {"p2p_latency", &costs.p2p_latency},
    {"p2p_bytes", &costs.p2p_bytes},
    {"ring_latency", &costs.ring_latency},
    {"ring_bytes", &costs.ring_bytes},
    {"wire_latency", &costs.wire_latency},
    {"contention", &costs.contention},
    {"cpu", &costs.cpu},
};

double processor_now() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

double under_way_within(double start, double end) {
  double sum = 0;
  for (const Span& span : spans)
    if (span.what.rfind("nccl ", 0) == 0)
      sum += std::max(0.0, std::min(end, span.end) - std::max(start, span.start));
  return std::min(sum, end - start);
}
}  // namespace

double* cost_named(const std::string& name) {
  auto found = NAMED.find(name);
  return found == NAMED.end() ? nullptr : found->second;
}
std::vector<std::string> cost_names() {
  std::vector<std::string> names;
  for (auto& [name, _] : NAMED) names.push_back(name);
  return names;
}

double time_of(int stream) {
  Lock lock(mutex);
  return times[stream];
}
void reaches(int stream, double time) {
  Lock lock(mutex);
  times[stream] = std::max(times[stream], time);
}
void host_spends(double seconds) {
  Lock lock(mutex);
  times[HOST] += seconds;
}

double enqueue(int stream, double seconds, const std::string& what, double host) {
  Lock lock(mutex);
  times[HOST] += host;
  count(what);
  double start = std::max(times[stream], times[HOST]), end = start + seconds;
  if (costs.contention > 0) end += costs.contention * under_way_within(start, end);
  if (tracing || costs.contention > 0) spans.push_back({what, stream, start, end});
  return times[stream] = end;
}

void count(const std::string& what) {
  Lock lock(mutex);
  numbers[what]++;
}
std::map<std::string, uint64_t> counts() {
  Lock lock(mutex);
  return numbers;
}

void record_span(const std::string& what, int stream, double start, double end) {
  Lock lock(mutex);
  if ((tracing || costs.contention > 0) && end > start) spans.push_back({what, stream, start, end});
}
std::vector<Span> trace(bool on) {
  Lock lock(mutex);
  std::vector<Span> until_now;
  until_now.swap(spans);
  tracing = on;
  return until_now;
}

Inside::Inside() {
  if (depth++ || costs.cpu <= 0) return;
  double now = processor_now();
  if (seen < 0) return;
  Lock lock(mutex);
  times[HOST] += (now - seen) * costs.cpu;
  spent += now - seen;
}
Inside::~Inside() {
  if (!--depth && costs.cpu > 0) seen = processor_now();
}
double processor_seconds() {
  Inside inside;
  Lock lock(mutex);
  return spent;
}
}  // namespace sim
