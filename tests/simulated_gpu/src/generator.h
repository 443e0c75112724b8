// Random numbers of the device: those of a generator of the CPU that says it is the device's.
//
// Not simulated: CUDA's numbers (Philox), which differ from the CPU's for the same seed, and offsets.
#pragma once
#include <ATen/core/Generator.h>

namespace sim {
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
at::Generator host_generator(const at::Generator& generator);  // the CPU's behind a device's
}  // namespace sim
