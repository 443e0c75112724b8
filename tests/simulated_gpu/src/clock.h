// Virtual time: of the host and of each stream, in seconds since the process began.
//
// Simulated: what is put on a stream begins when the stream is there and the host has put it; an event has the time of
// its stream; a transfer begins when both ends are there. All times are maxima of sums, whatever the processes really
// wait for, so that they are the same to the bit in every run. Not simulated: a full launch queue, kernels that share
// the device's processors, links that several groups share.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <time.h>

#include "report.h"
#include "stream.h"

namespace sim {
using Numbers = std::map<std::string, double>;
Numbers costs = {
    // in seconds, and bytes or operations a second
    {"launch", 5e-6},         // of the host, for a kernel, copy or message
    {"event", 0},             // of the host, for recording an event or letting a stream wait for it
    {"query", 1e-6},          // of the host, for a look whether something is done
    {"kernel", 3e-6},         // a kernel takes at least so long
    {"flops", 100e12},
    {"bytes", 1.5e12},        // what a kernel reads and writes
    {"copy_latency", 10e-6},  // between host and device
    {"copy_bytes", 25e9},
    {"p2p_latency", 10e-6},   // a send and its receive
    {"p2p_bytes", 50e9},
    {"ring_latency", 15e-6},  // a collective
    {"ring_bytes", 50e9},     // what each rank of it sends
    {"wire_latency", 50e-6},  // a collective of hosts
    {"contention", 0},        // the share by which kernels are slower while a message is under way
    {"cpu", 0},               // virtual seconds of the host for each second of its own processor time
};
Numbers fixed_costs;  // of operators, whatever their sizes

struct Span {
  std::string what;
  int stream;
  double start, end;
};
std::vector<Span> spans;
bool tracing = false;
std::map<std::string, uint64_t> counts;  // of what the host has put on streams, and of its waits

double cost(const std::string& name) { return costs.at(name); }
double fixed_cost(const std::string& name, double otherwise) {
  auto fixed = fixed_costs.find(name);
  return fixed == fixed_costs.end() ? otherwise : fixed->second;
}
void host_spends(double seconds) {
  Lock lock(mutex);
  streams[HOST].time += seconds;
}
void count(const std::string& what) {
  Lock lock(mutex);
  counts[what]++;
}
void record_span(const std::string& what, int stream, double start, double end) {
  Lock lock(mutex);
  if ((tracing || cost("contention") > 0) && end > start) spans.push_back({what, stream, start, end});
}
std::vector<Span> take_spans(bool on) {  // those until now; ``on``: there will be more
  Lock lock(mutex);
  tracing = on;
  return std::exchange(spans, {});
}

double messages_within(double start, double end) {
  double sum = 0;
  for (const Span& span : spans)
    if (span.what.rfind("nccl ", 0) == 0)
      sum += std::max(0.0, std::min(end, span.end) - std::max(start, span.start));
  return std::min(sum, end - start);
}
// Puts ``seconds`` of work on a stream, for which the host spends ``host``.
void enqueue(int stream, double seconds, const std::string& what, double host = cost("launch")) {
  Lock lock(mutex);
  host_spends(host);
  count(what);
  double start = std::max(streams[stream].time, streams[HOST].time), end = start + seconds;
  if (cost("contention") > 0) end += cost("contention") * messages_within(start, end);
  record_span(what, stream, start, end);
  streams[stream].time = end;
}

// The simulation's own work, which is below what torch does above kernels. It is not the host's; what the thread did
// before it came here is, where the cost "cpu" is set. What was found is told at its end.
class Inside {
 public:
  Inside() {
    if (depth++ || cost("cpu") <= 0 || seen < 0) return;
    host_spends((processor_now() - seen) * cost("cpu"));
  }
  ~Inside() noexcept(false) {
    if (--depth) return;
    if (cost("cpu") > 0) seen = processor_now();
    if (!std::uncaught_exceptions()) flush_reports();
  }

 private:
  static inline thread_local double seen = -1;
  static inline thread_local int depth = 0;
  c10::impl::ExcludeDispatchKeyGuard excluded{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA})};

  static double processor_now() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
  }
};
}  // namespace sim
