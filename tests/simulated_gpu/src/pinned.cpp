// Pinned memory of the host, whose copies arrive late: see pinned.h.
#include "pinned.h"

#include <cstdlib>
#include <cstring>
#include <deque>

#include "report.h"

namespace sim {
namespace {
struct Copy {
  int stream;
  uint64_t tick;
  char* pinned;
  std::string bytes;
  bool to_host;
  char* end() const { return pinned + bytes.size(); }
};
std::map<char*, size_t> blocks;  // start -> size
std::deque<Copy> copies;

void release(void* pointer) {
  Lock lock(mutex);
  auto block = blocks.find(static_cast<char*>(pointer));
  if (block == blocks.end()) return;
  auto [start, size] = *block;
  std::erase_if(copies, [&](const Copy& copy) { return copy.pinned >= start && copy.pinned < start + size; });
  blocks.erase(block);
  free(pointer);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    char* start = static_cast<char*>(aligned_alloc(64, (size + 64) / 64 * 64));
    Lock lock(mutex);
    blocks[start] = size + 1;  // an empty block is one, too
    return {start, start, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};
}  // namespace

c10::Allocator* pinned_allocator() {
  static Allocator allocator;
  return &allocator;
}
bool is_pinned(const void* pointer) {
  Lock lock(mutex);
  auto block = blocks.upper_bound(const_cast<char*>(static_cast<const char*>(pointer)));
  if (block == blocks.begin()) return false;
  --block;
  return pointer < block->first + block->second;
}

void copy_out_later(int stream, uint64_t tick, char* pinned, std::string bytes) {
  Lock lock(mutex);
  std::erase_if(copies, [&](const Copy& copy) {  // what has been read before may be overwritten
    bool overlaps = copy.pinned < pinned + bytes.size() && pinned < copy.end();
    return !copy.to_host && overlaps && knows(order_of(stream), copy.stream, copy.tick);
  });
  memset(pinned, 0xFF, bytes.size());
  copies.push_back({stream, tick, pinned, std::move(bytes), true});
}
std::string copy_in_later(int stream, uint64_t tick, char* pinned, size_t size) {
  Lock lock(mutex);
  std::string bytes(pinned, size);
  for (const Copy& copy : copies) {  // what arrives before, though the host has not waited for it
    char *begin = std::max(pinned, copy.pinned), *end = std::min(pinned + size, copy.end());
    if (!copy.to_host || begin >= end) continue;
    if (knows(order_of(stream), copy.stream, copy.tick))
      memcpy(bytes.data() + (begin - pinned), copy.bytes.data() + (begin - copy.pinned), end - begin);
    else
      report_later("race", "a copy to the device reads pinned memory that no event orders behind the copy into it");
  }
  copies.push_back({stream, tick, pinned, bytes, false});
  return bytes;
}
void arrive(const Order& host) {
  std::erase_if(copies, [&](const Copy& copy) {
    if (!knows(host, copy.stream, copy.tick)) return false;
    if (copy.to_host)
      memcpy(copy.pinned, copy.bytes.data(), copy.bytes.size());
    else if (memcmp(copy.pinned, copy.bytes.data(), copy.bytes.size()))
      report_later("race", "pinned memory was written before its copy to the device was done");
    return true;
  });
}
}  // namespace sim
