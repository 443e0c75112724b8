// A process group with NCCL's ways, over a gloo group of the same ranks.
//
// Simulated: collectives and batches of messages share a lane, on a stream of its own, where one begins when the one
// before is over; messages with one peer, both ways, have another. A message waits for what was on the current stream,
// and what the stream gets after ``wait`` is behind it. A send is over when its receive is: both begin once both ends
// are ready. A collective begins once all ranks are, and takes ``ring_latency`` and the bytes that each rank sends by a
// ring. Not simulated: sends of small messages that are over at once, sums in NCCL's order, communicators.
#pragma once
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <future>
#include <numeric>
#include <shared_mutex>
#include <thread>

#include "kernel.h"

namespace sim {
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;
using Hosts = c10::intrusive_ptr<c10d::Backend>;
using Handle = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;
constexpr int ALL = -1;  // the lane of collectives, beside those of peers
constexpr auto LONG = std::chrono::minutes(10);
enum Tag { MESSAGE = 0, BATCH = 4 };  // of gloo; behind each those of its clocks

// Threads of messages need Python for callbacks of results and to let go of tensors, but not once the interpreter ends.
std::shared_mutex ending;
bool ended = false;

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, std::string what, Tensors in, Tensors out)
      : c10d::Work(rank, type), what(std::move(what)), inputs(std::move(in)), outputs(std::move(out)),
        future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  // The host of a real run goes on here, and its stream stands still. All that it puts on the stream later is behind
  // this, so that standing still is the same, but for what other streams do meanwhile. Its virtual time goes on.
  bool wait(std::chrono::milliseconds timeout) override {
    Inside inside;
    Tensors dropped;  // behind the locks: a tensor that Python has seen takes Python's lock to go
    std::unique_lock<std::mutex> lock(mutex_);
    bool over = cv_.wait_for(lock, timeout.count() > 0 ? timeout : LONG, [&] { return completed_; });
    TORCH_CHECK(over, "simulated NCCL: Timed out waiting for ", what);
    if (exception_) std::rethrow_exception(exception_);
    Lock all(mutex);
    int stream = current_stream();
    host_spends(cost("event"));
    record_span("wait for " + what, stream, streams[stream].time, end.time);
    join(streams[stream], end);
    dropped.swap(inputs);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  Tensors result() override { return outputs; }

  void is_over(double time, std::exception_ptr error) {
    end.time = time;
    finish(error);
  }
  void complete_future() {
    exception_ ? future->setErrorIfNeeded(exception_) : future->markCompleted(at::IValue(outputs));
  }

  const std::string what;
  Event end;  // its time is there once the work is over
  Tensors inputs, outputs;  // inputs are kept until somebody waits

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

struct Message {
  bool sends;
  int peer;
  at::Tensor tensor;
};
struct Result {
  Tensors outputs;  // of the host, flat
  double end;
};

at::Tensor flat(const at::Tensor& tensor) {
  return on_host(tensor).as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}
at::Tensor host_tensor(std::vector<double> values) {
  return at::tensor(values, at::TensorOptions().dtype(at::kDouble).device(c10::kCPU));
}
at::Tensor host_empty(int64_t count, const at::Tensor& like) {
  return at::empty({count}, like.options().device(c10::kCPU));
}

class Group final : public c10d::Backend {
 public:
  Group(Hosts hosts, int rank, int size) : Backend(rank, size), hosts(std::move(hosts)) {}
  void shutdown() override { closed = true; }
  void abort() override { shutdown(); }
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  bool supportsCoalescing() const override { return true; }

  Handle send(Tensors& tensors, int peer, int) override { return message({true, peer, tensors[0]}); }
  Handle recv(Tensors& tensors, int peer, int) override { return message({false, peer, tensors[0]}); }
  void startCoalescing() override {
    coalescing = true;
    batch.clear();
    last = {};
  }
  Handle endCoalescing() override {
    coalescing = false;
    if (batch.empty()) return std::move(last);
    std::string what = "batch:";
    for (const Message& message : batch) what += (message.sends ? " to " : " from ") + std::to_string(message.peer);
    return exchange(std::move(batch), ALL, BATCH, OpType::COALESCED, what);
  }

  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return collective("all_reduce", OpType::ALLREDUCE, tensors, tensors, all_reduced(options.reduceOp));
  }
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto out = options.rootRank == rank_ ? tensors : Tensors();
    return collective("reduce", OpType::REDUCE, tensors, out, all_reduced(options.reduceOp));
  }
  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return collective("broadcast", OpType::BROADCAST, tensors, tensors, [=, this](Tensors in) {
      hosts->broadcast(in, options)->wait();
      return in;
    });
  }
  Handle allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions&) override {
    return collective("all_gather", OpType::ALLGATHER, in, out[0], gathered_parts());
  }
  Handle _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    return collective("all_gather", OpType::_ALLGATHER_BASE, {in}, {out}, all_gathered());
  }
  Handle allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions&) override {
    return collective("all_gather", OpType::COALESCED, in, out, all_gathered());
  }
  Handle gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions&) override {
    return collective("gather", OpType::GATHER, in, out.empty() ? Tensors() : out[0], gathered_parts());
  }
  Handle scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    int64_t part = out[0].numel();
    Sizes sent(getSize(), in.empty() ? 0 : part), taken(getSize(), 0);
    taken[options.rootRank] = part;
    return collective("scatter", OpType::SCATTER, in.empty() ? Tensors() : in[0], out,
                      [=, this, none = host_empty(0, out[0])](Tensors in) {
                        return Tensors{exchanged(in.empty() ? none : at::cat(in), sent, taken)};
                      });
  }
  Handle _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return collective("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {in}, {out}, scattered(options.reduceOp));
  }
  Handle reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                         const c10d::ReduceScatterOptions& options) override {
    return collective("reduce_scatter", OpType::COALESCED, in, out, scattered(options.reduceOp));
  }
  Handle reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    auto call = scattered(options.reduceOp);
    return collective("reduce_scatter", OpType::REDUCE_SCATTER, in[0], out, [=](Tensors in) {
      return call({at::cat(in)});
    });
  }
  Handle alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions&) override {
    Sizes sent, taken;
    for (auto& tensor : in) sent.push_back(tensor.numel());
    for (auto& tensor : out) taken.push_back(tensor.numel());
    return collective("all_to_all", OpType::ALLTOALL, in, out, [=, this](Tensors in) {
      return exchanged(at::cat(in), sent, taken).split_with_sizes(taken);
    });
  }
  Handle alltoall_base(at::Tensor& out, at::Tensor& in, Sizes& out_rows, Sizes& in_rows,
                       const c10d::AllToAllOptions&) override {
    auto sizes = [n = getSize()](const at::Tensor& tensor, Sizes rows) {
      if (rows.empty()) return Sizes(n, tensor.numel() / n);
      for (auto& count : rows) count *= tensor.numel() / std::max<int64_t>(tensor.size(0), 1);
      return rows;
    };
    return collective("all_to_all", OpType::ALLTOALL_BASE, {in}, {out},
                      [this, sent = sizes(in, in_rows), taken = sizes(out, out_rows)](Tensors in) {
                        return Tensors{exchanged(in[0], sent, taken)};
                      });
  }
  Handle barrier(const c10d::BarrierOptions&) override {
    Inside inside;
    Tensors none{at::zeros({1}, at::TensorOptions().device(c10::Device(DEVICE, current_device)))};
    auto work = allreduce(none, {});
    work->wait();
    host_waits_for(current_stream(), "barrier");
    return work;
  }

 private:
  using Run = std::function<Result(Tensors in, double ready)>;
  using Call = std::function<Tensors(Tensors in)>;
  struct Lane {
    int stream = HOST;              // until the first message
    std::shared_future<void> last;  // message is over
  };
  Hosts hosts;
  std::map<int, Lane> lanes;
  std::vector<Message> batch;
  Handle last;
  bool coalescing = false, closed = false;

  template <class One>
  static Call each(One call) {
    return [=](Tensors in) {
      for (auto& tensor : in) tensor = call(tensor);
      return in;
    };
  }
  at::Tensor reduced(at::Tensor tensor, const c10d::ReduceOp& op) const {
    bool mean = op.op_ == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors all{tensor};
    hosts->allreduce(all, options)->wait();
    return mean ? tensor.div_(getSize()) : tensor;
  }
  at::Tensor gathered(at::Tensor tensor) const {
    auto all = host_empty(getSize() * tensor.numel(), tensor);
    hosts->_allgather_base(all, tensor)->wait();
    return all;
  }
  at::Tensor exchanged(at::Tensor in, Sizes sent, Sizes taken) const {  // so many elements to and from each rank
    auto out = host_empty(std::reduce(taken.begin(), taken.end()), in);
    hosts->alltoall_base(out, in, taken, sent)->wait();
    return out;
  }
  Call all_reduced(c10d::ReduceOp op) const {
    return each([=, this](at::Tensor tensor) { return reduced(tensor, op); });
  }
  Call scattered(c10d::ReduceOp op) const {
    return each([=, this](at::Tensor tensor) { return reduced(tensor, op).chunk(getSize())[getRank()]; });
  }
  Call all_gathered() const {
    return each([this](at::Tensor tensor) { return gathered(tensor); });
  }
  Call gathered_parts() const {
    return [this](Tensors in) { return gathered(in[0]).chunk(getSize()); };
  }

  // All begin once all are ready, with as many bytes as the rank with most has.
  Handle collective(const char* what, OpType type, Tensors in, Tensors out, Call call) {
    double given = 0, taken = 0, ranks = getSize();
    for (auto& tensor : in) given += tensor.nbytes();
    for (auto& tensor : out) taken += tensor.nbytes();
    double sent = std::max(given, taken) * (ranks - 1) / ranks * (type == OpType::ALLREDUCE ? 2 : 1);
    auto self = c10::intrusive_ptr<Group>::reclaim_copy(this);
    auto work = put(ALL, what, type, in, out, [self, call, sent](Tensors in, double ready) {
      auto latest = self->reduced(host_tensor({ready, sent}), c10d::ReduceOp(c10d::ReduceOp::MAX));
      auto outputs = call(std::move(in));
      double bytes = latest[1].item<double>();
      double ring = self->getSize() > 1 ? cost("ring_latency") + bytes / cost("ring_bytes") : 0;
      return Result{outputs, latest[0].item<double>() + ring};
    });
    if (coalescing) last = work;  // and no longer: a work keeps its tensors
    return work;
  }

  Handle message(Message message) {
    if (coalescing) {
      batch.push_back(message);
      return {};
    }
    std::string what = (message.sends ? "send to " : "recv from ") + std::to_string(message.peer);
    return exchange({message}, message.peer, MESSAGE, message.sends ? OpType::SEND : OpType::RECV, what);
  }
  // Messages that all begin together. Each is under way from when both its ends are ready.
  Handle exchange(std::vector<Message> messages, int lane, int tag, OpType type, const std::string& what) {
    Tensors in, out;
    for (const Message& message : messages) (message.sends ? in : out).push_back(message.tensor);
    return put(lane, what, type, in, out, [=, hosts = hosts](Tensors sent, double ready) {
      std::vector<Handle> works;
      auto transfer = [&](bool sends, at::Tensor tensor, int peer, int tag) {
        Tensors one{tensor};
        works.push_back(sends ? hosts->send(one, peer, tag) : hosts->recv(one, peer, tag));
      };
      Tensors received, theirs;
      auto mine = host_tensor({ready});
      auto next = sent.begin();
      for (auto& [sends, peer, tensor] : messages) {
        theirs.push_back(host_tensor({0}));
        transfer(true, mine, peer, tag + 1 + !sends);
        transfer(false, theirs.back(), peer, tag + 1 + sends);
        if (!sends) received.push_back(host_empty(tensor.numel(), tensor));
        transfer(sends, sends ? *next++ : received.back(), peer, tag);
      }
      for (auto& work : works) work->wait();
      double end = ready;
      for (size_t i = 0; i < messages.size(); i++) {
        double start = std::max(ready, theirs[i].item<double>());
        end = std::max(end, start + cost("p2p_latency") + messages[i].tensor.nbytes() / cost("p2p_bytes"));
      }
      return Result{received, end};
    });
  }

  // ``run`` gets what the inputs hold when their turn has come and when this end is ready; it gives what the outputs
  // get, and the end.
  Handle put(int key, const std::string& what, OpType type, Tensors in, Tensors out, Run run) {
    Inside inside;
    TORCH_CHECK(!closed, "simulated NCCL: the group was destroyed");
    for (auto* tensors : {&in, &out})
      for (auto& tensor : *tensors) {
        TORCH_CHECK(on_device(tensor) && !tensor.is_sparse(), "Tensors must be CUDA and dense");
        TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      }
    c10::DeviceGuard guard((in.empty() ? out : in)[0].device());
    Lane& lane = lanes[key];
    if (lane.stream == HOST) lane.stream = new_stream(current_device);
    auto work = c10::make_intrusive<Work>(getRank(), type, what, in, out);
    double ready = begin(*work, lane.stream);
    std::promise<void> over;
    auto before = std::exchange(lane.last, over.get_future().share());
    std::thread([=, stream = lane.stream, over = std::move(over)]() mutable {
      if (before.valid()) before.wait();
      finish(*work, run, ready, stream);
      run = nullptr;  // the work alone keeps its tensors, so that memory is freed when its owner lets go of it
      std::shared_lock<std::shared_mutex> lock(ending);
      if (ended) return (void)work.release();  // it is kept for ever
      work->complete_future();
      work.reset();
      message_goes(-1);
      over.set_value();
    }).detach();
    return work;
  }
  static double begin(Work& work, int stream) {
    Lock lock(mutex);
    const Event& here = streams[current_stream()];
    join(streams[stream].order, here.order);
    uint64_t at = tick(stream);
    for (auto& tensor : work.inputs) access(tensor, false, stream, at, "nccl " + work.what);
    for (auto& tensor : work.outputs) access(tensor, true, stream, at, "nccl " + work.what);
    work.end.order = streams[stream].order;
    host_spends(cost("launch"));
    count("nccl");
    message_goes(+1);
    return std::max(here.time, streams[HOST].time);
  }
  static void finish(Work& work, Run& run, double ready, int stream) {
    Inside inside;
    std::exception_ptr error;
    ready = std::max(ready, time_of(stream));
    double end = ready;
    try {
      Tensors held;
      for (auto& tensor : work.inputs) held.push_back(flat(tensor).clone());
      auto result = run(std::move(held), ready);
      end = result.end;
      for (size_t i = 0; i < work.outputs.size(); i++) flat(work.outputs[i]).copy_(result.outputs[i]);
    } catch (...) {
      error = std::current_exception();
    }
    join(stream, {{}, end});
    record_span("nccl " + work.what, stream, ready, end);
    work.is_over(end, error);
  }
};

c10::intrusive_ptr<c10d::Backend> make_group(Hosts hosts, int rank, int size) {
  return c10::make_intrusive<Group>(std::move(hosts), rank, size);
}
}  // namespace sim
