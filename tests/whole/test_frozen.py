"""Frozen stages: with nothing to train in them or before them they have no backward, in the table and when it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import StageGraph, Topology
from fxpipe.errors import PartitionError
from fxpipe.run import exchange
from fxpipe.schedules.action import Op
from tests.harness import engine_of
from tests.pool import Pool
from tests.thinned import ALL, every, in_turn

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


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def plain(model: nn.Module, x: Tensor) -> Tensor:
    """The sum of micro-batches' losses, each with its share, in order; gradients are left in the model."""
    total = torch.zeros(())
    for part in x.chunk(PARTS):
        loss = model(part) / PARTS
        loss.backward()
        total = total + loss.detach()
    return total


def tracer_options(tracer: str) -> dict[str, Any]:
    return {"tracer": tracer} | ({} if tracer == "symbolic" else {"example_args": (batch(0),)})


def stepped(
    make: Callable[[], nn.Module], options: dict[str, Any]
) -> tuple[list[Any], list[dict[str, Any]], list[str]]:
    """Losses, this rank's gradients after each step, and the cells with a backward."""
    forward_backward = fxpipe.compile(built(make), Topology(PIPE), microbatches=PARTS, **options)
    losses, gradients = [], []
    for step in range(STEPS):
        forward_backward.zero_grad()
        losses.append(forward_backward(batch(step)))
        gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in forward_backward.named_parameters()}
        )
    names = forward_backward.stages.names
    backwards = {names[a.stage] for row in forward_backward.schedule.rows for a in row if a.op is not Op.F}
    return losses, gradients, sorted(backwards)


@pytest.mark.parametrize(("name", "engine", "tracer"), every(11, list(product(MODELS, ENGINES, TRACERS))))
def test_gradients_are_plain_pytorchs_and_frozen_parameters_have_none(
    engine: str, name: str, tracer: str, request: pytest.FixtureRequest
) -> None:
    make, backward = MODELS[name]
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    results = run(4, stepped, make, tracer_options(tracer))
    for step in range(STEPS):
        model = built(make)
        loss = plain(model, batch(step))
        seen: dict[str, Any] = {}
        for losses, gradients, _ in results:
            assert torch.equal(losses[step], loss)
            seen |= gradients[step]
        assert seen.keys() == dict(model.named_parameters()).keys()
        for parameter, found in seen.items():
            expected = model.get_parameter(parameter).grad
            assert (found is None) == (expected is None), parameter
            assert found is None or torch.equal(found, expected), parameter
    stages = sorted({"a", "b", "c", "d"})
    expected_backwards = [stage for stage, has in zip(stages, backward, strict=True) if has]
    assert all(backwards == expected_backwards for *_, backwards in results)


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
            forward_backward(batch(step).repeat(parts // ROWS, 1))
    return most


def test_a_frozen_stage_holds_two_of_what_it_has_sent_however_many_micro_batches_there_are(pool: Pool) -> None:
    """Stages behind it that are trained hold their gradients' and their values' in flight, d(s) at most."""
    first, second, *_ = pool.run(most_under_way, 24, ranks=4)
    assert (first, second) == (2, 2)


def frozen_stages() -> StageGraph:
    torch.manual_seed(0)
    stages = {"a": frozen(), "b": nn.Sequential(nn.Tanh(), trained()), "c": Loss()}
    return StageGraph.from_callables(stages, [("a", "b"), ("b", "c")], {"a": ["x"]})


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = trained()

    def forward(self, h: Tensor) -> Tensor:
        return self.head(h).square().sum(-1).mean()


def test_the_users_own_stages_may_be_frozen_too() -> None:
    graph, again = frozen_stages(), frozen_stages()
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 3)]), microbatches=PARTS)
    loss = forward_backward(batch(0))
    assert torch.equal(loss, plain(lambda x: again["c"].module(again["b"].module(again["a"].module(x))), batch(0)))  # type: ignore[arg-type, operator]
    assert [stage.has_backward for stage in forward_backward.stages] == [False, True, True]
    for name, parameter in forward_backward.named_parameters():
        expected = again.module.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None)
        assert expected is None or torch.equal(parameter.grad, expected)


# --- freezing and unfreezing between calls ---


def switched(options: dict[str, Any], frozen_in: Sequence[bool]) -> list[dict[str, Any]] | str:
    """Gradients per step, where the first stage is frozen in some steps; or the error."""
    model = built(partial(Chain, trained, trained, trained, trained))
    model.a.requires_grad_(not frozen_in[0])
    forward_backward = fxpipe.compile(model, Topology(PIPE), microbatches=PARTS, **options)
    found = []
    for step, is_frozen in enumerate(frozen_in):
        model.a.requires_grad_(not is_frozen)
        forward_backward.zero_grad()
        try:
            forward_backward(batch(step))
        except PartitionError as error:
            return str(error)
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in forward_backward.named_parameters()}
        found.append(gradients)
    return found


def check_switched(results: Sequence[Any], frozen_in: Sequence[bool]) -> None:
    for step, is_frozen in enumerate(frozen_in):
        model = built(partial(Chain, trained, trained, trained, trained))
        model.a.requires_grad_(not is_frozen)
        plain(model, batch(step))
        for found in results:
            for name, gradient in found[step].items():
                expected = model.get_parameter(name).grad
                assert (gradient is None) == (expected is None), name
                assert gradient is None or torch.equal(gradient, expected), name


@pytest.mark.parametrize(("engine", "tracer"), in_turn(ENGINES, TRACERS))
def test_a_stage_may_be_frozen_between_calls_and_unfrozen_again(
    engine: str, tracer: str, request: pytest.FixtureRequest
) -> None:
    frozen_in = [False, True, False]
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    check_switched(run(4, switched, tracer_options(tracer), frozen_in), frozen_in)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_frozen_at_compile_may_be_unfrozen(engine: str, request: pytest.FixtureRequest) -> None:
    """A way for its gradient is opened then."""
    frozen_in = [True, False, True, False]
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    check_switched(run(4, switched, tracer_options("symbolic"), frozen_in), frozen_in)


# --- over replicas ---


def replica_batch(step: int, replica: int) -> Tensor:
    return batch(10 * step + replica)


def stepped_with_replicas(zero: int, frozen_in: Sequence[bool]) -> dict[str, Tensor]:
    """The state after a step of SGD for each entry, which says whether the third of four stages is frozen in it."""
    model = built(partial(Chain, frozen, trained, trained, trained))
    model.c.requires_grad_(not frozen_in[0])
    topology = Topology([("pipe", 2), ("data", 2)])
    placement = {"a": 0, "b": 0, "c": 1, "d": 1}
    forward_backward = fxpipe.compile(model, topology, microbatches=PARTS, placement=placement, zero=zero)
    replica = topology.coordinate(torch.distributed.get_rank())["data"]
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    for step, is_frozen in enumerate(frozen_in):
        model.c.requires_grad_(not is_frozen)
        optimizer.zero_grad()
        forward_backward(replica_batch(step, replica))
        optimizer.step()
    return forward_backward.state_dict(full=True)


FROZEN_IN = (False, True, False), (True, False, True)


@pytest.mark.parametrize(
    ("zero", "frozen_in"), [(zero, FROZEN_IN[zero % 2]) for zero in (range(4) if ALL else (1, 2, 3))]
)
def test_a_stage_with_a_backward_may_be_frozen_and_unfrozen_over_replicas(
    pool: Pool, zero: int, frozen_in: Sequence[bool]
) -> None:
    model = built(partial(Chain, frozen, trained, trained, trained))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, is_frozen in enumerate(frozen_in):
        model.c.requires_grad_(not is_frozen)
        optimizer.zero_grad()
        for replica in range(2):
            for part in replica_batch(step, replica).chunk(PARTS):
                (model(part) / (2 * PARTS)).backward()
        optimizer.step()
    for state in pool.run(stepped_with_replicas, zero, frozen_in):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
