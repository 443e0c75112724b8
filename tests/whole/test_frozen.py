"""Frozen stages: with nothing to train in them or before them they have no backward, in the table and when it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import StageGraph, Topology
from fxpipe.run import exchange
from fxpipe.schedules.action import Op
from tests.harness import (
    Engines,
    Steps,
    accumulate,
    assert_gradients,
    assert_steps,
    cut,
    gradients_of,
    replica_of,
    steps_of,
)
from tests.pool import Pool
from tests.thinned import in_turn

WIDTH, ROWS, PARTS, STEPS = 6, 8, 4, 3
PIPE = [("pipe", 4)]
ENGINES = ["local", "strict 3", "distributed"]
TRACERS = ["symbolic", "export", "record"]


class Adapter(nn.Module):
    """A layer whose own weights stay as they are, beside a product of two small matrices that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


class Chain(nn.Module):
    """Four stages in a row, each a layer."""

    def __init__(self, *layers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (make() for make in layers)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(torch.tanh(self.a(x)), name="b")
        h = fxpipe.stage_boundary(torch.tanh(self.b(h)), name="c")
        h = fxpipe.stage_boundary(torch.tanh(self.c(h)), name="d")
        return (self.d(h) - x).square().sum(-1).mean()


class Towers(nn.Module):
    """A frozen image tower of two stages beside a text tower that is trained; the last stage takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2))
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        image = fxpipe.stage_boundary(torch.tanh(self.a(x)), name="b")
        image = fxpipe.stage_boundary(torch.tanh(self.b(image)), name="d")
        text = fxpipe.stage_boundary(torch.tanh(self.c(x)), name="d")
        return (self.d(text) * image).square().sum(-1).mean()


def trained() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[bool, ...]]] = {
    "a frozen encoder": (partial(Chain, frozen, frozen, trained, trained), (False, False, True, True)),
    "adapters in the last two": (partial(Chain, frozen, frozen, Adapter, Adapter), (False, False, True, True)),
    "an adapter at the very end": (partial(Chain, frozen, frozen, frozen, Adapter), (False, False, False, True)),
    "frozen behind a trained one": (partial(Chain, trained, frozen, frozen, frozen), (True, True, True, True)),
    "a frozen tower": (Towers, (False, False, True, True)),
}
"""Model → whether each of its four stages, in order of their names, has a backward."""


def batch(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))}


BATCHES = [batch(step) for step in range(STEPS)]


def tracer_options(tracer: str) -> dict[str, Any]:
    return {"tracer": tracer} | ({} if tracer == "symbolic" else {"example_kwargs": batch(0)})


def stepped(make: Callable[[], nn.Module], options: dict[str, Any]) -> tuple[Steps, list[str]]:
    """Losses, this rank's gradients of each step, and the stages with a backward."""
    forward_backward = fxpipe.compile(built(make), Topology(PIPE), microbatches=PARTS, **options)
    names = forward_backward.stages.names
    backwards = {names[a.stage] for row in forward_backward.schedule.rows for a in row if a.op is not Op.F}
    return steps_of(forward_backward, BATCHES), sorted(backwards)


@pytest.mark.parametrize(("name", "engine", "tracer"), in_turn(list(MODELS), ENGINES, TRACERS))
def test_gradients_are_plain_pytorchs_and_frozen_parameters_have_none(
    name: str, engine: str, tracer: str, engines: Engines
) -> None:
    make, backward = MODELS[name]
    results = engines(engine)(4, stepped, make, tracer_options(tracer))
    assert_steps([steps for steps, _ in results], built(make), BATCHES, PARTS)
    expected = [stage for stage, has in zip("abcd", backward, strict=True) if has]
    assert all(backwards == expected for _, backwards in results)


def most_under_way(parts: int) -> int:
    """The most messages that this rank has sent and not seen received, in steps of which the first describes them."""
    most, send = 0, exchange._Wire.send

    def counting(wire: exchange._Wire, value: Any) -> None:
        nonlocal most
        send(wire, value)
        most = max(most, len(wire._exchange.sending))

    forward_backward = fxpipe.compile(built(MODELS["a frozen encoder"][0]), Topology(PIPE), microbatches=parts)
    with patch.object(exchange._Wire, "send", counting):
        for step in range(STEPS):
            forward_backward(batch(step)["x"].repeat(parts // ROWS, 1))
    return most


def test_a_frozen_stage_holds_two_of_what_it_has_sent_however_many_micro_batches_there_are(pool: Pool) -> None:
    """Stages behind it that are trained hold their gradients' and their values' in flight, d(s) at most."""
    first, second, *_ = pool.run(most_under_way, 24, ranks=4)
    assert (first, second) == (2, 2)


def test_the_users_own_stages_may_be_frozen_too() -> None:
    def graph() -> StageGraph:
        torch.manual_seed(0)
        stages = {"a": frozen(), "b": nn.Sequential(nn.Tanh(), trained()), "loss": lambda h: h.square().sum(-1).mean()}
        return StageGraph.from_callables(stages, [("a", "b"), ("b", "loss")], {"a": ["x"]})

    forward_backward = fxpipe.compile(graph(), Topology([("pipe", 3)]), microbatches=PARTS)
    plain = graph().module
    loss = forward_backward(**batch(0))
    a, b = plain.get_submodule("a"), plain.get_submodule("b")
    wanted, _ = accumulate(lambda _, part: b(a(part["x"])).square().sum(-1).mean(), cut(batch(0), PARTS))
    assert torch.equal(loss, wanted)
    assert [stage.has_backward for stage in forward_backward.stages] == [False, True, True]
    assert_gradients(gradients_of(forward_backward.named_parameters()), plain)


# --- freezing and unfreezing between calls ---


def switched(tracer: str, frozen_in: Sequence[bool]) -> Steps:
    """A step for each entry, which says whether the first stage is frozen in it."""
    model = built(partial(Chain, trained, trained, trained, trained))
    model.a.requires_grad_(not frozen_in[0])
    forward_backward = fxpipe.compile(model, Topology(PIPE), microbatches=PARTS, **tracer_options(tracer))
    found = []
    for step, is_frozen in enumerate(frozen_in):
        model.a.requires_grad_(not is_frozen)
        found += steps_of(forward_backward, [batch(step)])
    return found


@pytest.mark.parametrize(
    ("frozen_in", "engine", "tracer"),
    [((False, True, False), "local", "export"), ((True, False, True, False), "distributed", "symbolic")],
)
def test_a_stage_may_be_frozen_and_unfrozen_between_calls(
    frozen_in: Sequence[bool], engine: str, tracer: str, engines: Engines
) -> None:
    """Where it was frozen at compile a way for its gradient is opened."""
    runs = engines(engine)(4, switched, tracer, frozen_in)
    plain = built(partial(Chain, trained, trained, trained, trained))
    for step, is_frozen in enumerate(frozen_in):
        plain.a.requires_grad_(not is_frozen)
        plain.a.zero_grad()
        assert_steps([run[step:] for run in runs], plain, [batch(step)], PARTS)


# --- over replicas ---


def replica_batch(step: int, replica: int) -> dict[str, Tensor]:
    return batch(10 * step + replica)


def stepped_with_replicas(zero: int, frozen_in: Sequence[bool]) -> dict[str, Tensor]:
    """The state after a step of SGD for each entry, which says whether the third of four stages is frozen in it."""
    model = built(partial(Chain, frozen, trained, trained, trained))
    model.c.requires_grad_(not frozen_in[0])
    topology = Topology([("pipe", 2), ("data", 2)])
    placement = {"a": 0, "b": 0, "c": 1, "d": 1}
    forward_backward = fxpipe.compile(model, topology, microbatches=PARTS, placement=placement, zero=zero)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    for step, is_frozen in enumerate(frozen_in):
        model.c.requires_grad_(not is_frozen)
        optimizer.zero_grad()
        forward_backward(**replica_batch(step, replica_of(topology)))
        optimizer.step()
    return forward_backward.state_dict(full=True)


@pytest.mark.parametrize(("zero", "frozen_in"), [(2, (False, True, False)), (3, (True, False, True))])
def test_a_stage_with_a_backward_may_be_frozen_and_unfrozen_over_replicas(
    pool: Pool, zero: int, frozen_in: Sequence[bool]
) -> None:
    model = built(partial(Chain, frozen, trained, trained, trained))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, is_frozen in enumerate(frozen_in):
        model.c.requires_grad_(not is_frozen)
        optimizer.zero_grad()
        parts = [part for replica in range(2) for part in cut(replica_batch(step, replica), PARTS)]
        accumulate(lambda _, part: model(**part), parts)
        optimizer.step()
    for state in pool.run(stepped_with_replicas, zero, frozen_in):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
