// The devices of this process, their streams and events, as torch asks for them.
//
// Simulated: FXPIPE_GPUS devices of 32 GiB; a default stream for each, and a pool of FXPIPE_GPU_STREAMS streams that is
// given in turns to whoever asks, NCCL's groups included. Not simulated: priorities, CUDA graphs, several contexts.
#pragma once
#include <c10/core/Device.h>

#include "order.h"

namespace sim {
constexpr auto DEVICE = c10::DeviceType::CUDA;
constexpr int MOST_DEVICES = 16;
constexpr size_t MEMORY = size_t(32) << 30;

int device_count();
int current_device();   // of this thread
int current_stream();   // of this thread and its device
int new_stream();       // of this thread's device, out of the pool
int streams_given();    // of this thread's device, until now
void synchronize_device(int device);

// Messages and collectives under way, whose end in virtual time is not known before they have really ended.
void message_begins();
void message_ends();
}  // namespace sim
