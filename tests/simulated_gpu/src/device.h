// The devices of this process as torch asks for them: streams, events, random numbers.
//
// Simulated: FXPIPE_GPUS devices. Random numbers are those of a generator of the CPU that says it is the device's. Not
// simulated: CUDA's numbers (Philox), which differ from the CPU's for the same seed, and offsets.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "wait.h"

namespace sim {
int number_of(const c10::Stream& stream) { return stream_number(stream.device_index(), stream.id()); }
c10::Stream stream_of(c10::Device device, int id) {
  c10::Device indexed(DEVICE, device.has_index() ? device.index() : current_device);
  return c10::Stream(c10::Stream::UNSAFE, indexed, id);
}
Event& event_at(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {DEVICE, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  c10::Stream getStream(c10::Device device) const override {
    auto stream = getDefaultStream(device);
    return stream_of(stream.device(), current_ids[stream.device_index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    auto stream = getDefaultStream(device);
    return stream_of(stream.device(), new_stream(stream.device_index()) % STREAMS);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_ids[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id() + 1));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Inside inside;
    Lock lock(mutex);
    return is_done(streams[number_of(stream)]);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Inside inside;
    host_waits_for(number_of(stream), "synchronize a stream");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on_stream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Inside inside;
    Lock lock(mutex);
    if (!*event) *event = new Event();
    int number = number_of(stream);
    tick(number);
    enqueue(number, 0, "event", cost("event"));
    event_at(*event) = streams[number];
  }
  void block(void* event, const c10::Stream& stream) const override {
    Inside inside;
    host_spends(cost("event"));
    join(number_of(stream), event_at(event));
  }
  bool queryEvent(void* event) const override {
    Inside inside;
    return is_done(event_at(event));
  }
  void synchronizeEvent(void* event) const override {
    Inside inside;
    host_waits_for(event_at(event), "synchronize an event", "host waits for an event");
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return (event_at(end).time - event_at(begin).time) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  Generator(int device, at::Generator host)
      : GeneratorImpl({DEVICE, static_cast<c10::DeviceIndex>(device)}, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(device().index(), host.clone()); }
};
at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}
const at::Generator& default_generator(int device) {
  static auto* all = new std::map<int, at::Generator>();  // never destroyed
  Lock lock(mutex);
  auto& generator = (*all)[device];
  if (!generator.defined()) generator = new_generator(device);
  return generator;
}
at::Generator host_generator(const at::Generator& generator) {  // the CPU's behind a device's
  if (!generator.defined() || generator.device().type() != DEVICE) return generator;
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return sim::current_device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? sim::current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? sim::current_device : device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* pointer) const override {
    Lock lock(mutex);
    Block* block = block_at(pointer);
    return {DEVICE, static_cast<c10::DeviceIndex>(block ? device_of(block->stream) : 0)};
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);  // torch looks for this name
}  // namespace sim
