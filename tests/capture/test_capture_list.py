"""``forward_backward.captures``: each kind of batch, its guard, and why it was captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture.captures import FAMILIES, Captures
from fxpipe.capture.guard import Family
from tests.models import WIDTH, linear


class Masked(nn.Module):
    """Reads the values of a mask, an attribute, and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.beta = linear(), linear(), 1.0

    def forward(self, x: Tensor, mask: Tensor, twice: bool = False) -> Tensor:
        x = fxpipe.stage_boundary(self.up(x))
        if not mask.all():
            x = x * mask * self.beta
        return self.down(2 * x if twice else x).square().mean()


def batch(rows: int, ones: bool = True, length: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, WIDTH), torch.ones(rows, length, 1) if ones else torch.zeros(rows, length, 1)


def compiled(tracer: str = "auto") -> tuple[Masked, fxpipe.ForwardBackward]:
    model = Masked()
    options: Any = {"microbatches": 2, "tracer": tracer, "example_args": batch(8)}
    return model, fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), **options)


def reasons(run: fxpipe.ForwardBackward) -> list[str]:
    return [entry.why for entry in run.captures.entries]


def test_the_first_capture_has_its_batch_its_guard_and_a_reason() -> None:
    _, run = compiled()
    line = "'if not mask.all(): (test_capture_list.py:28)'"
    assert str(run.captures).splitlines() == [
        f"training, by export: x float32 [4, 3, {WIDTH}], mask float32 [4, 3, 1]",
        f"  valid for: these sizes, where the outcome of {line} is True",
        "  captured because it is the first batch",
    ]
    assert repr(run.captures) == str(run.captures)


CHANGES: dict[str, tuple[Callable[[Masked, fxpipe.ForwardBackward], Any], str]] = {
    "a size": (
        lambda _, run: run(*batch(8, length=5)),
        f"input 'x' is float32 [4, 5, {WIDTH}], and was float32 [4, 3, {WIDTH}]; "
        "input 'mask' is float32 [4, 5, 1], and was float32 [4, 3, 1]",
    ),
    "an answer": (
        lambda _, run: run(*batch(8, ones=False)),
        "the outcome of 'if not mask.all(): (test_capture_list.py:28)' is False, and was True",
    ),
    "an option": (lambda _, run: run(*batch(8), twice=True), "input 'twice' is True, and was not given"),
    "a type": (
        lambda _, run: run(batch(8)[0], batch(8)[1].bool()),
        "input 'mask' is bool [4, 3, 1], and was float32 [4, 3, 1]",
    ),
    "an evaluation": (lambda _, run: run.evaluate(*batch(8)), "it is the first evaluation"),
    "a frozen parameter": (
        lambda model, run: (model.up.weight.requires_grad_(False), run(*batch(8))),
        "the requires_grad of up.weight has changed",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_capture_says_what_differed(change: str) -> None:
    model, run = compiled()
    call, why = CHANGES[change]
    call(model, run)
    assert reasons(run) == ["it is the first batch", why]


def test_a_changed_attribute_is_named() -> None:
    model, run = compiled()
    run(*batch(8, ones=False))
    model.beta = 2.0
    run(*batch(8, ones=False))
    assert reasons(run)[-1] == "Masked.beta has changed"


def test_the_nearest_capture_is_compared() -> None:
    _, run = compiled()
    run(*batch(8, ones=False))
    run(*batch(8, ones=False, length=5))
    assert reasons(run)[-1] == CHANGES["a size"][1]


def test_a_capture_says_which_sizes_it_is_valid_for() -> None:
    _, run = compiled()
    run(*batch(8, length=5))
    run(*batch(8, length=7))
    assert len(run.captures.entries) == 2
    sizes = "these sizes, and others of 'mask' in dimension 1, 'x' in dimension 1"
    assert any(entry.guard.startswith(sizes) for entry in run.captures.entries)


def test_a_symbolic_capture_is_valid_for_any_sizes_and_users_stages_have_none() -> None:
    run = fxpipe.compile(
        nn.Sequential(linear(), linear()),
        fxpipe.Topology([("pipe", 2)]),
        loss_fn=lambda output: output.square().mean(),
        boundaries={"1": "before"},
    )
    assert [entry.guard for entry in run.captures.entries] == ["any sizes"]
    stages = {"first": linear(), "second": nn.Sequential(linear(), Mean())}
    graph = fxpipe.StageGraph.from_callables(stages, edges=[("first", "second")], inputs={"first": ["x"]})
    own = fxpipe.compile(graph, fxpipe.Topology([("pipe", 2)]))
    assert str(own.captures) == "no captures: the stages are the user's own"


def test_a_capture_in_use_is_kept_however_many_kinds_came_since() -> None:
    _, run = compiled()
    captures: Captures = run._plans.captures
    (key,), guards = captures.families, captures.guards
    later = {(key[0], number): Family() for number in range(FAMILIES + 10)}
    kept = replace(captures, families={**captures.families, **later}).only(guards)
    assert (kept.guards, len(kept.families)) == (guards, FAMILIES + 1)


def test_users_stages_follow_a_parameter_that_is_frozen_later() -> None:
    stages = {"first": linear(), "second": nn.Sequential(linear(), Mean())}
    graph = fxpipe.StageGraph.from_callables(stages, edges=[("first", "second")], inputs={"first": ["x"]})
    run = fxpipe.compile(graph, fxpipe.Topology([("pipe", 2)]), microbatches=2)
    x = batch(8)[0]
    for trainable in (True, False, True):
        for parameter in stages["first"].parameters():
            parameter.requires_grad_(trainable)
        run.zero_grad()
        run(x)
        assert {name for name, each in run.named_parameters() if each.grad is not None} == {
            name for name, each in run.named_parameters() if trainable or name.startswith("second")
        }
    assert [plan.graph["first"].has_backward for plan in run._plans.by_pattern.values()] == [True, False]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_a_guard_holds_if_and_only_if_it_has_no_reason_against_a_batch() -> None:
    model, run = compiled()
    run(*batch(8, ones=False))
    run(*batch(8, length=5))
    run.evaluate(*batch(8))
    captures: Captures = run._plans.captures
    patterns = [pattern for plan in run._plans.by_pattern for pattern in plan.each()]
    known = model, captures.reads, captures.questions
    pairs = [(guard, pattern) for guard in captures.guards for pattern in patterns]
    assert all(guard.holds(pattern) != bool(guard.why_not(pattern, *known)) for guard, pattern in pairs)
    assert {guard.holds(pattern) for guard, pattern in pairs} == {True, False}
