"""What a user may give by mistake, at every door: each is an error of fxpipe's own, with the value and what to write.

In ``TABLE`` a line of code stands above the error that it ends in, and a part of its message.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Action, Schedule, StageGraph, Topology
from fxpipe.schedules import build, with_costs
from tests.strict_transport import run_strict

TABLE = r"""
# the model, and the topology
compile(None, TWO)
    RunError: model is None; it is an nn.Module, or a fxpipe.StageGraph
compile(Chain, TWO)
    RunError: it is an nn.Module, or a fxpipe.StageGraph; write Chain(...)
compile(nn.ModuleList([nn.Linear(4, 4)]), TWO)
    TraceError: ModuleList.forward takes *input and nothing by name
compile(nn.DataParallel(Chain()), TWO)
    RunError: model is a DataParallel; give the model inside, its .module: the data axis of the topology
compile(torch.compile(Chain(), backend="eager"), TWO)
    RunError: model is a OptimizedModule; give the model inside, its ._orig_mod, and write compile(..., stage_compiler=
compile(Chain(), 2)
    TopologyError: 2 is no Topology, and no DeviceMesh: write fxpipe.Topology([("pipe", 2), ("data", 4)])
Topology(2)
    TopologyError: an axis is a (name, size) pair, got 2: write Topology([("pipe", 2), ("data", 4)])
TWO.group("pipe")
    TopologyError: call fxpipe.init() first
TWO.data_mesh("cluster")
    TopologyError: zero_scope is 'cluster'; it is "node" or "data"
TWO.sampler(iter([1]))
    TopologyError: has no length

# options of compile; tests/test_options.py has more
compile(Chain(), TWO, batch_dim=7, example_args=(X, Y))
    RunError: input 'x' of shape [8, 4] has no dimension 7
compile(Chain(), TWO, loss_fn=torch.nn.MSELoss)
    RunError: it is a function (output, target) -> loss, as nn.CrossEntropyLoss() is
compile(Chain(), TWO, schedule=1)
    ScheduleError: a int is no family: 1; write a name out of SCHEDULES, or a function
compile(Chain(), TWO, placement={"layers.0": 0, "layers.1": 5})
    PartitionError: placement uses ranks [0, 5]; with 2 pipe ranks each needs a stage
compile(Chain(), TWO, example_args=X)
    RunError: it is the inputs as a tuple, (x,) where there is one
compile(Chain(), TWO, example_args=(X,))
    RunError: example_args= and example_kwargs= are no batch of the model: missing inputs: y
compile(Chain(), TWO, example_kwargs={"x": X, "z": Y})
    RunError: got an unexpected keyword argument 'z'
compile(Chain(), TWO, zero=fxpipe.Zero(bucket_mb=inf))
    RunError: fxpipe.Zero: bucket_mb is inf; it is a size above 0
compile(Chain(), TWO, precision="bf16")
    RunError: precision is 'bf16'; it is fxpipe.Precision(...)
compile(Chain(), TWO, checkpoint=Chain().state_dict())
    CheckpointError: it is the path of a file or folder; load_state_dict() takes a state dict
compile(Chain(), TWO, checkpoint=FILES / "other.pt")
    CheckpointError: lacks 4 of the model's 4 tensors, first 'layers.0.weight'
compile(Chain(), TWO, checkpoint=FILES / "whole_numbers.pt")
    CheckpointError: layers.0.weight is torch.float32
compile(Chain(), TWO, boundaries={"layers.1": "behind"})
    PartitionError: boundaries= gives 'behind' for 'layers.1'
compile(Chain(), TWO, loss_weight=lambda x, y: nan, microbatches=2)(X, Y)
    RunError: loss_weight returned [nan, nan]
compile(Chain(), TWO, stage_compiler=lambda stage: None)(X, Y)
    RunError: stage_compiler returned None for stage 'layers.0'

# the marks in a model, and what it returns
compile(Cut(lambda h: stage_boundary(h, name=3)), TWO)
    TraceError: stage_boundary is given name=3; it is the name of the stage behind it
loss_of(lambda y: Sum(y.sum(), "1"))
    RunError: fxpipe.Sum has count='1'; it is a number of items, or a tensor with one
loss_of(lambda y: Sum(y.sum(), y.exp().sum()))
    RunError: the count of a fxpipe.Sum requires a gradient, and a number of items is given none
loss_of(lambda y: {"los": y.sum()})
    RunError: the model returned a dict with ['los'] and no 'loss'

# batches
fb()()
    RunError: missing inputs: x, y
fb()(X, y=Y, z=Y)
    RunError: got an unexpected keyword argument 'z'
fb()(X, Y, target=Y)
    RunError: got an unexpected keyword argument 'target'; a target needs loss_fn= of fxpipe.compile
fb()(X, Y[:3])
    RunError: the inputs have different numbers of rows (x: 8, y: 3)
fb()(X[:1], Y[:1])
    RunError: a batch of 1 rows cannot be cut into 2 micro-batches
fb()(X[:0], Y[:0])
    RunError: a batch of 0 rows has no micro-batch; leave it out on all ranks, or pass 2 rows or more
fb().evaluate(X[:0], Y[:0])
    RunError: a batch of 0 rows has no micro-batch; leave it out on all ranks, or pass 1 rows or more
fb()(X.clone().requires_grad_(), Y)
    RunError: input 'x' requires a gradient, and a step has none for what is outside of the model; compute it in
torch.inference_mode()(fb())(X, Y)
    RunError: torch.inference_mode() is on, in which no gradient can be
torch.no_grad()(fb())(X, Y)
    RunError: torch.no_grad() is on, in which no gradient can be; call it outside, or evaluate()
fb().evaluate(X, Y, outputs="first")
    RunError: outputs is 'first'; it is "last", "all" or "loss"
fb().step_microbatches(None)
    RunError: microbatches is None; it is a list of (args, kwargs)
fb().step_microbatches([])
    RunError: a step needs at least one micro-batch
fb().step_microbatches([(X, Y), (X, Y)])
    RunError: a micro-batch is (args, kwargs), as in ((x, y), {}), and this one is (tensor(
recursive(lambda inner: inner(X, Y))
    RunError: forward_backward is called while a call of forward_backward runs

# optimizers
fb().optimizer("SGD")
    RunError: cls is 'SGD'; it is a class of optimizers, such as torch.optim.AdamW; write torch.optim.SGD
fb().optimizer(SGD, lr=-1)
    RunError: SGD(params, lr=-1) failed: Invalid learning rate: -1
fb().optimizer(SGD, [], lr=0.1)
    RunError: params is [], and has no parameter of the model
fb().optimizer(SGD, [{"lr": 0.1}], lr=0.1)
    RunError: parameter group 0 is {'lr': 0.1}; write {"params": "*.bias", "lr": 0.1}
fb().optimizer(SGD, [{"params": "*.weight"}, {"params": "*"}], lr=0.1)
    RunError: some parameters appear in more than one parameter group: layers.0.weight is in groups 0 and 1
fb().optimizer(SGD, X, lr=0.1)
    RunError: params is a Tensor; write a list of parameters
fb().optimizer(SGD, Chain().parameters(), lr=0.1)
    RunError: a parameter of shape [4, 4] is not among this rank's; take it from forward_backward.named_parameters()
fb().optimizer(SGD, lr=0.1, offload="cpu")
    RunError: offload is 'cpu'; it is True or False
sgd().step("x")
    RunError: step() is given 'x'; it is None, or a function () -> loss
sgd().add_param_group({"params": "*"})
    RunError: layers.0.weight is in a parameter group of this optimizer already
sgd().load_state_dict(SGD(Chain().parameters(), lr=1).state_dict())
    CheckpointError: the state dict's parameter groups lack 'layers.0.weight'
copy.deepcopy(sgd())
    RunError: an optimizer of forward_backward steps its very parameters, and is neither copied nor pickled

# the rest of forward_backward
fb().clip_grad_norm_(-1)
    RunError: max_norm is -1; it is the largest norm that stays, a number from 0
fb().clip_grad_norm_(fb().parameters(), 1.0)
    RunError: a number from 0; whose gradients these are, it knows
fb().clip_grad_norm_(1, "l2")
    RunError: norm_type is 'l2'; write a positive number
fb().load_state_dict(None)
    CheckpointError: the state dict is None; it is what model.state_dict() gives, name -> tensor
fb().load_state_dict({})
    CheckpointError: lacks 4 of 4 tensors, first 'layers.0.weight'
fb().load_state_dict({f"module.{name}": tensor for name, tensor in STATE.items()})
    CheckpointError: the model has no 'module.layers.0.weight'; did you mean "layers.0.weight"?
fb().load_state_dict({**STATE, "layers.0.weight": [1.0]})
    CheckpointError: layers.0.weight of the state dict is [1.0]; it is a dense tensor with values
fb().load_state_dict({**STATE, "layers.0.weight": torch.ones(3)})
    CheckpointError: layers.0.weight has shape [4, 4], the state dict has [3]
fb().load_state_dict({**STATE, "layers.0.weight": torch.ones(4, 4).long()})
    CheckpointError: layers.0.weight is torch.float32, the state dict has it as torch.int64
fb().module.load_state_dict(STATE, assign=True)
    RunError: load_state_dict(assign=True) would put other tensors here than the stages hold
copy.deepcopy(fb())
    RunError: forward_backward holds stages and process groups, and is neither copied nor pickled: copy.deepcopy(
fb().stages["nope"]
    PartitionError: there is no stage 'nope'; known: "layers.0", "layers.1"
fb().seed(9, 0, 0)
    PartitionError: there is no stage 9
fb().train()
    AttributeError: forward_backward has no 'train'; a call trains, and evaluate() evaluates
fb().evalute(X, Y)
    AttributeError: forward_backward has no 'evalute'; did you mean "evaluate"?

# stages by hand, and schedules
staged(None)
    PartitionError: stages is None; it is a dict name -> module or function
staged({"a": abs, "b": abs}, ("a", "b"))
    PartitionError: edges is ('a', 'b'); it is a list of pairs of names, [("image", "loss")]
staged({"a": abs, "b": abs}, [("a", "b"), ("b", "a")])
    PartitionError: the edges form a cycle through ['a', 'b']
staged({"a": abs}, inputs={"a": "image"})
    PartitionError: inputs is {'a': 'image'}; it is a dict name -> list of the inputs
build("1f1b", None, 4)
    ScheduleError: edges is None; it is a list of pairs of stage numbers, [(0, 1), (1, 2)]
build("1f1b", [(0, 1)], 4, tied=[0, 1])
    ScheduleError: tied is [0, 1]; it is a list of groups of stage numbers
build("1f1b", [(0, 1)], 4, costs=3)
    ScheduleError: costs is 3; it is fxpipe.Costs.of(stages, forward=1, backward=2)
Costs((1,), (2, 3), (1,))
    ScheduleError: backward has 2 costs for 1 stages
Action.parse(None)
    ScheduleError: None is no action; write <stage><F, R, B, I, W, O or P><micro-batch>, as in 2F0
table(placement=[0, 7])
    ScheduleError: placement=(0, 7) names a rank outside of 0..1, the rows
table(costs=Costs.of(5))
    ScheduleError: costs.forward has 5 entries for 2 stages
compare(table(), table())
    ScheduleError: it is a Timeline, as schedule.simulate() gives

# files, processes, and the rest
Weights.open(None)
    CheckpointError: the checkpoint is None; it is the path of a file or folder
Weights.open(FILES / "good.pt", rename="model.")
    CheckpointError: rename is 'model.'; it is a function (name) -> name
Weights.open(FILES / "good.pt").read(None)
    CheckpointError: has no tensor None
save(None, fb(), sgd(), step=1)
    CheckpointError: folder is None; it is the path of a folder that all ranks see
save(FILES / "run", Chain(), sgd(), step=1)
    CheckpointError: it is what fxpipe.compile returned
save(FILES / "run", fb(), SGD(Chain().parameters(), lr=0.1), step=1)
    CheckpointError: optimizer= steps parameters that are none of this forward_backward's
save(FILES / "run", fb(), sgd(), step=1, extra={"f": print})
    CheckpointError: extra['f'] is a builtin_function_or_method, and a checkpoint holds plain data alone
load(FILES / "run", fb())
    CheckpointError: has no checkpoint of fxpipe.save
load(FILES / "run", None)
    CheckpointError: forward_backward is None; it is what fxpipe.compile returned
init(timeout=-1)
    RunError: timeout is -1; write a number of seconds
launch(None, 2)
    RunError: fn is None; it is a function, defined at the top of a module
fxpipe.init_weights_of(None)
    RunError: None is no nn.Module
"""


def rows() -> Iterator[Any]:
    lines = [line for line in TABLE.splitlines() if line and not line.startswith("# ")]
    for code, told in zip(lines[::2], lines[1::2], strict=True):
        error, phrase = told.strip().split(": ", 1)
        yield pytest.param(code, error, phrase, id=code)


class Chain(nn.Module):
    def __init__(self, between: Callable[[Tensor], Any] = fxpipe.stage_boundary) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layers[0](x)
        self.between(h)
        return (self.layers[1](fxpipe.stage_boundary(h)) - y).square().mean()


class Net(nn.Module):
    """The output is what is made of y."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.made = nn.Linear(4, 4), nn.Linear(4, 4), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.b(fxpipe.stage_boundary(self.a(x))))


TWO = Topology([("pipe", 2)])
X, Y = torch.ones(8, 4), torch.zeros(8, 4)
CELLS = tuple(tuple(map(Action.parse, row.split())) for row in ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
FIELDS: dict[str, Any] = {"edges": [(0, 1)], "placement": (0, 1), "backward": (True, True), "microbatches": 2}


@functools.cache
def fb() -> fxpipe.ForwardBackward:
    """One for all rows: what is refused changes nothing."""
    torch.manual_seed(0)
    return fxpipe.compile(Chain(), TWO, microbatches=2)


def sgd() -> torch.optim.Optimizer:
    return fb().optimizer(torch.optim.SGD, lr=0.1)


def table(**fields: Any) -> Schedule:
    return Schedule(**{"rows": CELLS, **FIELDS, **fields})


def staged(stages: Any, edges: Any = (), inputs: Any = None) -> StageGraph:
    return StageGraph.from_callables(stages, edges, {"a": ["x"]} if inputs is None else inputs)


def loss_of(made: Callable[[Tensor], Any]) -> Tensor:
    return fxpipe.compile(Net(made), TWO, microbatches=2)(X)


def recursive(call: Callable[[fxpipe.ForwardBackward], Any]) -> None:
    def weight(x: Tensor, y: Tensor) -> float:
        call(inner)
        return 1.0

    inner = fxpipe.compile(Chain(), TWO, microbatches=2, loss_weight=weight)
    inner(X, Y)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that a row may use."""
    files: Path = tmp_path_factory.mktemp("wrong")
    state = Chain().state_dict()
    torch.save(state, files / "good.pt")
    torch.save({"x": X}, files / "other.pt")
    torch.save({name: tensor.long() for name, tensor in state.items()}, files / "whole_numbers.pt")

    public = {name: getattr(fxpipe, name) for name in fxpipe.__all__} | {"build": build, "with_costs": with_costs}
    others = {"nan": math.nan, "inf": math.inf, "SGD": torch.optim.SGD, "Cut": Chain, "np": np, "copy": copy}
    return {**globals(), **public, **others, "FILES": files, "STATE": state}


@pytest.mark.parametrize(("code", "error", "phrase"), list(rows()))
def test_a_wrong_input_is_refused_with_what_is_wrong(world: dict[str, Any], code: str, error: str, phrase: str) -> None:
    with pytest.raises((fxpipe.FxpipeError, AttributeError)) as caught:
        eval(code, world)
    assert type(caught.value).__name__ == error
    assert phrase in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_was_refused_has_changed_nothing(world: dict[str, Any]) -> None:
    fresh = fxpipe.compile(Chain(), TWO, microbatches=2)
    fb().zero_grad()
    assert torch.equal(fb()(X, Y), fresh(X, Y))
    for mine, other in zip(fb().parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_call_in_no_grad_on_one_rank_changes_nothing_on_any(zero: int) -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        options: dict[str, Any] = {"boundaries": ["2"], "loss_fn": nn.functional.mse_loss, "zero": zero}
        forward_backward = fxpipe.compile(model, TWO, microbatches=2, **options)
        with torch.set_grad_enabled(rank != 1), pytest.raises(fxpipe.RunError, match=r"rank 1 .*: torch\.no_grad\(\)"):
            forward_backward(X, target=Y)
        assert all(parameter.grad is None for parameter in forward_backward.parameters())
        assert all(not buffer for name, buffer in forward_backward.module.named_buffers() if "batches" in name)

    run_strict(body, 2)


# --- what must not be refused, or not always ---

MEANT = """
build("1f1b", np.array([[0, 1], [1, 2]]), np.int64(4)).verify()
build("1f1b", {(0, 1)}, 4, placement=np.array([0, 1]), backward=[np.True_, 1]).verify()
build("1f1b", zip([0, 1], [1, 2]), 4, placement=range(3), names=dict(a=1, b=2, c=3).keys()).verify()
table(rows=map(list, CELLS), edges=iter([[0, 1]]), placement=[0, np.int64(1)]).verify()
table(rows=[[action._replace(microbatch=np.int64(action.microbatch)) for action in row] for row in CELLS]).verify()
table().simulate(forward=np.array([1.0, 2.0]), backward=torch.tensor(3.0), comm=np.float32(1))
Topology((name, torch.tensor(2)) for name in ("pipe", "data"))
Topology([["pipe", np.int64(2)]], ranks_per_node=np.int64(1)).coordinate(np.int64(1))
fb().stages[np.int64(1)], fb().stages[-1]
fb().clip_grad_norm_(torch.tensor(1.0), "inf"), fb().clip_grad_norm_(inf), fb().clip_grad_norm_(0)
fb().load_state_dict({name: tensor.double() for name, tensor in STATE.items()})
fb().load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in STATE.items()})
fb().optimizer(SGD, [{"params": "*.bias", "name": "biases"}, {"params": []}], lr=torch.tensor(0.1))
fb().optimizer(functools.partial(SGD, lr=0.1), fb().named_parameters())
fb().step_microbatches([[[X, Y], {}], ((X,), {"y": Y})])
fb().zero_grad(np.True_)
loss_of(lambda y: Sum(y.sum(), 3.0)), loss_of(lambda y: Sum(y.sum(), torch.tensor([3])))
stage_boundary((X, 3, None)), stage_boundary(None), stage_boundary(X, name="here")
Weights.open(str(FILES / "good.pt")).read("layers.0.weight")
"""


@pytest.mark.parametrize("code", MEANT.strip().splitlines())
def test_what_can_be_meant_is_taken(world: dict[str, Any], code: str) -> None:
    eval(code, world)


def test_an_optimizer_that_another_has_replaced_no_longer_steps() -> None:
    forward_backward = fxpipe.compile(Chain(), TWO, microbatches=2)
    first = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    second = forward_backward.optimizer(torch.optim.AdamW, ["layers.0.weight"], lr=0.1)
    forward_backward(X, Y)
    with pytest.raises(fxpipe.RunError, match=r"layers\.0\.weight is stepped by an optimizer that was made after this"):
        first.step()
    second.step()
    del second
    third = forward_backward.optimizer(torch.optim.SGD, lr=0.1)  # as a loop does that is started again
    third.step()


def test_one_process_says_what_it_leaves_out_of_a_topology() -> None:
    topology = Topology([("pipe", 2), ("data", 2)])
    with pytest.warns(UserWarning, match=r"of one replica: data 2 of the topology is left out; start 4 processes"):
        fxpipe.compile(Chain(), topology, microbatches=2)


def test_an_optimizer_is_not_stepped_from_a_hook_in_the_middle_of_a_call() -> None:
    """As loops do that step each parameter in its own backward: here it has one micro-batch's gradient."""
    forward_backward = fxpipe.compile(Chain(), TWO, microbatches=2)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    for parameter in forward_backward.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(fxpipe.RunError, match=r"optimizer\.step\(\) is called while a call of forward_backward runs"):
        forward_backward(X, Y)
