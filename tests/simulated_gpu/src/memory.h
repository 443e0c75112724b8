// The devices' memory, which the host cannot touch, and who has accessed which bytes of it.
//
// Simulated: a pointer of the device is of pages without any right (the host faults on it); what it stands for lies in
// pages beside them. New and freed memory is NaN. A block belongs to the stream on which it was allocated, as with
// torch's caching allocator: a later block of that stream may be given the same memory. An access that no event orders
// behind another one is a race, one of memory that another stream may have been given a fault of lifetime: both are
// seen in every run of that path, whatever really came first. Not simulated: fragmentation, and the cache's segments.
#pragma once
#include <ATen/core/Tensor.h>

#include "order.h"

namespace sim {
c10::Allocator* device_allocator();
char* memory_behind(const void* pointer);  // what a pointer of a device stands for, or nullptr
int device_with(const void* pointer);
void use_on_stream(const void* pointer, int stream);  // record_stream

// An operation of that stream and tick reads or writes a dense tensor.
void access(const at::Tensor& tensor, bool write, int stream, uint64_t tick, const std::string& operation);
}  // namespace sim
