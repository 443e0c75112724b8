// The order that events give to what is put on streams: see order.h.
#include "order.h"

#include <algorithm>

#include "pinned.h"

namespace sim {
namespace {
std::map<int, Order> orders;

void host_waits(const Order& order, double until, const std::string& what) {
  record_span(what, HOST, time_of(HOST), until);
  count("host waits");
  reaches(HOST, until);
  host_knows(order);
}
}  // namespace

int stream_number(int device, int id) { return device * STREAMS + id; }
std::string stream_name(int stream) {
  if (stream == HOST) return "the host";
  return "stream " + std::to_string(stream % STREAMS) + " of device " + std::to_string(device_of(stream));
}

Order& order_of(int stream) { return orders[stream]; }
void join(Order& order, const Order& other) {
  for (auto& [stream, tick] : other) order[stream] = std::max(order[stream], tick);
}
bool knows(const Order& order, int stream, uint64_t tick) {
  auto found = order.find(stream);
  return found != order.end() && found->second >= tick;
}

uint64_t tick(int stream) {
  Lock lock(mutex);
  Order& order = orders[stream];
  join(order, orders[HOST]);
  return ++order[stream];
}

void host_knows(const Order& order) {
  Lock lock(mutex);
  join(orders[HOST], order);
  arrive(orders[HOST]);
}
void host_waits_for(int stream) {
  Lock lock(mutex);
  host_waits(orders[stream], time_of(stream), "host waits");
}
void host_waits_for(const Event& event) {
  Lock lock(mutex);
  host_waits(event.order, event.time, "host waits for an event");
}
void host_waits_for_device(int device) {
  Lock lock(mutex);
  Order all;
  double until = time_of(HOST);
  for (auto& [stream, order] : orders) {
    if (stream == HOST || device_of(stream) != device) continue;
    join(all, order);
    until = std::max(until, time_of(stream));
  }
  host_waits(all, until, "host waits");
}
}  // namespace sim
