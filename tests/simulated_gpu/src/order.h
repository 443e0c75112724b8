// The order that events give to what is put on streams: a vector clock for each stream and for the host.
//
// Kernels run at once, on the host, whatever stream they are put on. What is simulated is what a GPU would know of their
// order: a stream's operations follow each other and what the host had waited for; all else takes an event.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "clock.h"

namespace sim {
constexpr int STREAMS = 4096;                 // of a device
using Order = std::map<int, uint64_t>;        // stream -> how much of it comes before
int stream_number(int device, int id);        // of all devices
std::string stream_name(int stream);          // or HOST
inline int device_of(int stream) { return stream / STREAMS; }

struct Event {
  Order order;
  double time;
};

// What comes before the next operation of a stream, or of the host. To be called with the mutex held.
Order& order_of(int stream);
void join(Order& order, const Order& other);
bool knows(const Order& order, int stream, uint64_t tick);

uint64_t tick(int stream);                // an operation is put on the stream: its number there
void host_knows(const Order& order);      // the host has waited for this: pinned copies arrive
void host_waits_for(int stream);          // for all that is on the stream
void host_waits_for(const Event& event);
void host_waits_for_device(int device);
}  // namespace sim
