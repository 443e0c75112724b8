// Virtual time: of the host and of each stream, in seconds since the process began.
//
// Simulated: what is put on a stream begins when the stream is there and the host has put it; an event has the time of
// its stream; a transfer begins when both ends are there. All times are maxima of sums, whatever the processes really
// wait for, so that they are the same to the bit in every run. Not simulated: a full launch queue, kernels that share
// the device's processors, links that several groups share.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace sim {
constexpr int HOST = -1;  // beside the numbers of streams

extern std::recursive_mutex mutex;  // of all that is simulated in this process
using Lock = std::lock_guard<std::recursive_mutex>;

struct Costs {  // in seconds, and bytes or operations a second
  double launch = 5e-6;         // of the host, for a kernel, copy or message
  double event = 0;             // of the host, for recording an event or letting a stream wait for it
  double query = 1e-6;          // of the host, for a look whether something is done
  double kernel = 3e-6;         // a kernel takes at least so long
  double flops = 100e12;
  double bytes = 1.5e12;        // what a kernel reads and writes
  double copy_latency = 10e-6;  // between host and device
  double copy_bytes = 25e9;
  double p2p_latency = 10e-6;   // a send and its receive
  double p2p_bytes = 50e9;
  double ring_latency = 15e-6;  // a collective
  double ring_bytes = 50e9;     // what each rank of it sends
  double wire_latency = 50e-6;  // a collective of hosts
  double contention = 0;        // the share by which kernels are slower while a message is under way
  double cpu = 0;               // virtual seconds of the host for each second of its own processor time
};
struct Span {
  std::string what;
  int stream;
  double start, end;
};

extern Costs costs;
extern std::map<std::string, double> fixed_costs;  // of operators, whatever their sizes
double* cost_named(const std::string& name);       // nullptr: there is none
std::vector<std::string> cost_names();

double time_of(int stream);  // or HOST
void reaches(int stream, double time);
void host_spends(double seconds);

// Puts ``seconds`` of work on a stream, for which the host spends ``host``; the time of its end.
double enqueue(int stream, double seconds, const std::string& what, double host = costs.launch);

void count(const std::string& what);
std::map<std::string, uint64_t> counts();  // of what the host has put on streams, and of its waits

void record_span(const std::string& what, int stream, double start, double end);  // if it is traced and not empty
std::vector<Span> trace(bool on);                                                 // the spans until now

// The simulation's own work is not the host's; what the thread did before it came here is, where ``costs.cpu`` is set.
struct Inside {
  Inside();
  ~Inside();
};
double processor_seconds();  // of the host, outside of the simulation
}  // namespace sim
