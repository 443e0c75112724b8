// The devices' memory, which the host cannot touch, and who has accessed which bytes of it.
//
// Simulated: 32 GiB each; a pointer of the device is of pages without any right (the host faults on it); what it stands
// for lies in pages beside them. New and freed memory is NaN. A block belongs to the stream on which it was allocated,
// as with torch's caching allocator: a later block of that stream may be given the same memory. An access that no event
// orders behind another one is a race, one of memory that another stream may have been given a fault of lifetime: both
// are seen in every run of that path, whatever really came first. Not simulated: fragmentation, the cache's segments.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <set>

#include "clock.h"

namespace sim {
constexpr size_t MEMORY = size_t(32) << 30;
constexpr size_t ROUNDING = 512;

struct Access {
  size_t begin, end;  // bytes of the block
  int stream;
  uint64_t tick;
  bool write;
  std::string operation;
  std::string text() const { return operation + (write ? " writes on " : " reads on ") + stream_name(stream); }
};
struct Block {
  char* start;
  size_t size;
  int stream;  // that it belongs to
  uint64_t number;
  std::vector<Access> accesses;
  std::set<int> recorded;  // streams that record_stream has named
};
struct Use {  // of memory that its owner, a stream, has freed without waiting for it
  int owner;
  Access access;
  uint64_t number;  // blocks up to this number were there before
};
struct Region {
  char *pages = nullptr, *behind = nullptr;
  size_t live = 0, peak = 0, reserved = 0;
  std::multimap<size_t, char*> unused;
};

std::map<char*, Block> blocks;
std::vector<Use> uses_of_freed;
uint64_t allocations = 0;
Region regions[MOST_DEVICES];

char* map_pages(int rights) {
  void* pages = mmap(nullptr, MEMORY, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(pages != MAP_FAILED, "simulated device: no address space of ", MEMORY, " bytes");
  return static_cast<char*>(pages);
}
char* memory_behind(const void* pointer) {  // what a pointer of a device stands for, or nullptr
  const char* at = static_cast<const char*>(pointer);
  for (const Region& region : regions)
    if (region.pages && at >= region.pages && at < region.pages + MEMORY) return region.behind + (at - region.pages);
  return nullptr;
}
Block* block_at(const void* pointer) {
  auto block = blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (block == blocks.begin()) return nullptr;
  --block;
  return pointer < block->second.start + block->second.size ? &block->second : nullptr;
}
void use_on_stream(const c10::DataPtr& data, c10::Stream stream) {  // record_stream
  Lock lock(mutex);
  Block* block = block_at(data.get());
  if (block) block->recorded.insert(stream_number(stream.device_index(), stream.id()));
}

void release(void* pointer) {
  Inside inside;
  Lock lock(mutex);
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return;  // the process ends
  Block& block = found->second;
  Order owner = streams[block.stream].order;
  join(owner, streams[HOST].order);
  for (const Access& a : block.accesses) {
    if (a.stream == block.stream || block.recorded.count(a.stream) || knows(owner, a.stream, a.tick)) continue;
    report("early", "memory of " + stream_name(block.stream) + " is freed, and " + a.operation + " on " +
                        stream_name(a.stream) + " may still use it");
    uses_of_freed.push_back({block.stream, a, allocations});
  }
  memset(memory_behind(block.start), 0xFF, block.size);
  Region& region = regions[device_of(block.stream)];
  region.live -= block.size;
  region.unused.emplace(block.size, block.start);
  blocks.erase(found);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(DEVICE, current_device);
    if (!size) return {nullptr, device};
    Inside inside;
    Lock lock(mutex);
    Region& region = regions[current_device];
    if (!region.pages) {
      region.pages = map_pages(PROT_NONE);
      region.behind = map_pages(PROT_READ | PROT_WRITE);
    }
    size = (size + ROUNDING - 1) / ROUNDING * ROUNDING;
    char* start = region.pages + region.reserved;
    if (auto unused = region.unused.find(size); unused != region.unused.end()) {
      start = unused->second;
      region.unused.erase(unused);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, region.reserved + size <= MEMORY, "CUDA out of memory (simulated)");
      region.reserved += size;
      memset(memory_behind(start), 0xFF, size);
    }
    region.live += size;
    region.peak = std::max(region.peak, region.live);
    blocks[start] = Block{start, size, current_stream(), ++allocations, {}, {}};
    return {start, start, &release, device};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    memcpy(memory_behind(to), memory_behind(from), size);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { use_on_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(mutex);
    const Region& region = regions[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = region.live;  // of all pools
      (*bytes)[0].peak = region.peak;
    }
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = region.reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(mutex);
    regions[device].peak = regions[device].live;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(mutex);
    return {MEMORY - regions[device].live, MEMORY};
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

// What a stream frees, its next blocks get: the block may be memory that another stream still uses.
void check_lifetime(const Block& block, const Access& now) {
  std::erase_if(uses_of_freed, [&](const Use& use) {
    auto& [owner, then, number] = use;
    if (host_knows(then.stream, then.tick) || knows(streams[owner].order, then.stream, then.tick)) return true;
    bool reused = owner == block.stream && number < block.number;
    if (!reused || knows(streams[now.stream].order, then.stream, then.tick)) return false;
    report("lifetime", now.operation + " on " + stream_name(now.stream) + " may be given the memory that " +
                           then.operation + " on " + stream_name(then.stream) + " still uses: " + stream_name(owner) +
                           " has freed it and does not wait; record_stream, or keep it");
    return true;
  });
}

// Reports accesses that do not come before this one, and forgets those that nothing can race with any more.
void check_races(Block& block, const Access& now) {
  std::erase_if(block.accesses, [&](const Access& then) {
    bool before = then.stream == now.stream || knows(streams[now.stream].order, then.stream, then.tick);
    if (then.begin < now.end && now.begin < then.end && !before && (then.write || now.write))
      report("race", now.text() + " what " + then.text() + ": no event orders them");
    bool inside = now.begin <= then.begin && then.end <= now.end;
    bool replaced = before && inside && (now.write || (!then.write && then.stream == now.stream));
    return replaced || host_knows(then.stream, then.tick);
  });
}

// An operation of that stream and tick reads or writes a dense tensor, if that is of a device.
void access(const at::Tensor& tensor, bool write, int stream, uint64_t tick, const std::string& operation) {
  if (!tensor.defined() || !tensor.numel()) return;
  Lock lock(mutex);
  char* start = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  Block* block = block_at(start);
  if (!block) return;
  size_t begin = (start - block->start) + tensor.storage_offset() * tensor.itemsize(), last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  Access now{begin, begin + (last + 1) * tensor.itemsize(), stream, tick, write, operation};
  check_lifetime(*block, now);
  check_races(*block, now);
  block->accesses.push_back(std::move(now));
}
}  // namespace sim
