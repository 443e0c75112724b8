// Pinned memory of the host, whose copies arrive late.
//
// Simulated: a copy into pinned memory is not there before the host has waited for it (the memory is NaN until then),
// and one out of pinned memory finds what the host has overwritten before it waited. Not simulated: its limited size.
#pragma once
#include <c10/core/Allocator.h>

#include <cstring>
#include <deque>

#include "clock.h"

namespace sim {
struct PinnedCopy {
  int stream;
  uint64_t tick;
  char* pinned;
  std::string bytes;
  bool to_host;
  char* end() const { return pinned + bytes.size(); }
};
std::map<char*, size_t> pinned_blocks;  // start -> size
std::deque<PinnedCopy> pinned_copies;

void release_pinned(void* pointer) {
  Lock lock(mutex);
  auto block = pinned_blocks.find(static_cast<char*>(pointer));
  if (block == pinned_blocks.end()) return;  // the process ends
  char *start = block->first, *end = start + block->second;
  std::erase_if(pinned_copies, [&](const PinnedCopy& copy) { return copy.pinned >= start && copy.pinned < end; });
  pinned_blocks.erase(block);
  free(pointer);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    char* start = static_cast<char*>(aligned_alloc(64, (size + 64) / 64 * 64));
    Lock lock(mutex);
    pinned_blocks[start] = size + 1;  // an empty block is one, too
    return {start, start, &release_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* pointer) {
  Lock lock(mutex);
  auto block = pinned_blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  return block != pinned_blocks.begin() && pointer < (--block)->first + block->second;
}

// A copy arrives in pinned memory.
void copy_out_later(int stream, uint64_t tick, char* pinned, std::string bytes) {
  Lock lock(mutex);
  std::erase_if(pinned_copies, [&](const PinnedCopy& copy) {  // what has been read before may be overwritten
    bool overlaps = copy.pinned < pinned + bytes.size() && pinned < copy.end();
    return !copy.to_host && overlaps && knows(streams[stream].order, copy.stream, copy.tick);
  });
  memset(pinned, 0xFF, bytes.size());
  pinned_copies.push_back({stream, tick, pinned, std::move(bytes), true});
}
// What a copy finds in pinned memory.
std::string copy_in_later(int stream, uint64_t tick, char* pinned, size_t size) {
  Lock lock(mutex);
  std::string bytes(pinned, size);
  for (const PinnedCopy& copy : pinned_copies) {  // what arrives before, though the host has not waited for it
    char *begin = std::max(pinned, copy.pinned), *end = std::min(pinned + size, copy.end());
    if (!copy.to_host || begin >= end) continue;
    if (knows(streams[stream].order, copy.stream, copy.tick))
      memcpy(bytes.data() + (begin - pinned), copy.bytes.data() + (begin - copy.pinned), end - begin);
    else
      report("race", "a copy to the device reads pinned memory that no event orders behind the copy into it");
  }
  pinned_copies.push_back({stream, tick, pinned, bytes, false});
  return bytes;
}
// What the host has waited for, with the mutex held.
void arrive_in_pinned_memory() {
  std::erase_if(pinned_copies, [&](const PinnedCopy& copy) {
    if (!host_knows(copy.stream, copy.tick)) return false;
    if (copy.to_host)
      memcpy(copy.pinned, copy.bytes.data(), copy.bytes.size());
    else if (memcmp(copy.pinned, copy.bytes.data(), copy.bytes.size()))
      report("race", "pinned memory was written before its copy to the device was done");
    return true;
  });
}
}  // namespace sim
