// A lane of a process group: a FIFO of messages, each of which begins when the one before is over, and a stream.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>

#include "order.h"

namespace sim {
class Lane {
 public:
  using Job = std::function<void()>;
  static std::shared_ptr<Lane> start();
  void put(Job job);
  void close();  // when the jobs that are there are over

  int stream = HOST;  // until the first message

 private:
  std::mutex guard;
  std::condition_variable changed;
  std::deque<Job> jobs;
  bool closed = false;
  bool next(Job& job);
};

// What may need Python: callbacks of a result, and letting go of tensors. The other call, once the interpreter ends.
void with_python(const std::function<void()>& call, const std::function<void()>& at_the_end);
void end_lanes();  // the interpreter ends; to be called without its lock
}  // namespace sim
