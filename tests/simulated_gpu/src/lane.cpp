// A lane of a process group: see lane.h.
#include "lane.h"

#include <shared_mutex>
#include <thread>

namespace sim {
namespace {
std::shared_mutex ending;
bool ended = false;
}  // namespace

void with_python(const std::function<void()>& call, const std::function<void()>& at_the_end) {
  std::shared_lock<std::shared_mutex> lock(ending);
  ended ? at_the_end() : call();
}

std::shared_ptr<Lane> Lane::start() {
  auto lane = std::make_shared<Lane>();
  std::thread([lane] {
    for (Job job; lane->next(job);) {
      job();
      with_python([&] { job = nullptr; }, [&] { new Job(std::move(job)); });  // at the end it is kept for ever
    }
  }).detach();
  return lane;
}
void Lane::put(Job job) {
  std::lock_guard<std::mutex> lock(guard);
  jobs.push_back(std::move(job));
  changed.notify_all();
}
void Lane::close() {
  std::lock_guard<std::mutex> lock(guard);
  closed = true;
  changed.notify_all();
}
bool Lane::next(Job& job) {
  std::unique_lock<std::mutex> lock(guard);
  changed.wait(lock, [&] { return closed || !jobs.empty(); });
  if (jobs.empty()) return false;
  job = std::move(jobs.front());
  jobs.pop_front();
  return true;
}

void end_lanes() {
  std::unique_lock<std::shared_mutex> alone(ending);
  ended = true;
}
}  // namespace sim
