"""zero=3 with one micro-batch: parameters are freed between forward and backward, against plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import fxpipe
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError
from fxpipe.precision import Precision
from fxpipe.tensors.dtensors import whole_of
from tests.pool import Pool
from tests.sharding.test_fully_sharded import (
    IDS,
    ONE_NODE,
    WIDTH,
    batch,
    chain,
    check,
    compiled,
    noting,
    plain_gradients,
)
from tests.sharding.test_parallelize import in_a_new_world


class Layers(nn.Module):
    """Four layers; subclasses read them in other ways. Each layer is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class FirstAndLast(Layers):
    """The first layer's weight is the last layer's, too, as an embedding may be."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return F.linear(x, self.layers[0].weight).square().mean()


class ViewAtTheEnd(Layers):
    """A view of the first layer's weight is used behind the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        row = self.layers[0].weight[1]
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * row).square().mean()


class Transposed(Layers):
    """Products with views: autograd saves no parameter itself."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (x @ layer.weight.t()[:, :WIDTH] + layer.bias[None]).tanh()
        return x.square().mean()


class Skips(Layers):
    """The first layer's backward comes last and second, as in a U-Net, and the third layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first).relu_()
        third = self.layers[2](second + x)
        return self.layers[3](third * first).square().mean()


class WithModes(Layers):
    """A part without gradients, and a part under autocast, as the positions of Hugging Face's models have."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            scale = x.square().mean().sqrt() + 1
        for layer in self.layers:
            x = layer(x * scale).tanh()
        return x.square().mean()


class Hooked(Layers):
    """A hook of a module may read any parameter, so nothing is freed early."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda *_: None)


class InStages(Layers):
    """Two stages of two layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x).tanh())
        x = fxpipe.stage_boundary(x)
        return self.layers[3](self.layers[2](x).tanh()).square().mean()


def seeded(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    return build


def whole_of_units(forward_backward: Any) -> int:
    """How many units have whole weights in memory."""
    units = forward_backward._reducer._units
    return sum(any(bool(p.untyped_storage().nbytes()) for p in unit.whole.values()) for unit in units)


@in_a_new_world
def trained(kind: type[nn.Module], topology: Topology, options: dict[str, Any]) -> list[int]:
    """The numbers of whole units when a unit has arrived, in the third step, whose gradients are plain PyTorch's."""
    build = seeded(kind)
    forward_backward, x = compiled(build, topology, 1, example_args=(batch()[:4],), **options)
    expected = plain_gradients(build, topology.size("data"), 1)
    counts = list[int]()
    for call in range(3):
        for unit in forward_backward._reducer._units if call == 2 else ():
            unit.wait = lambda wait=unit.wait: [wait(), counts.append(whole_of_units(forward_backward))]
        forward_backward.zero_grad()
        forward_backward(x)
        check(forward_backward, expected)
        assert whole_of_units(forward_backward) == 0
    return counts


PIPE = Topology([("pipe", 2), ("data", 2)])
ONE_AHEAD = [1, 2, 2, 2, 1, 1, 1]
"""When a unit arrives in forward, the unit before it is whole, too. The last unit stays from forward to backward. When
a unit arrives in backward, the unit behind it is free."""
CASES: dict[str, tuple[type[nn.Module], Topology, dict[str, Any], list[int]]] = {
    "symbolic": (Layers, ONE_NODE, {"tracer": "symbolic"}, ONE_AHEAD),
    "export": (Layers, ONE_NODE, {"tracer": "export"}, ONE_AHEAD),
    "record": (Layers, ONE_NODE, {"tracer": "record"}, ONE_AHEAD),
    "views": (Transposed, ONE_NODE, {}, ONE_AHEAD),
    "modes": (WithModes, ONE_NODE, {}, ONE_AHEAD),
    "skips": (Skips, ONE_NODE, {}, [1, 2, 2, 2, 2, 2, 1]),
    "first and last": (FirstAndLast, ONE_NODE, {}, [1, 2, 3, 3, 2, 2]),
    "view at the end": (ViewAtTheEnd, ONE_NODE, {}, [1, 2, 3, 3, 2, 2, 1]),
    # All units stay, and are gathered twice all the same: other replicas may have no hooks.
    "hooks": (Hooked, ONE_NODE, {}, [1, 2, 3, 4, 4, 4, 4]),
    "recomputed": (InStages, ONE_NODE, {"recompute": True}, [1, 2, 3, 4, 3]),
    "two stages on a rank": (InStages, ONE_NODE, {}, [1, 2, 2, 3, 2, 1]),
    "pipeline": (InStages, PIPE, {}, [1, 2, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_freed_between_forward_and_backward(pool: Pool, case: str) -> None:
    kind, topology, options, counts = CASES[case]
    ranks = topology.world_size
    assert pool.run(trained, kind, topology, options, ranks=ranks) == [counts] * ranks


@in_a_new_world
def in_bfloat16() -> None:
    found = []
    for kind in (Layers, Hooked):
        forward_backward, x = compiled(seeded(kind), ONE_NODE, 1, example_args=(batch()[:4],), precision=Precision())
        for _ in range(2):
            forward_backward.zero_grad()
            forward_backward(x)
        found.append([whole_of(parameter.grad) for parameter in forward_backward.parameters()])
    assert all(map(torch.equal, *found))


def test_mixed_precision_has_the_bits_of_a_step_that_frees_nothing(pool: Pool) -> None:
    pool.run(in_bfloat16, ranks=2)


@in_a_new_world
def waited() -> list[str]:
    forward_backward = fxpipe.compile(
        chain(), ONE_NODE, microbatches=1, zero=fxpipe.Zero(3, bucket_mb=1e-6), example_args=(IDS,)
    )
    rows, events = IDS.chunk(2)[torch.distributed.get_rank()], list[str]()
    forward_backward(rows)
    for unit in forward_backward._reducer._units:
        unit.wait = noting(events, next(iter(unit.shards)).removesuffix(".weight").removesuffix(".0"), unit.wait)
    forward_backward.zero_grad()
    forward_backward(rows)
    model = chain()
    model(IDS).backward()
    check(forward_backward, {name: parameter.grad for name, parameter in model.named_parameters()})
    return events


def test_only_what_forward_is_done_with_before_another_block_begins_is_gathered_twice(pool: Pool) -> None:
    """Layer 0 and the gain are used at the end again, and behind layer 2 no other block begins."""
    order = ["embedding", "layers.0", "gain", "layers.1", "layers.2", "layers.1", "embedding"]
    assert pool.run(waited, ranks=2) == [order, order]


@in_a_new_world
def without_weight(weights: list[float]) -> None:
    rows = batch().chunk(2)

    def weight_of(x: Tensor) -> float:
        return weights[int(torch.equal(x, rows[1]))]

    build = seeded(Layers)
    forward_backward, x = compiled(build, ONE_NODE, 1, example_args=(rows[0],), loss_weight=weight_of)
    expected = plain_gradients(build, 2, 1, weights)
    for _ in range(3):
        forward_backward.zero_grad()
        forward_backward(x)
        check(forward_backward, expected)


@pytest.mark.parametrize("weights", [[2.0, 0.0], [0.0, 1.0]])
def test_a_replica_without_a_backward_gathers_as_often_as_others(pool: Pool, weights: list[float]) -> None:
    pool.run(without_weight, weights, ranks=2)


@in_a_new_world
def watched_on_one_rank() -> None:
    build = seeded(Layers)
    forward_backward, x = compiled(build, ONE_NODE, 1, example_args=(batch()[:4],))
    expected, is_first = plain_gradients(build, 2, 1), torch.distributed.get_rank() == 0
    for call in range(4):
        forward_backward.zero_grad()
        with register_module_forward_hook(lambda *_: None) if is_first and call > 1 else contextlib.nullcontext():
            forward_backward(x)
        check(forward_backward, expected)


def test_a_hook_on_one_rank_alone_changes_no_gather(pool: Pool) -> None:
    """As counters of FLOPs have it, which run on one rank. The other ranks waited for a gather."""
    pool.run(watched_on_one_rank, ranks=2, seconds=60)


@in_a_new_world
def evaluated() -> list[int]:
    build = seeded(Layers)
    forward_backward, x = compiled(build, ONE_NODE, 1, example_args=(batch()[:4],))
    counts = list[int]()
    wanted = torch.stack([build()(part) for part in batch().chunk(2)]).mean()
    for call in range(3):
        for unit in forward_backward._reducer._units if call == 2 else ():
            unit.wait = lambda wait=unit.wait: [wait(), counts.append(whole_of_units(forward_backward))]
        torch.testing.assert_close(forward_backward.evaluate(x), wanted.detach())
        forward_backward(x) if call == 0 else None
    return counts


def test_evaluation_frees_what_forward_is_done_with(pool: Pool) -> None:
    assert pool.run(evaluated, ranks=2) == [[1, 2, 2, 2]] * 2


class Writes(Layers):
    """Writes a parameter, or a tensor that autograd has saved."""

    what = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x).exp()
        if self.what == "parameter":
            self.layers[0].weight.detach().mul_(2)
        elif self.what == "saved":
            y.mul_(2)
        for layer in self.layers[1:]:
            x = layer(x)
        return (x * y).square().mean()


class WritesParameter(Writes):
    what = "parameter"


class WritesSaved(Writes):
    what = "saved"


@in_a_new_world
def written(kind: type[nn.Module], error: type[Exception], text: str) -> None:
    forward_backward, x = compiled(seeded(kind), ONE_NODE, 1, tracer="symbolic", example_args=(batch()[:4],))
    for _ in range(2):
        with pytest.raises(error, match=text):
            forward_backward(x)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(WritesParameter, "zero=3 gathers parameters for a call"), (WritesSaved, "modified by an inplace operation")],
)
def test_writes_are_errors_as_in_a_step_that_frees_nothing(pool: Pool, kind: type[nn.Module], text: str) -> None:
    pool.run(written, kind, RunError, text, ranks=2)
