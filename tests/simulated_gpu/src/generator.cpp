// Random numbers of the device: see generator.h.
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

#include "device.h"

namespace sim {
namespace {
struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  Generator(int device, at::Generator host)
      : GeneratorImpl(c10::Device(DEVICE, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(device().index(), host.clone()); }
};
}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}
const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* generators = new std::vector<at::Generator>();
    for (int each = 0; each < device_count(); each++) generators->push_back(new_generator(each));
    return generators;
  }();
  return (*all)[device];
}
at::Generator host_generator(const at::Generator& generator) {
  if (!generator.defined() || generator.device().type() != DEVICE) return generator;
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}
}  // namespace sim
