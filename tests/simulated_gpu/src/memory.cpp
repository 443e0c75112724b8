// The devices' memory, which the host cannot touch, and who has accessed which bytes of it: see memory.h.
#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <set>

#include "device.h"
#include "report.h"

namespace sim {
namespace {
constexpr size_t ROUNDING = 512;

struct Access {
  size_t begin, end;  // bytes of the block
  int stream;
  uint64_t tick;
  bool write;
  std::string operation;
};
struct Block {
  char* start;
  size_t size;
  int stream;  // that it belongs to
  uint64_t number;
  std::vector<Access> accesses;
  std::set<int> recorded;  // streams that record_stream has named
};
struct Use {  // by a stream, of memory that its owner has freed without waiting for it
  int owner, stream;
  uint64_t tick, number;  // blocks up to this number were there before
  std::string operation;
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

Block* block_at(const void* pointer) {
  auto block = blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (block == blocks.begin()) return nullptr;
  --block;
  return pointer < block->second.start + block->second.size ? &block->second : nullptr;
}

void free_block(Block& block) {
  Order owner = order_of(block.stream);
  join(owner, order_of(HOST));
  for (const Access& a : block.accesses) {
    if (a.stream == block.stream || block.recorded.count(a.stream) || knows(owner, a.stream, a.tick)) continue;
    report_later("early", "memory of " + stream_name(block.stream) + " is freed, and " + a.operation + " on " +
                              stream_name(a.stream) + " may still use it");
    uses_of_freed.push_back({block.stream, a.stream, a.tick, allocations, a.operation});
  }
  Region& region = regions[device_of(block.stream)];
  memset(memory_behind(block.start), 0xFF, block.size);
  region.live -= block.size;
  region.unused.emplace(block.size, block.start);
}

void release(void* pointer) {
  Inside inside;
  {
    Lock lock(mutex);
    auto block = blocks.find(static_cast<char*>(pointer));
    if (block == blocks.end()) return;
    free_block(block->second);
    blocks.erase(block);
  }
  flush_reports();
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    if (!size) return {nullptr, nullptr, &release, c10::Device(DEVICE, device)};
    Inside inside;
    Lock lock(mutex);
    Region& region = regions[device];
    if (!region.pages) {
      region.pages = map_pages(PROT_NONE);
      region.behind = map_pages(PROT_READ | PROT_WRITE);
    }
    size = (size + ROUNDING - 1) / ROUNDING * ROUNDING;
    char* start;
    if (auto unused = region.unused.find(size); unused != region.unused.end()) {
      start = unused->second;
      region.unused.erase(unused);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, region.reserved + size <= MEMORY, "CUDA out of memory (simulated)");
      start = region.pages + region.reserved;
      region.reserved += size;
      memset(memory_behind(start), 0xFF, size);
    }
    region.live += size;
    region.peak = std::max(region.peak, region.live);
    blocks[start] = Block{start, size, current_stream(), ++allocations, {}, {}};
    return {start, start, &release, c10::Device(DEVICE, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    memcpy(memory_behind(to), memory_behind(from), size);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    use_on_stream(data.get(), stream_number(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(mutex);
    const Region& region = regions[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& stat, size_t current, size_t peak) {
      stat[0].current = current;  // of all pools
      stat[0].peak = peak;
    };
    set(stats.allocated_bytes, region.live, region.peak);
    set(stats.active_bytes, region.live, region.peak);
    set(stats.requested_bytes, region.live, region.peak);
    set(stats.reserved_bytes, region.reserved, region.reserved);
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
void check_lifetime(const Block& block, int stream, const std::string& operation) {
  std::erase_if(uses_of_freed, [&](const Use& use) {
    if (knows(order_of(HOST), use.stream, use.tick) || knows(order_of(use.owner), use.stream, use.tick)) return true;
    bool reused = use.owner == block.stream && use.number < block.number;
    if (!reused || knows(order_of(stream), use.stream, use.tick)) return false;
    report_later("lifetime", operation + " on " + stream_name(stream) + " may be given the memory that " +
                                 use.operation + " on " + stream_name(use.stream) + " still uses: " +
                                 stream_name(use.owner) + " has freed it and does not wait; record_stream, or keep it");
    return true;
  });
}

// Reports accesses that do not come before this one, and forgets those that nothing can race with any more.
void check_races(Block& block, const Access& a) {
  const Order& order = order_of(a.stream);
  std::erase_if(block.accesses, [&](const Access& other) {
    bool before = other.stream == a.stream || knows(order, other.stream, other.tick);
    if (other.begin < a.end && a.begin < other.end && !before && (other.write || a.write))
      report_later("race", a.operation + (a.write ? " writes on " : " reads on ") + stream_name(a.stream) + " what " +
                               other.operation + (other.write ? " writes on " : " reads on ") +
                               stream_name(other.stream) + ": no event orders them");
    bool inside = a.begin <= other.begin && other.end <= a.end;
    bool replaced = before && inside && (a.write || (!other.write && other.stream == a.stream));
    return replaced || knows(order_of(HOST), other.stream, other.tick);
  });
}
}  // namespace

c10::Allocator* device_allocator() { return &allocator; }
char* memory_behind(const void* pointer) {
  const char* at = static_cast<const char*>(pointer);
  for (const Region& region : regions)
    if (region.pages && at >= region.pages && at < region.pages + MEMORY) return region.behind + (at - region.pages);
  return nullptr;
}
int device_with(const void* pointer) {
  Lock lock(mutex);
  Block* block = block_at(pointer);
  return block ? device_of(block->stream) : 0;
}
void use_on_stream(const void* pointer, int stream) {
  Lock lock(mutex);
  if (Block* block = block_at(pointer)) block->recorded.insert(stream);
}

void access(const at::Tensor& tensor, bool write, int stream, uint64_t tick, const std::string& operation) {
  if (!tensor.defined() || !tensor.numel()) return;
  Lock lock(mutex);
  char* start = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  Block* block = block_at(start);
  if (!block) return;
  size_t begin = (start - block->start) + tensor.storage_offset() * tensor.itemsize(), last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  Access a{begin, begin + (last + 1) * tensor.itemsize(), stream, tick, write, operation};
  check_lifetime(*block, stream, operation);
  check_races(*block, a);
  block->accesses.push_back(std::move(a));
}
}  // namespace sim
