// A process group with NCCL's ways: see group.h.
#include "group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "device.h"
#include "lane.h"
#include "memory.h"
#include "report.h"
#include "tensor.h"

namespace sim {
namespace {
using Tensors = std::vector<at::Tensor>;
using Hosts = c10::intrusive_ptr<c10d::Backend>;
using Handle = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;
constexpr int ALL = -1;  // the lane of collectives, beside those of peers
constexpr auto LONG = std::chrono::minutes(10);
enum Tag { MESSAGE = 0, BATCH = 4, EXCHANGE = 8 };  // of gloo; behind each those of its clocks

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, std::string what, Tensors in, Tensors out)
      : c10d::Work(rank, type), what(std::move(what)), inputs(std::move(in)), outputs(std::move(out)),
        future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool isCompleted() override {
    std::lock_guard<std::mutex> lock(guard);
    return done;
  }
  bool isSuccess() const override { return !error; }
  // The host of a real run goes on here, and its stream stands still. All that it puts on the stream later is behind
  // this, so that standing still is the same, but for what other streams do meanwhile. Its virtual time goes on.
  bool wait(std::chrono::milliseconds timeout) override {
    Inside inside;
    Tensors dropped;  // behind the locks: a tensor that Python has seen takes Python's lock to go
    std::unique_lock<std::mutex> lock(guard);
    bool over = changed.wait_for(lock, timeout.count() > 0 ? timeout : LONG, [&] { return done; });
    TORCH_CHECK(over, "simulated NCCL: Timed out waiting for ", what);
    if (error) std::rethrow_exception(error);
    Lock all(mutex);
    int stream = current_stream();
    join(order_of(stream), order);
    host_spends(costs.event);
    record_span("wait for " + what, stream, time_of(stream), end);
    reaches(stream, end);
    dropped.swap(inputs);
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  Tensors result() override { return outputs; }

  void is_over(double at, std::exception_ptr failed) {
    std::lock_guard<std::mutex> lock(guard);
    end = at;
    error = std::move(failed);
    done = true;
    changed.notify_all();
  }
  void complete_future() { error ? future->setErrorIfNeeded(error) : future->markCompleted(at::IValue(outputs)); }

  const std::string what;
  Order order;  // what comes before its end

 private:
  std::mutex guard;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
  double end = 0;
  Tensors inputs, outputs;  // inputs are kept until somebody waits
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

at::Tensor flat(const at::Tensor& tensor) { return on_host(tensor).as_strided({tensor.numel()}, {1}, tensor.storage_offset()); }
at::Tensor host_tensor(std::vector<double> values) {
  return at::tensor(values, at::TensorOptions().dtype(at::kDouble).device(c10::kCPU));
}
Tensors alike(const at::Tensor& tensor, int count) {
  Tensors made;
  for (int i = 0; i < count; i++) made.push_back(at::empty_like(tensor));
  return made;
}

// Messages of the hosts that are all under way at once.
class Transfers {
 public:
  explicit Transfers(Hosts hosts) : hosts(std::move(hosts)) {}
  void add(bool sends, const at::Tensor& tensor, int peer, int tag) {
    auto& kept = tensors.emplace_back(Tensors{tensor});
    works.push_back(sends ? hosts->send(kept, peer, tag) : hosts->recv(kept, peer, tag));
  }
  void wait() {
    for (auto& work : works) work->wait();
  }

 private:
  Hosts hosts;
  std::deque<Tensors> tensors;
  std::vector<Handle> works;
};

// Messages with peers that all begin together. Each is under way from when both ends are ready; the last one's end.
Result meet(const Hosts& hosts, const std::vector<Message>& messages, const Tensors& sent, double ready, int tag) {
  Transfers transfers(hosts);
  Tensors received, theirs, mine{host_tensor({ready})};
  size_t next = 0;
  for (const Message& message : messages) {
    theirs.push_back(host_tensor({0}));
    transfers.add(true, mine[0], message.peer, tag + 1 + !message.sends);
    transfers.add(false, theirs.back(), message.peer, tag + 1 + message.sends);
    if (!message.sends) received.push_back(at::empty({message.tensor.numel()}, message.tensor.options().device(c10::kCPU)));
    transfers.add(message.sends, message.sends ? sent[next++] : received.back(), message.peer, tag);
  }
  transfers.wait();
  double end = ready;
  for (size_t i = 0; i < messages.size(); i++) {
    double start = std::max(ready, theirs[i].item<double>());
    end = std::max(end, start + costs.p2p_latency + messages[i].tensor.nbytes() / costs.p2p_bytes);
  }
  return {received, end};
}

class Group final : public c10d::Backend {
 public:
  Group(Hosts hosts, int rank, int size) : Backend(rank, size), hosts(std::move(hosts)) {}
  ~Group() override { shutdown(); }
  void shutdown() override {
    closed = true;
    for (auto& [_, lane] : lanes) lane->close();
  }
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
    return collective("all_reduce", OpType::ALLREDUCE, tensors, tensors, each([=, this](at::Tensor tensor) {
      return reduced(tensor, options.reduceOp);
    }));
  }
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    bool is_root = options.rootRank == rank_;
    return collective("reduce", OpType::REDUCE, tensors, is_root ? tensors : Tensors(), each([=, this](at::Tensor tensor) {
      return reduced(tensor, options.reduceOp);
    }));
  }
  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return collective("broadcast", OpType::BROADCAST, tensors, tensors, [=, hosts = hosts](Tensors in) {
      hosts->broadcast(in, options)->wait();
      return in;
    });
  }
  Handle allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions&) override {
    return collective("all_gather", OpType::ALLGATHER, in, out[0], [this](Tensors in) { return gathered(in[0]); });
  }
  Handle _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    return collective("all_gather", OpType::_ALLGATHER_BASE, {in}, {out}, each([this](at::Tensor tensor) {
      return at::cat(gathered(tensor));
    }));
  }
  Handle allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions&) override {
    return collective("all_gather", OpType::COALESCED, in, out, each([this](at::Tensor tensor) {
      return at::cat(gathered(tensor));
    }));
  }
  Handle gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions&) override {
    auto to = out.empty() ? Tensors() : out[0];
    return collective("gather", OpType::GATHER, in, to, [this](Tensors in) { return gathered(in[0]); });
  }
  Handle scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto from = in.empty() ? Tensors() : in[0];
    auto part = at::empty({out[0].numel()}, out[0].options().device(c10::kCPU));
    return collective("scatter", OpType::SCATTER, from, out, [=, hosts = hosts](Tensors in) {
      Tensors received{part};
      std::vector<Tensors> parts;
      if (!in.empty()) parts.push_back(in);
      hosts->scatter(received, parts, options)->wait();
      return received;
    });
  }
  Handle _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return scattered(OpType::_REDUCE_SCATTER_BASE, {in}, {out}, options);
  }
  Handle reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    return scattered(OpType::COALESCED, in, out, options);
  }
  Handle reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    return collective("reduce_scatter", OpType::REDUCE_SCATTER, in[0], out, [=, this](Tensors in) {
      return Tensors{part(reduced(at::cat(in), options.reduceOp))};
    });
  }
  Handle alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions&) override {
    return collective("all_to_all", OpType::ALLTOALL, in, out, [=, this](Tensors in) { return exchanged(in, out); });
  }
  Handle alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_rows, std::vector<int64_t>& in_rows,
                       const c10d::AllToAllOptions&) override {
    auto parts = [n = getSize()](const at::Tensor& tensor, const std::vector<int64_t>& rows) {
      int64_t count = std::max<int64_t>(tensor.size(0), 1), row = tensor.numel() / count;
      std::vector<int64_t> sizes;
      for (int64_t each : rows) sizes.push_back(each * row);
      return sizes.empty() ? std::vector<int64_t>(n, tensor.numel() / n) : sizes;
    };
    auto received = out.flatten().split_with_sizes(parts(out, out_rows));
    return collective("all_to_all", OpType::ALLTOALL_BASE, {in}, {out},
                      [=, this, sizes = parts(in, in_rows)](Tensors in) {
                        return Tensors{at::cat(exchanged(in[0].split_with_sizes(sizes), received))};
                      });
  }
  Handle barrier(const c10d::BarrierOptions&) override {
    Tensors none{at::zeros({1}, at::TensorOptions().device(c10::Device(DEVICE, current_device())))};
    auto work = allreduce(none, {});
    work->wait();
    host_waits_for(current_stream());
    report("sync", "barrier");
    return work;
  }

 private:
  using Run = std::function<Result(Tensors in, double ready)>;
  using Call = std::function<Tensors(Tensors in)>;
  Hosts hosts;
  std::map<int, std::shared_ptr<Lane>> lanes;
  std::vector<Message> batch;
  Handle last;
  bool coalescing = false, closed = false;

  static Call each(std::function<at::Tensor(at::Tensor)> call) {
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
    return mean ? all[0].div_(getSize()) : all[0];
  }
  at::Tensor part(const at::Tensor& all) const { return all.chunk(getSize())[getRank()]; }
  Tensors gathered(const at::Tensor& tensor) const {
    Tensors in{tensor};
    std::vector<Tensors> out{alike(tensor, getSize())};
    hosts->allgather(out, in)->wait();
    return out[0];
  }
  Tensors exchanged(const Tensors& in, const Tensors& like) const {
    Transfers transfers(hosts);
    Tensors out;
    for (int peer = 0; peer < getSize(); peer++) {
      out.push_back(at::empty({like[peer].numel()}, like[peer].options().device(c10::kCPU)));
      if (peer == getRank()) {
        out[peer].copy_(in[peer]);
      } else {
        transfers.add(true, in[peer].contiguous(), peer, EXCHANGE);
        transfers.add(false, out[peer], peer, EXCHANGE);
      }
    }
    transfers.wait();
    return out;
  }
  Handle scattered(OpType type, Tensors in, Tensors out, const c10d::ReduceScatterOptions& options) {
    return collective("reduce_scatter", type, in, out, each([=, this](at::Tensor tensor) {
      return part(reduced(tensor, options.reduceOp));
    }));
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
      double ring = self->getSize() > 1 ? costs.ring_latency + bytes / costs.ring_bytes : 0;
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
  Handle exchange(std::vector<Message> messages, int lane, int tag, OpType type, const std::string& what) {
    Tensors in, out;
    for (const Message& message : messages) (message.sends ? in : out).push_back(message.tensor);
    return put(lane, what, type, in, out, [hosts = hosts, messages, tag](Tensors in, double ready) {
      return meet(hosts, messages, in, ready, tag);
    });
  }

  // ``run`` gets what the inputs hold when their turn has come and when this end is ready; it gives what the outputs get, and the end.
  Handle put(int key, const std::string& what, OpType type, Tensors in, Tensors out, Run run) {
    Inside inside;
    Below below;
    TORCH_CHECK(!closed, "simulated NCCL: the group was destroyed");
    for (auto* tensors : {&in, &out})
      for (auto& tensor : *tensors) {
        TORCH_CHECK(on_device(tensor) && !tensor.is_sparse(), "Tensors must be CUDA and dense");
        TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      }
    c10::DeviceGuard guard((in.empty() ? out : in)[0].device());
    auto& lane = lanes[key];
    if (!lane) lane = Lane::start();
    if (lane->stream == HOST) lane->stream = new_stream();
    auto work = c10::make_intrusive<Work>(getRank(), type, what, in, out);
    double ready = begin(*lane, *work, in, out);
    flush_reports();
    lane->put([=, stream = lane->stream]() mutable { finish(*work, in, out, run, ready, stream); });
    return work;
  }
  static double begin(const Lane& lane, Work& work, const Tensors& in, const Tensors& out) {
    Lock lock(mutex);
    int stream = current_stream();
    join(order_of(lane.stream), order_of(stream));
    uint64_t at = tick(lane.stream);
    for (auto& tensor : in) access(tensor, false, lane.stream, at, "nccl " + work.what);
    for (auto& tensor : out) access(tensor, true, lane.stream, at, "nccl " + work.what);
    work.order = order_of(lane.stream);
    host_spends(costs.launch);
    count("nccl");
    message_begins();
    return std::max(time_of(stream), time_of(HOST));
  }
  static void finish(Work& work, Tensors& in, Tensors& out, Run& run, double ready, int stream) {
    Below below;
    Tensors held;
    double start = std::max(ready, time_of(stream)), end = start;
    std::exception_ptr error;
    try {
      for (auto& tensor : in) held.push_back(flat(tensor).clone());
      auto result = run(std::move(held), start);
      end = result.end;
      for (size_t i = 0; i < out.size(); i++) flat(out[i]).copy_(result.outputs[i]);
    } catch (...) {
      error = std::current_exception();
    }
    run = nullptr;
    in.clear();  // the work alone keeps them, so that memory is freed when its owner lets go of it
    out.clear();
    reaches(stream, end);
    record_span("nccl " + work.what, stream, start, end);
    work.is_over(end, error);
    with_python([&] { work.complete_future(); }, [] {});
    message_ends();
  }
};
}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(Hosts hosts, int rank, int size) {
  return c10::make_intrusive<Group>(std::move(hosts), rank, size);
}
}  // namespace sim
