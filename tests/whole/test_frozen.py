"""Frozen stages: with nothing to train in them or before them they have no backward, in the table and when it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import StageGraph, Topology
from fxpipe.run import exchange
from fxpipe.schedules.kinds import Kind
from tests.harness import (
    Engines,
    Steps,
    accumulate,
    assert_gradients,
    assert_steps,
    compiled,
    cut,
    gradients_of,
    replica_of,
    steps_of,
)
from tests.models import CASES, linear
from tests.pool import Pool

PARTS = 4
PIPE = [("pipe", 4)]
CHAIN = CASES["chain"]


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


BACKWARDS: dict[str, tuple[bool, ...]] = {
    "frozen first": (False, False, True, True),
    "two adapters": (False, False, True, True),
    "an adapter": (False, False, False, True),
    "frozen behind": (True, True, True, True),
    "frozen tower": (False, False, True, True),
}
"""Model → whether each of its stages has a backward. ``test_transparency`` trains them."""


@pytest.mark.parametrize("name", BACKWARDS)
def test_stages_in_front_of_all_that_is_trained_have_no_backward(name: str) -> None:
    forward_backward = compiled(CASES[name])
    assert tuple(stage.has_backward for stage in forward_backward.stages) == BACKWARDS[name]
    backwards = {action.stage for row in forward_backward.schedule.rows for action in row if action.kind is not Kind.F}
    assert backwards == {stage for stage, has in enumerate(BACKWARDS[name]) if has}


def most_under_way(parts: int) -> int:
    """The most messages that this rank has sent and not seen received, in steps of which the first describes them."""
    most, send = 0, exchange._Wire.send

    def counting(wire: exchange._Wire, value: Any) -> None:
        nonlocal most
        send(wire, value)
        most = max(most, len(wire._exchange.sending))

    case = CASES["frozen first"]
    forward_backward = compiled(case, microbatches=parts)
    with patch.object(exchange._Wire, "send", counting):
        for batch in case.batches(rows=parts):
            forward_backward(**batch)
    return most


def test_a_frozen_stage_holds_two_of_what_it_has_sent_however_many_micro_batches_there_are(pool: Pool) -> None:
    """Stages behind it that are trained hold their gradients' and their values' in flight, d(s) at most."""
    first, second, *_ = pool.run(most_under_way, 24, ranks=4)
    assert (first, second) == (2, 2)


def test_the_users_own_stages_may_be_frozen_too() -> None:
    def graph() -> StageGraph:
        torch.manual_seed(0)
        stages = {"a": frozen(), "b": nn.Sequential(nn.Tanh(), linear()), "loss": lambda h: h.square().sum(-1).mean()}
        return StageGraph.from_callables(stages, [("a", "b"), ("b", "loss")], {"a": ["x"]})

    forward_backward = fxpipe.compile(graph(), Topology([("pipe", 3)]), microbatches=PARTS)
    plain, batch = graph().module, {"x": CASES["chain"].batch()["x"]}
    a, b = plain.get_submodule("a"), plain.get_submodule("b")
    wanted, _ = accumulate(lambda _, part: b(a(part["x"])).square().sum(-1).mean(), cut(batch, PARTS))
    assert torch.equal(forward_backward(**batch), wanted)
    assert [stage.has_backward for stage in forward_backward.stages] == [False, True, True]
    assert_gradients(gradients_of(forward_backward.named_parameters()), plain)


# --- freezing and unfreezing between calls ---


def switched(tracer: str, frozen_in: Sequence[bool]) -> Steps:
    """A step for each entry, which says whether the first stage is frozen in it."""
    model = CHAIN.model()
    model.layers[0].requires_grad_(not frozen_in[0])
    options = {} if tracer == "symbolic" else {"example_kwargs": CHAIN.batch()}
    forward_backward = fxpipe.compile(model, Topology(PIPE), microbatches=PARTS, tracer=tracer, **options)
    found = []
    for step, is_frozen in enumerate(frozen_in):
        model.layers[0].requires_grad_(not is_frozen)
        found += steps_of(forward_backward, [CHAIN.batch(step)])
    return found


@pytest.mark.parametrize(
    ("frozen_in", "engine", "tracer"),
    [((False, True, False), "local", "export"), ((True, False, True, False), "distributed", "symbolic")],
)
def test_a_stage_may_be_frozen_and_unfrozen_between_calls(
    frozen_in: Sequence[bool], engine: str, tracer: str, engines: Engines
) -> None:
    """Where it was frozen at compile a way for its gradient is opened."""
    runs, plain = engines(engine)(4, switched, tracer, frozen_in), CHAIN.model()
    for step, is_frozen in enumerate(frozen_in):
        plain.layers[0].requires_grad_(not is_frozen)
        plain.layers[0].zero_grad()
        assert_steps([run[step:] for run in runs], plain, [CHAIN.batch(step)], PARTS)


# --- over replicas ---


def of_replicas(frozen_in: Sequence[bool], model: nn.Module, step: Callable[[int], object], optimizer: Any) -> None:
    """A step of SGD for each entry, which says whether the third of four stages is frozen in it."""
    for number, is_frozen in enumerate(frozen_in):
        model.layers[2].requires_grad_(not is_frozen)
        optimizer.zero_grad()
        step(number)
        optimizer.step()


def stepped_with_replicas(zero: int, frozen_in: Sequence[bool]) -> dict[str, Tensor]:
    model = CHAIN.model()
    model.layers[0].requires_grad_(False)
    model.layers[2].requires_grad_(not frozen_in[0])
    topology = Topology([("pipe", 2), ("data", 2)])
    placement = {"layers.0": 0, "layer1": 0, "layer2": 1, "layer3": 1}
    forward_backward = fxpipe.compile(model, topology, microbatches=PARTS, placement=placement, zero=zero)
    replica = replica_of(topology)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    of_replicas(frozen_in, model, lambda step: forward_backward(**CHAIN.batch(10 * step + replica)), optimizer)
    return forward_backward.state_dict(full=True)


@pytest.mark.parametrize(("zero", "frozen_in"), [(2, (False, True, False)), (3, (True, False, True))])
def test_a_stage_with_a_backward_may_be_frozen_and_unfrozen_over_replicas(
    pool: Pool, zero: int, frozen_in: Sequence[bool]
) -> None:
    model = CHAIN.model()
    model.layers[0].requires_grad_(False)

    def step(number: int) -> None:
        parts = [part for replica in range(2) for part in cut(CHAIN.batch(10 * number + replica), PARTS)]
        accumulate(lambda _, part: model(**part), parts)

    of_replicas(frozen_in, model, step, torch.optim.SGD(model.parameters(), lr=0.1))
    for state in pool.run(stepped_with_replicas, zero, frozen_in):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
