// Streams of the devices, and the order that events give to what is put on them: a vector clock for each stream and for
// the host.
//
// Kernels run at once, on the host, whatever stream they are put on. What is simulated is what a GPU would know of
// their order: a stream's operations follow each other and what the host had waited for; all else takes an event. A
// device has a default stream, and a pool of FXPIPE_GPU_STREAMS streams that is given in turns to whoever asks, NCCL's
// groups included. Not simulated: priorities, CUDA graphs, several contexts.
#pragma once
#include <c10/core/Device.h>

#include <map>
#include <mutex>
#include <string>

namespace sim {
constexpr auto DEVICE = c10::DeviceType::CUDA;
constexpr int MOST_DEVICES = 16;
constexpr int STREAMS = 4096;  // of a device; their numbers go through all devices
constexpr int HOST = -1;       // beside the numbers of streams

std::recursive_mutex mutex;  // of all that is simulated in this process
using Lock = std::lock_guard<std::recursive_mutex>;

using Order = std::map<int, uint64_t>;  // stream -> how much of it comes before
struct Event {
  Order order;
  double time = 0;  // virtual, in seconds
};
std::map<int, Event> streams;  // what comes before the next operation of each stream, and of the host

thread_local int current_device = 0;
thread_local std::map<int, int> current_ids;  // of the current stream of each device
int streams_given[MOST_DEVICES];              // of the pool

int number_from(const char* variable, int otherwise, int most) {
  const char* text = getenv(variable);
  return std::min(text ? atoi(text) : otherwise, most);
}
int device_count() {
  static int count = number_from("FXPIPE_GPUS", 4, MOST_DEVICES);
  return count;
}

int stream_number(int device, int id) { return device * STREAMS + id; }
int device_of(int stream) { return stream / STREAMS; }
int current_stream() { return stream_number(current_device, current_ids[current_device]); }
int new_stream(int device) {
  static int pool = number_from("FXPIPE_GPU_STREAMS", 32, STREAMS - 1);
  Lock lock(mutex);
  return stream_number(device, 1 + streams_given[device]++ % pool);
}
std::string stream_name(int stream) {
  return "stream " + std::to_string(stream % STREAMS) + " of device " + std::to_string(device_of(stream));
}

void join(Order& order, const Order& other) {
  for (auto& [stream, tick] : other) order[stream] = std::max(order[stream], tick);
}
void join(Event& event, const Event& other) {
  join(event.order, other.order);
  event.time = std::max(event.time, other.time);
}
void join(int stream, const Event& event) {
  Lock lock(mutex);
  join(streams[stream], event);
}
double time_of(int stream) {
  Lock lock(mutex);
  return streams[stream].time;
}
bool knows(const Order& order, int stream, uint64_t tick) {
  auto found = order.find(stream);
  return found != order.end() && found->second >= tick;
}
bool host_knows(int stream, uint64_t tick) { return knows(streams[HOST].order, stream, tick); }

uint64_t tick(int stream) {  // an operation is put on the stream: its number there
  Lock lock(mutex);
  join(streams[stream].order, streams[HOST].order);
  return ++streams[stream].order[stream];
}
}  // namespace sim
