"""Measured memory: the bytes that ranks hold around each action are those that follow from the model's shapes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import RunError, Timeline, Topology
from tests.gpus import Gpus
from tests.harness import Engine, engine_of
from tests.thinned import every

WIDTH, HIDDEN, ROWS, MICROBATCHES, STAGES = 32, 96, 8, 4, 4
FLOAT = 4  # bytes


class Block(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.checkpoints = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpoints else self.run(x)  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(fxpipe.stage_boundary(x, name=f"s{number}") if number else x)
        return x.square().mean()


def formula(stage: int, kind: str, options: dict[str, Any]) -> int:
    """The bytes that a stage of ``Stack`` holds of a micro-batch after such an action.

    After F: each linear layer has saved its input, GELU its own, and the square in the last stage its own. The batch,
    the first stage's input, does not count. After I: both layers' inputs, and the gradients of both results.
    """
    given, hidden, result = WIDTH * (stage > 0), HIDDEN, WIDTH
    loss = result * (stage == STAGES - 1)
    if options.get("checkpoints"):
        again = {"F": given + loss}
    elif f"s{stage}" in options.get("recompute", ()):
        again = {"F": given, "R": given + 2 * hidden + loss}
    else:
        again = {"F": given + 2 * hidden + loss, "I": given + hidden + hidden + result}
    return FLOAT * ROWS * again.get(kind, 0)


def held_by_formula(timeline: Timeline, rank: int, options: dict[str, Any]) -> list[tuple[str, int]]:
    """(action, the bytes that its rank holds after it), for each action of the rank's row."""
    held, notes = Counter[tuple[int, int]](), list[tuple[str, int]]()
    away = Counter[tuple[int, int]]()
    for action in timeline.schedule.rows[rank]:
        half, kind = (action.stage, action.microbatch), action.kind.letter
        if kind == "O":
            away[half], held[half] = held[half], 0
        elif kind == "P":
            held[half] = away[half]
        else:
            held[half] = formula(action.stage, kind, options)
        notes.append((str(action), held.total()))
    return notes


def batch() -> Tensor:
    return torch.randn(ROWS * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1))


def stepped(options: dict[str, Any], memory: bool) -> tuple[fxpipe.ForwardBackward, list[Tensor]]:
    """Two steps, the second recorded, and their losses and gradients."""
    torch.manual_seed(0)
    options = {"example_args": (batch(),), "microbatches": MICROBATCHES, **options}
    model = Stack(options.pop("checkpoints", False))
    topology = Topology([("pipe", 2), ("data", 2)] if options.get("zero") else [("pipe", 2)])
    forward_backward = fxpipe.compile(model, topology, **options)
    forward_backward(batch())
    forward_backward.record_timeline(memory, memory=memory)
    loss = forward_backward(batch())
    gradients = [parameter.grad for _, parameter in forward_backward.named_parameters()]
    locals_ = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients if gradient is not None]
    return forward_backward, [loss, *(gradient.clone() for gradient in locals_)]


def measured(options: dict[str, Any]) -> tuple[Timeline, bool]:
    """The timeline with bytes, and whether the step has the same bits as without."""
    forward_backward, with_bytes = stepped(options, memory=True)
    timeline = forward_backward.timeline(memory=True)
    forward_backward.close()
    other, without = stepped(options, memory=False)
    other.close()
    return timeline, all(map(torch.equal, with_bytes, without))


@pytest.fixture(params=["local", "distributed"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"schedule": "zb_h1"},
    {"recompute": ["s1", "s2"]},
    {"schedule": "gpipe", "offload": ["s1", "s2"]},
    {"checkpoints": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_rank_holds_after_each_action_what_the_shapes_tell(options: dict[str, Any], engine: Engine) -> None:
    for timeline, is_same in engine(2, measured, options):
        assert is_same
        for rank, row in enumerate(timeline.memory):
            wanted = held_by_formula(timeline, rank, options)
            assert [(str(each.action), each.end) for each in row] == wanted
            assert [each.start for each in row] == [0, *(end for _, end in wanted[:-1])]
            assert timeline.peak_bytes is not None
            assert timeline.peak_bytes[rank] == max(end for _, end in wanted)


@pytest.mark.parametrize("options", every(2, OPTIONS[:3]), ids=str)
def test_the_measured_peak_is_the_planned_one_and_is_told_with_its_action(options: dict[str, Any]) -> None:
    timeline, _ = measured(options)
    assert timeline.peak_bytes == timeline.planned_peak_bytes
    for rank, row in enumerate(timeline.memory):
        peak = max(row, key=lambda each: each.end)
        size = f"{peak.end / 1024:.1f} KiB"
        assert f"rank {rank}: peak {size} at {peak.action} (planned {size})" in str(timeline)


def test_zero_3_keeps_its_bits_and_no_whole_parameter_counts(pool: Any) -> None:
    for timeline, is_same in pool.run(measured, {"zero": 3}, ranks=4):
        assert is_same
        for rank, row in enumerate(timeline.memory):
            assert [(str(each.action), each.end) for each in row] == held_by_formula(timeline, rank, {})


class Packing(nn.Module):
    """Saves by a hook that packs a copy."""

    unpacked = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.clone(),), self.unpack):
            return x.exp()

    def unpack(self, packed: tuple[Tensor]) -> Tensor:
        self.unpacked += 1
        return packed[0]


def test_what_a_hook_has_packed_counts_and_only_the_backward_unpacks_it() -> None:
    stages = {"a": nn.Linear(4, 4), "b": (packing := Packing()), "loss": lambda x: x.sum()}
    graph = fxpipe.StageGraph.from_callables(stages, [("a", "b"), ("b", "loss")], {"a": ["x"]})
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 3)]), microbatches=2)
    forward_backward.record_timeline(memory=True)
    forward_backward(torch.randn(6, 4))
    assert packing.unpacked == 2  # once for each micro-batch
    assert forward_backward.timeline(memory=True).memory[1][0].end == 3 * 4 * FLOAT


def not_recorded(rank_that_forgot: int) -> str:
    forward_backward = fxpipe.compile(Stack(), Topology([("pipe", 2)]), microbatches=MICROBATCHES)
    forward_backward.record_timeline(memory=forward_backward._transport.pipe_rank != rank_that_forgot)
    forward_backward(batch())
    with pytest.raises(RunError) as error:
        forward_backward.timeline(memory=True)
    assert forward_backward.timeline().memory == ()
    forward_backward(batch())
    return str(error.value)


def test_bytes_that_not_every_rank_recorded_are_an_error_on_all_and_times_are_there(pool: Any) -> None:
    told = "the bytes of step 0 were not recorded on rank 1 of the pipe group; call record_timeline(memory=True)"
    assert pool.run(not_recorded, 1, ranks=2) == [f"{told} before the step, on every rank"] * 2


def counted_by_device() -> tuple[Timeline, int, bool]:
    device = fxpipe.init()
    x, gradients = torch.linspace(-1, 1, 4 * 64 * 8, device="cpu").reshape(-1, 8).to(device), []
    for memory in (False, True):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 4096), nn.GELU(), nn.Linear(4096, 8)) for _ in range(2)]
        model = nn.Sequential(*layers).to(device)
        options: dict[str, Any] = {"microbatches": 4, "boundaries": ["1"], "loss_fn": lambda y: y.square().mean()}
        forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), **options)
        forward_backward.record_timeline(memory=memory)
        for _ in range(2):
            forward_backward.zero_grad(set_to_none=False)
            forward_backward(x)
        gradients.append([parameter.grad for parameter in forward_backward.parameters()])
    parameters = sum(parameter.nbytes for parameter in forward_backward.parameters())
    return forward_backward.timeline(memory=True), parameters, all(map(torch.equal, *gradients))


def test_on_a_gpu_it_is_the_devices_counter(gpus: Gpus) -> None:
    saved, small = 64 * 2 * 4096 * FLOAT, 1 << 17  # of a micro-batch: the inputs of GELU and of the layer after it
    for timeline, parameters, is_same in gpus.run(counted_by_device, ranks=2):
        assert is_same
        for rank, row in enumerate(timeline.memory):
            begin, in_flight = row[0].start, 0
            assert begin >= 2 * parameters  # and their gradients
            for each in row:
                in_flight += 1 if each.action.kind.letter == "F" else -1
                assert 0 <= each.end - begin - in_flight * saved < small
            peak = timeline.peaks[rank]
            assert peak is not None
            assert 0 <= peak.most - begin - (2 - rank) * saved < small
            told = f"peak {peak.most / 2**20:.1f} MiB at {peak.action}, {(peak.most - begin) / 2**20:.1f} MiB more"
            assert told in str(timeline)
