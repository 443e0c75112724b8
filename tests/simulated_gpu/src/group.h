// A process group with NCCL's ways, over a gloo group of the same ranks.
//
// Simulated: collectives and batches of messages share a lane (lane.h); messages with one peer, both ways, have one of
// their own. A message waits for what was on the current stream, and what the stream gets after ``wait`` is behind it.
// A send is over when its receive is: both begin once both ends are ready. A collective begins once all ranks are, and
// takes ``ring_latency`` and the bytes that each rank sends by a ring. Not simulated: sends of small messages that are
// over at once, sums in NCCL's order, communicators and their memory.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> hosts, int rank, int size);
}
