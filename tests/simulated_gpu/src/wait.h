// Waits of the host for what is on streams, and for messages and collectives that are under way.
#pragma once
#include <condition_variable>

#include "pinned.h"

namespace sim {
constexpr auto MESSAGES_END = std::chrono::seconds(120);
int under_way = 0;  // messages, whose end in virtual time is not known before they have really ended
std::condition_variable_any message_ended;

void host_has_waited_for(const Event& event) {
  Lock lock(mutex);
  join(streams[HOST], event);
  arrive_in_pinned_memory();
}
void host_waits_for(const Event& event, const std::string& reported, const std::string& traced = "host waits") {
  Lock lock(mutex);
  record_span(traced, HOST, streams[HOST].time, event.time);
  count("host waits");
  host_has_waited_for(event);
  report("sync", reported);
}
void host_waits_for(int stream, const std::string& reported) {
  Lock lock(mutex);
  host_waits_for(streams[stream], reported);
}
void synchronize_device(int device) {
  Inside inside;
  std::optional<py::gil_scoped_release> released;  // a message may need Python to end
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  std::unique_lock<std::recursive_mutex> lock(mutex);
  bool ended = message_ended.wait_for(lock, MESSAGES_END, [] { return !under_way; });
  TORCH_CHECK(ended, "simulated device: messages that are under way do not end");
  Event all;
  for (auto& [stream, event] : streams)
    if (stream != HOST && device_of(stream) == device) join(all, event);
  host_waits_for(all, "synchronize the device");
}

bool is_done(const Event& event) {  // as the host sees it, who has come to that time
  Lock lock(mutex);
  host_spends(cost("query"));  // so that who looks again and again comes to its time
  bool done = streams[HOST].time >= event.time;
  if (done) host_has_waited_for(event);
  return done;
}
void message_goes(int more) {  // one more is under way, or one less
  Lock lock(mutex);
  under_way += more;
  message_ended.notify_all();
}
}  // namespace sim
