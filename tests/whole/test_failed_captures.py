"""A rank that fails at any phase of a later capture: all ranks go on as if it had never been asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import auto_opaque, capturing, same_stages
from fxpipe.capture.capturing import Capturing
from fxpipe.capture.region_facts import RegionFacts
from fxpipe.plan import plans
from fxpipe.plan.plans import Plans
from fxpipe.trace.reads import Reads
from tests.harness import assert_same, gradients_of, strict
from tests.models import WIDTH, linear
from tests.strict_transport import current_seat

CHANGES: list[Callable[[], object]] = []
"""What the region does beside its work."""
FAILS: list[str] = []
"""Filled where the next capture of rank 1 is to fail."""
PHASES: dict[str, tuple[Any, str]] = {
    "asking a tracer": (Capturing, "_request"),
    "tracing": (auto_opaque, "accepted"),
    "cutting": (capturing, "cut"),
    "taking the regions": (RegionFacts, "with_capture"),
    "taking what was read": (Reads, "with_capture"),
    "watching": (capturing, "watch"),
    "capturing": (Capturing, "of"),
    "grouping": (same_stages, "for_groups"),
    "placing": (plans, "place_stages"),
    "choosing a table": (plans, "choose_table"),
    "lowering": (plans, "lower"),
    "proving": (plans, "prove"),
    "comparing stages": (Plans, "_check_same_stages"),
}


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        for change in CHANGES:
            change()
        return self.inner(x)  # type: ignore[no-any-return]


class ReadsLater(nn.Module):
    """Reads a number, in batches of one kind alone, that its region may change."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.b, self.late = Region(), linear(), 1.0

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        h = self.b(fxpipe.stage_boundary(torch.tanh(self.region(x))))
        return (h if more is None else h * self.late + more).square().mean()


def vectors(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


BATCHES = [(vectors(0),), (vectors(1),), (vectors(2), vectors(3)), (vectors(4),)]


def steps(state: dict[str, Tensor], fails: bool, found: list[Any]) -> None:
    """Adds the loss and the gradients of each batch to ``found``. At last the region changes what a later capture than
    its own has read, which is refused."""
    model = ReadsLater()
    model.load_state_dict(state)
    options: Any = {"microbatches": 1, "tracer": "record", "boundaries": {"region": "whole"}}
    run = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), example_args=BATCHES[0], **options)
    for number, batch in enumerate(BATCHES):
        if number == 1:
            if fails:
                FAILS.append("once")
                with pytest.raises(fxpipe.FxpipeError, match="no luck"):
                    run(*BATCHES[2])
            CHANGES.append(lambda: setattr(model, "late", 2.0))  # which nothing has read by now
        run.zero_grad()
        loss = run(*batch)
        found.append((loss, gradients_of(run.named_parameters())))
        CHANGES.clear()
        model.late = 3.0
    CHANGES.append(lambda: setattr(model, "late", 4.0))
    run(*BATCHES[0])


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    CHANGES.clear()
    FAILS.clear()


@pytest.mark.parametrize("phase", [None, *PHASES])
def test_what_one_rank_cannot_capture_leaves_nothing_on_any(monkeypatch: pytest.MonkeyPatch, phase: str | None) -> None:
    plain = ReadsLater()
    state = copy.deepcopy(plain.state_dict())
    plain.late = 3.0
    wanted = []
    for batch in BATCHES:
        plain.zero_grad()
        (loss := plain(*batch)).backward()
        wanted.append((loss.detach(), gradients_of(plain.named_parameters())))
    if phase is not None:
        owner, name = PHASES[phase]
        original = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            result, seat = original(*args, **kwargs), current_seat()
            if FAILS and seat is not None and seat.rank == 1:
                FAILS.clear()
                raise fxpipe.TraceError("no luck on this rank")
            return result

        monkeypatch.setattr(owner, name, failing)
    found: list[Any] = []
    with pytest.raises(fxpipe.RunError, match=r"an opaque region, changes ReadsLater\.late, which code outside"):
        strict(1)(2, steps, state, phase is not None, found)
    assert len(found) == 2 * len(BATCHES)
    for loss, gradients in found:
        which = next(number for number, (right, _) in enumerate(wanted) if torch.equal(loss, right))
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[which][1][name], name)
