"""Optimizer state through checkpoints: whatever an optimizer keeps, by torch's helpers, with groups and masters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import return_and_correct_aliasing

import fxpipe
from fxpipe.errors import CheckpointError, RunError
from tests.device import DEVICE
from tests.pool import Pool
from tests.sharding.test_parallelize import in_a_new_world
from tests.thinned import every, in_turn

BOTH = ("fxpipe", "dcp")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch: "assuming the intent is to save in a single process"


COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)


class Codes(Tensor):
    """8-bit codes and a scale, as torchao keeps moments: a write rounds to a scale of its own."""

    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool = True) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale, made.signed = codes, scale, signed
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any) -> Codes:
        return cls(inner["codes"], inner["scale"], metadata[0])

    def floats(self) -> Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = args[0]
        if func in COPIES:
            copied = cls(func(one.codes), func(one.scale), one.signed)
            return return_and_correct_aliasing(func, args, kwargs or {}, copied)
        args = [each.floats() if isinstance(each, Codes) else each for each in args]
        if func is torch.ops.aten.copy_.default:
            one.scale.copy_(args[1].abs().max() / 100 + 1e-12)
            one.codes.copy_((args[1] / one.scale).round())
            return one
        return func(*args, **(kwargs or {}))


class Labelled(Tensor):
    """A subclass that does not say what it is made of."""


class Base(torch.optim.Optimizer):
    """Steps each parameter by its gradient and ``change(group, state, parameter)``."""

    change: Callable[[Any, Any, Any, Tensor], Tensor]

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self.change(group, self.state[parameter], parameter)
                    parameter.sub_(group["lr"] * (parameter.grad + change))


class Momentum8(Base):
    """torchao's in small."""

    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        if not state:
            state["mean"] = [
                Codes(torch.zeros_like(parameter, dtype=torch.int8), torch.zeros((), device=parameter.device))
            ]
        mean = state["mean"][0].floats().lerp(parameter.grad, 0.1)
        state["mean"][0].copy_(mean)
        return mean


class Corrected(Base):
    """As apex's FusedAdam: what it corrects by is counted in the group, from its first step on."""

    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        return mean / (1 - 0.9 ** group["step"])


class Anchored(Base):
    """As Prodigy: keeps a parameter's first value, or a single 0. And what only some have, a list, a table."""

    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        if not state:
            state["first"], state["sums"], state["seen"] = parameter.sum(), [], {0: 0}
            if parameter.any():
                state["first"], state["scale"] = parameter.flatten().clone(), parameter.abs().mean()
        state["sums"].append(parameter.grad.sum())
        state["seen"][0] += 1
        first = state["first"].view_as(parameter) if state["first"].ndim else state["first"]
        return 0.1 * (parameter - first) + sum(state["sums"]) * state.get("scale", 1) / state["seen"][0]


class OfLabels(Base):
    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        state["kept"] = torch.zeros_like(parameter).as_subclass(Labelled)
        return torch.zeros_like(parameter)


class Pairs(Base):
    """Keeps its tensors in a list and a dict, and a count that is no tensor."""

    def change(self, group: Any, state: Any, parameter: Tensor) -> Tensor:
        if not state:
            state["means"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
            state["kept"], state["count"] = {"sum": torch.zeros_like(parameter)}, 0
        mean, square = state["means"]
        mean.mul_(0.9).add_(parameter.grad)
        square.mul_(0.9).add_(parameter.grad.square())
        state["kept"]["sum"].add_(parameter.grad)
        state["count"] += 1
        return (mean + state["kept"]["sum"]) / (square.sqrt() + 0.1) / state["count"]


class Twins(nn.Module):
    """Two stages alike, so that the same numbers of parameters mean different ones; biases odd in size, and zeros at
    first. ``frozen``: behind a frozen weight of codes."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 7)
        for part in (self.first, self.last):
            nn.init.zeros_(part.bias)
        if frozen:
            codes = torch.randint(-90, 90, (7, 7), dtype=torch.int8)
            self.base = nn.Parameter(Codes(codes, torch.tensor(0.01)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        base = getattr(self, "base", None)
        x = x @ base.floats() if isinstance(base, Codes) else x
        h = fxpipe.stage_boundary(self.first(x).tanh())
        return (self.last(h) - 1).square().mean()


def rows(step: int) -> Tensor:
    return torch.randn(8, 7, generator=torch.Generator().manual_seed(step))


def compiled(seed: int, pipe: int = 2, data: int = 1, frozen: bool = False, **options: Any) -> fxpipe.ForwardBackward:
    torch.manual_seed(seed)
    topology = fxpipe.Topology([("pipe", pipe), ("data", data)])
    return fxpipe.compile(options.pop("model", None) or Twins(frozen), topology, microbatches=2, **options)


def step(forward_backward: Any, optimizers: list[Any], number: int) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = forward_backward(rows(number))
    for optimizer in optimizers:
        optimizer.step()
    return float(loss)


def plain_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Twins()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(rows(0)).backward()
    optimizer.step()
    return model, optimizer


def plain_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number in range(5, 9):
        optimizer.zero_grad()
        losses.append(model(rows(number)))
        losses[-1].backward()
        optimizer.step()
    return [float(loss) for loss in losses]


Build = Callable[[Any], dict[str, Any]]
"""ForwardBackward → its optimizers, by the name that they are saved under."""


def optimizer_of(cls: Any, options: dict[str, Any], forward_backward: Any) -> dict[str, Any]:
    return {"optim": forward_backward.optimizer(cls, **options)}


def one(cls: Any, **options: Any) -> Build:
    return partial(optimizer_of, cls, {"lr": 0.05, **options})


def muon_and_adam(forward_backward: Any) -> dict[str, Any]:
    return {
        "matrices": forward_backward.optimizer(torch.optim.Muon, "*.weight", lr=0.05),
        "rest": forward_backward.optimizer(torch.optim.AdamW, "*.bias", lr=0.05),
    }


adam, momentum = one(torch.optim.AdamW), one(torch.optim.SGD, momentum=0.9, dampening=0.5)


@in_a_new_world
def saved(by: str, build: Build, options: dict[str, Any], folder: Path, steps: int = 2) -> list[float]:
    """The losses that follow upon a save."""
    forward_backward = compiled(0, **options)
    optimizers = build(forward_backward)
    for number in range(steps):
        step(forward_backward, list(optimizers.values()), number)
    if by == "fxpipe":
        fxpipe.save(folder, forward_backward, optimizers, step=steps)
    else:
        dcp.save({"model": forward_backward, **optimizers}, checkpoint_id=folder)
    return [step(forward_backward, list(optimizers.values()), number) for number in range(5, 9)]


@in_a_new_world
def loaded(by: str, build: Build, options: dict[str, Any], folder: Path) -> list[float]:
    forward_backward = compiled(1, **options)
    optimizers = build(forward_backward)
    if by == "fxpipe":
        fxpipe.load(folder, forward_backward, optimizers)
    else:
        dcp.load({"model": forward_backward, **optimizers}, checkpoint_id=folder)
    return [step(forward_backward, list(optimizers.values()), number) for number in range(5, 9)]


PIPE, DATA = {"pipe": 2, "data": 1}, {"pipe": 1, "data": 2}
SHARDS, PIECES = {**DATA, "zero": 1}, {"elementwise": True}


@pytest.mark.parametrize(
    ("build", "source", "again", "sink"),
    [
        (muon_and_adam, SHARDS, muon_and_adam, PIPE),
        (one(torch.optim.AdamW, offload=True), SHARDS, adam, PIPE),
        (momentum, PIPE, momentum, {**DATA, "zero": 2}),
    ],
)
def test_a_run_goes_on_in_another_layout(
    pool: Pool, tmp_path: Path, build: Build, source: Any, again: Build, sink: Any
) -> None:
    first = pool.run(saved, "dcp", build, source, tmp_path, ranks=2)
    second = pool.run(loaded, "dcp", again, sink, tmp_path, ranks=2)
    assert second[0] == pytest.approx(first[0], abs=1e-6)
    assert second[0] == second[1]


GOES_ON: dict[str, tuple[Build, dict[str, Any], int, tuple[str, ...]]] = {
    "equal stages": (adam, PIPE, 2, ("dcp",)),  # rank 0 had other moments than it saved: integer keys were merged
    # SGD's first step differs from one with a momentum of zeros; Adagrad has its state from the start.
    "SGD, never stepped": (momentum, PIPE, 0, ("dcp",)),
    "Adagrad, never stepped": (one(torch.optim.Adagrad, initial_accumulator_value=0.1), PIPE, 0, ("dcp",)),
    # Slices of a checkpoint reached the optimizer's own state, and its next step failed on them.
    "lists and dicts of tensors": (one(Pairs, **PIECES), {**DATA, "zero": 3}, 2, ("dcp",)),
    # What fxpipe.save wrote of a subclass made all of the checkpoint unreadable.
    "a subclass": (one(Momentum8), PIPE, 2, BOTH),
    "pieces of a subclass": (one(Momentum8, **PIECES), SHARDS, 2, BOTH),
    "a weight of a subclass": (one(Momentum8), {**PIPE, "frozen": True}, 2, ("fxpipe",)),
    # A resumed run counted its steps from 1 on.
    "numbers in groups": (one(Corrected), PIPE, 2, BOTH),
    "numbers in groups, never stepped": (one(Corrected), PIPE, 0, BOTH),
    "numbers in groups, of pieces": (one(Corrected, **PIECES), SHARDS, 2, BOTH),
    "numbers in groups, of pieces never stepped": (one(Corrected, **PIECES), SHARDS, 0, BOTH),
    # A run that was saved could not be resumed.
    "state whose form depends on values": (one(Anchored), PIPE, 2, ("fxpipe",)),
    "the same, never stepped": (one(Anchored), PIPE, 0, ("fxpipe",)),
}


@pytest.mark.parametrize(("kind", "by"), every(2, [(kind, by) for kind, (*_, ways) in GOES_ON.items() for by in ways]))
def test_a_run_goes_on_with_the_same_bits(pool: Pool, tmp_path: Path, kind: str, by: str) -> None:
    build, layout, steps, _ = GOES_ON[kind]
    wanted = pool.run(saved, by, build, layout, tmp_path, steps, ranks=2)
    assert pool.run(loaded, by, build, layout, tmp_path, ranks=2) == wanted


def test_pieces_of_a_tensor_subclass_load_where_they_were(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved, "fxpipe", one(Momentum8, **PIECES), SHARDS, tmp_path, ranks=2)
    forward_backward = compiled(1)
    with pytest.raises(CheckpointError, match=r"a tensor subclass is read as it was saved, on the same pieces"):
        fxpipe.load(tmp_path, forward_backward, one(Momentum8)(forward_backward))


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    forward_backward = compiled(0)
    optimizer = forward_backward.optimizer(OfLabels)
    step(forward_backward, [optimizer], 0)
    with pytest.raises(CheckpointError, match=r"weight\.kept is a Labelled .*: a checkpoint holds plain tensors"):
        fxpipe.save(tmp_path, forward_backward, optimizer, step=1)
    assert not list(tmp_path.glob("step*"))


# --- torch's own helpers ---

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter: groups of several pipe ranks do not collide


@in_a_new_world
def by_torchs_helpers(folder: Path, zero: int, saves: bool) -> list[float]:
    """As README shows it, with a plain AdamW."""
    forward_backward = compiled(0 if saves else 1, pipe=2, data=2 if zero else 1, zero=zero)
    optimizer = torch.optim.AdamW(forward_backward.parameters(), lr=0.05)
    if saves:
        step(forward_backward, [optimizer], 0)
    state = get_optimizer_state_dict(forward_backward.module, optimizer, options=FLAT)
    if saves:
        dcp.save({"model": forward_backward, "optim": state}, checkpoint_id=folder)
    else:
        dcp.load({"model": forward_backward, "optim": state}, checkpoint_id=folder)
        set_optimizer_state_dict(forward_backward.module, optimizer, state, options=FLAT)
    return [step(forward_backward, [optimizer], number) for number in range(5, 9)]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_plain_optimizer_goes_through_torchs_helpers(pool: Pool, tmp_path: Path, zero: int) -> None:
    ranks = 4 if zero else 2
    first = pool.run(by_torchs_helpers, tmp_path, zero, True, ranks=ranks)
    assert pool.run(by_torchs_helpers, tmp_path, zero, False, ranks=ranks) == first
    torch.manual_seed(1)
    plain = Twins()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    state = {"model": get_model_state_dict(plain), "optim": get_optimizer_state_dict(plain, optimizer, options=FLAT)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(plain, optimizer, state["optim"], options=FLAT)
    assert plain_losses(plain, optimizer) == pytest.approx(first[0], abs=1e-6)


def test_torchs_helpers_refuse_fxpipes_optimizer_and_say_what_to_write() -> None:
    """They took its names for numbers, and gave one parameter's state to another."""
    forward_backward = compiled(0, pipe=1)
    optimizer = adam(forward_backward)["optim"]
    step(forward_backward, [optimizer], 0)
    remedy = re.escape('dcp.save({"model": forward_backward, "optim": optimizer})')
    with pytest.raises(CheckpointError, match=remedy):
        get_optimizer_state_dict(forward_backward.module, optimizer)
    with pytest.raises(CheckpointError, match=remedy):
        set_optimizer_state_dict(forward_backward.module, optimizer, optimizer.state_dict())


# --- groups ---


@in_a_new_world
def names_in_groups() -> list[list[str]]:
    forward_backward = compiled(0)
    mine = list(forward_backward.parameters())  # this rank's alone
    groups = [{"params": [p for p in mine if p.ndim > 1]}, {"params": [p for p in mine if p.ndim < 2], "lr": 0.1}]
    optimizer = forward_backward.optimizer(torch.optim.AdamW, groups)
    return [group["params"] for group in optimizer.state_dict()["param_groups"]]


def test_groups_name_the_whole_models_parameters_on_every_rank(pool: Pool) -> None:
    """One rank's list is what a checkpoint keeps: ["a"] and ["b"] were loaded as ["b"] everywhere."""
    wanted = [["first.weight", "last.weight"], ["first.bias", "last.bias"]]
    assert pool.run(names_in_groups, ranks=2) == [wanted, wanted]


@in_a_new_world
def message_of(kind: str) -> str:
    forward_backward = compiled(0)
    rank = torch.distributed.get_rank()
    groups: Any = {
        "count": [{"params": [parameter]} for parameter in forward_backward.parameters()][: 2 - rank],
        "wrong on one": ["no.such.name"] if rank else None,
    }[kind]
    with pytest.raises(RunError) as caught:
        forward_backward.optimizer(torch.optim.AdamW, groups)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("count", r"rank 0 .* and rank 1 .* have made parameter groups of their own.*name their parameters on all"),
        ("wrong on one", r"asks for 'no\.such\.name'"),
    ],
)
def test_groups_that_differ_between_ranks_are_refused_on_all(pool: Pool, kind: str, message: str) -> None:
    assert all(re.search(message, told) for told in pool.run(message_of, kind, ranks=2))


# --- frozen parameters ---


def test_a_frozen_parameter_needs_no_state(tmp_path: Path) -> None:
    """It was trained when the other parameters were saved."""
    parts = []
    for seed, frozen in ((0, False), (1, True)):
        torch.manual_seed(seed)
        model = Twins()
        model.first.requires_grad_(not frozen)
        forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=2)
        parts.append((forward_backward, adam(forward_backward)["optim"]))
    (source, optimizer), (sink, other) = parts
    step(source, [optimizer], 0)
    dcp.save({"model": source, "optim": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"model": sink, "optim": other}, checkpoint_id=tmp_path, no_dist=True)
    got, wanted = other.state_dict()["state"], optimizer.state_dict()["state"]
    assert set(got) == {"last.weight", "last.bias"}
    assert all(torch.equal(got[name][key], wanted[name][key]) for name in got for key in got[name])


@in_a_new_world
def losses_behind(by: str, layout: dict[str, Any], trained: Sequence[bool], folder: Path) -> list[list[float]]:
    """The losses that follow upon a save, and upon a load in its place."""
    models, runs = [Twins(), Twins()], []
    for model, trains in zip(models, trained, strict=True):
        model.first.requires_grad_(trains)
        forward_backward = compiled(0, model=model, precision=fxpipe.Precision(), **layout)
        runs.append({"model": forward_backward, **adam(forward_backward)})
    for number in range(2):
        step(runs[0]["model"], [runs[0]["optim"]], number)
    if by == "fxpipe":
        fxpipe.save(folder, *runs[0].values(), step=2)
        fxpipe.load(folder, *runs[1].values())
    else:
        dcp.save(runs[0], checkpoint_id=folder)
        dcp.load(runs[1], checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=trained[1]))
    models[0].first.requires_grad_(trained[1])
    return [[step(run["model"], [run["optim"]], number) for number in range(5, 8)] for run in runs]


FROZEN = [(PIPE, 1), (SHARDS, 2), ({**DATA, "zero": 2}, 2), ({**DATA, "zero": 3}, 2), (PIPE, 2)]


@pytest.mark.parametrize(
    ("layout", "trained", "by"), in_turn(FROZEN, [(False, False), (False, True), (True, False)], BOTH)
)
def test_masters_go_on_where_a_parameter_was_or_is_frozen(
    pool: Pool, tmp_path: Path, layout: tuple[dict[str, Any], int], trained: tuple[bool, bool], by: str
) -> None:
    """A frozen parameter was saved with a master alone, and loading asked for its moments: LoRA in bf16."""
    for behind_save, behind_load in pool.run(losses_behind, by, layout[0], trained, tmp_path, ranks=layout[1]):
        assert behind_load == behind_save


def test_a_state_dict_of_the_plain_optimizer_loads_as_it_is() -> None:
    """Whole tensors, without a checkpoint in between: torch.save and torch.load of get_optimizer_state_dict."""
    plain, optimizer = plain_run()
    forward_backward = compiled(1, pipe=2)
    forward_backward.load_state_dict(plain.state_dict())
    mine = forward_backward.optimizer(torch.optim.AdamW, lr=0.9)
    mine.load_state_dict(get_optimizer_state_dict(plain, optimizer))
    assert mine.param_groups[0]["lr"] == 0.05
    with pytest.raises(CheckpointError, match=r"parameter groups lack 'first\.weight'.*get_optimizer_state_dict"):
        mine.load_state_dict(optimizer.state_dict())
    got = [step(forward_backward, [mine], number) for number in range(5, 9)]
    assert got == pytest.approx(plain_losses(plain, optimizer), abs=1e-6)


# --- what another optimizer, or another kind of state, made of it ---


@pytest.mark.parametrize(
    ("cls", "saved_with", "missing"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
    ],
)
def test_options_that_need_state_which_was_not_asked_for_are_refused(
    tmp_path: Path, cls: Any, saved_with: dict[str, Any], missing: str
) -> None:
    """SGD without momentum read none of the buffers, but the momentum, and went on from buffers of its own."""
    source, sink = compiled(0), compiled(1)
    optimizer, other = source.optimizer(cls, lr=0.1, **saved_with), sink.optimizer(cls, lr=0.2)
    step(source, [optimizer], 0)
    dcp.save({"model": source, "optim": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=rf"first\.weight comes with .*needs .*{missing}.*the same arguments"):
        dcp.load({"optim": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other.param_groups[0]["lr"] == 0.2


def test_one_group_is_not_loaded_into_two() -> None:
    """Biases without decay had the decay of all from then on; torch's own load_state_dict refuses it, too."""
    source, sink = compiled(0), compiled(1)
    state = source.optimizer(torch.optim.AdamW, weight_decay=0.1).state_dict()
    groups = [{"params": "*.weight", "weight_decay": 0.1}, {"params": "*.bias", "weight_decay": 0.0}]
    other = sink.optimizer(torch.optim.AdamW, groups)
    with pytest.raises(CheckpointError, match=r"parameter group 1 has last\.bias, of the groups \[0\] that were saved"):
        other.load_state_dict(state)


class Words(nn.Module):
    """A table with sparse gradients, and whole numbers among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 7, sparse=True)
        self.places = nn.Parameter(torch.arange(3), requires_grad=False)
        self.head = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.table((x.abs() * 3).long()[:, 0]))
        return self.head(h + self.places.sum()).square().mean()


def test_sparse_gradients_and_whole_numbers_are_saved_and_loaded(tmp_path: Path) -> None:
    """SparseAdam refused the dense gradient of a trial step, AdamW had no mean of whole numbers: neither loaded."""
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        forward_backward = fxpipe.compile(Words(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
        sparse = forward_backward.optimizer(torch.optim.SparseAdam, "table.*", lr=0.1)
        rest = forward_backward.optimizer(torch.optim.AdamW, ["head.*", "places"], lr=0.1)
        runs.append({"model": forward_backward, "sparse": sparse, "rest": rest})
    (source, *optimizers), (sink, *others) = (list(run.values()) for run in runs)
    for number in range(2):
        step(source, optimizers, number)
    dcp.save(runs[0], checkpoint_id=tmp_path, no_dist=True)
    dcp.load(runs[1], checkpoint_id=tmp_path, no_dist=True)
    wanted = [step(source, optimizers, number) for number in range(5, 8)]
    assert [step(sink, others, number) for number in range(5, 8)] == wanted


# --- masters ---


@in_a_new_world
def distance_from_plain(folder: Path, zero: int) -> float:
    forward_backward = compiled(1, pipe=1, data=2, zero=zero, precision=fxpipe.Precision())
    optimizer = adam(forward_backward)["optim"]
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": forward_backward, "optim": optimizer}, checkpoint_id=folder, planner=planner)
    state = forward_backward.state_dict(full=True)
    return max(float((state[name] - tensor).abs().max()) for name, tensor in plain_run()[0].state_dict().items())


@pytest.mark.parametrize("zero", [1, 3])
def test_masters_that_a_checkpoint_lacks_follow_the_model(pool: Pool, tmp_path: Path, zero: int) -> None:
    """With zero=3 the parameters went back to what they were before the load, silently: a copy of them was loaded."""
    model, optimizer = plain_run()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert max(pool.run(distance_from_plain, tmp_path, zero, ranks=2)) < 2**-8  # bfloat16 of numbers below 1


# --- around the step ---


def test_a_grad_scaler_and_hooks_on_state_dicts_are_refused() -> None:
    """It divided by 65536 gradients that had never been multiplied by it, and with shards left out every step."""
    forward_backward = compiled(0)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE)
    forward_backward(rows(0))
    scaler.scale(torch.ones((), device=DEVICE))  # of another model's loss
    with pytest.raises(RunError, match=r"a GradScaler cannot step this optimizer.*write optimizer\.step\(\)"):
        scaler.step(optimizer)
    torch.amp.GradScaler(DEVICE, enabled=False).step(optimizer)
    for when in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        with pytest.raises(RunError, match="run no hooks; change the dict itself"):
            getattr(optimizer, f"register_{when}_hook")(lambda *_: None)
