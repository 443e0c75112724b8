// The devices of this process, their streams and events, as torch asks for them: see device.h.
#include "device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <condition_variable>

#include "generator.h"
#include "memory.h"
#include "pinned.h"
#include "report.h"

namespace sim {
namespace {
constexpr auto MESSAGES_END = std::chrono::seconds(120);

thread_local int device_now = 0;
thread_local std::map<int, int> streams_now;
int given[MOST_DEVICES];
int under_way = 0;
std::condition_variable_any message_ended;

int number_from(const char* variable, int otherwise, int most) {
  const char* text = getenv(variable);
  return std::min(text ? atoi(text) : otherwise, most);
}
int number_of(const c10::Stream& stream) { return stream_number(stream.device_index(), stream.id()); }
int index_of(c10::Device device) { return device.has_index() ? device.index() : device_now; }
c10::Stream stream_of(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE, device), id);
}
const Event& event_at(void* event) { return *static_cast<Event*>(event); }

struct WithoutPython {  // while this thread waits for one that may need Python
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutPython() {
    if (state) PyEval_RestoreThread(state);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {DEVICE, static_cast<c10::DeviceIndex>(device_now)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_now = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index_of(device), streams_now[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static int pool = number_from("FXPIPE_GPU_STREAMS", 32, STREAMS - 1);
    Lock lock(mutex);
    return stream_of(index_of(device), 1 + given[index_of(device)]++ % pool);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams_now[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id() + 1));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Inside inside;
    Lock lock(mutex);
    int number = number_of(stream);
    return is_done({order_of(number), time_of(number)});
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Inside inside;
    host_waits_for(number_of(stream));
    flush_reports();
    report("sync", "synchronize a stream");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on_stream(data.get(), number_of(stream));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Inside inside;
    Lock lock(mutex);
    if (!*event) *event = new Event();
    int number = number_of(stream);
    tick(number);
    *static_cast<Event*>(*event) = {order_of(number), enqueue(number, 0, "event", costs.event)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Inside inside;
    if (!event) return;
    Lock lock(mutex);
    int number = number_of(stream);
    join(order_of(number), event_at(event).order);
    host_spends(costs.event);
    reaches(number, event_at(event).time);
  }
  bool queryEvent(void* event) const override {
    Inside inside;
    return !event || is_done(event_at(event));
  }
  void synchronizeEvent(void* event) const override {
    Inside inside;
    if (event) host_waits_for(event_at(event));
    flush_reports();
    report("sync", "synchronize an event");
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    return (event_at(end).time - event_at(begin).time) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  static bool is_done(const Event& event) {
    Lock lock(mutex);
    host_spends(costs.query);  // so that who looks again and again comes to its time
    if (time_of(HOST) < event.time) return false;
    host_knows(event.order);
    return true;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return device_now; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({DEVICE, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    c10::DeviceIndex before = device_now;
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? device_now : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? device_now : device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return {DEVICE, static_cast<c10::DeviceIndex>(device_with(pointer))};
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);  // torch looks for this name
}  // namespace

int device_count() {
  static int count = number_from("FXPIPE_GPUS", 4, MOST_DEVICES);
  return count;
}
int current_device() { return device_now; }
int current_stream() { return stream_number(device_now, streams_now[device_now]); }
int new_stream() { return number_of(Guard().getNewStream(Guard().getDevice())); }
int streams_given() {
  Lock lock(mutex);
  return given[device_now];
}

void synchronize_device(int device) {
  Inside inside;
  {
    WithoutPython released;
    std::unique_lock<std::recursive_mutex> lock(mutex);
    bool ended = message_ended.wait_for(lock, MESSAGES_END, [] { return !under_way; });
    TORCH_CHECK(ended, "simulated device: messages that are under way do not end");
    host_waits_for_device(device);
  }
  flush_reports();
  report("sync", "synchronize the device");
}
void message_begins() {
  Lock lock(mutex);
  under_way++;
}
void message_ends() {
  Lock lock(mutex);
  under_way--;
  message_ended.notify_all();
}
}  // namespace sim
