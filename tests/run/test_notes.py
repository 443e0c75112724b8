"""What fails inside a stage says in which, and where in the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.distributed.collective import PeerLost
from fxpipe.errors import describe_error
from tests.harness import engine_of

TWO = fxpipe.Topology([("pipe", 2)])
HERE = torch.empty(0).device
GIVEN = f"\n  x: float32 [2, 4] on {HERE}\n  decoder: float32 [2, 4] on {HERE}"
"""What the stage was given, by name."""


class Refused(Exception):
    """The user's own error."""


class Sealed(Exception):
    """An error that takes no notes."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "__notes__":
            raise AttributeError(name)
        super().__setattr__(name, value)


class Slotted(Exception):
    __slots__ = ()


class Marked(torch.autograd.Function):
    """Fails on rows that are as large as ``limit``, forwards or backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str, kind: type[BaseException]) -> Tensor:
        ctx.where, ctx.kind, ctx.large = where, kind, bool((x > 100).any())
        if where == "forward" and ctx.large:
            raise kind("too large")
        return x.clamp(max=1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.where == "backward" and ctx.large:
            raise ctx.kind("too large")
        return gradients[0], None, None


class Marking(nn.Module):
    def __init__(self, where: str, kind: type[BaseException]) -> None:
        super().__init__()
        self.linear, self.where, self.kind = nn.Linear(4, 4), where, kind

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.linear(h) + Marked.apply(x + h * 0, self.where, self.kind)


def graph(where: str = "forward", kind: type[BaseException] = Refused) -> fxpipe.StageGraph:
    return fxpipe.StageGraph.from_callables(
        {"decoder": nn.Linear(4, 4), "head": Marking(where, kind), "loss": lambda y: y.square().mean()},
        [("decoder", "head"), ("head", "loss")],
        {"decoder": ["x"], "head": ["x"]},
    )


def batch(large: bool = True) -> Tensor:
    x = torch.zeros(8, 4)
    x[5] = 1000.0 if large else 0.0
    return x


def failed(where: str, kind: type[BaseException], evaluates: bool = False) -> tuple[str, str, list[str], str]:
    """The type, text and notes of what this rank raises in its third step; and what the next call says."""
    placement = {"decoder": 0, "head": 1, "loss": 1}
    forward_backward = fxpipe.compile(graph(where, kind), TWO, microbatches=4, placement=placement)
    for _ in range(2):
        forward_backward(batch(large=False))
    call = forward_backward.evaluate if evaluates else forward_backward
    try:
        call(batch())
    except BaseException as error:
        raised = (type(error).__name__, str(error), getattr(error, "__notes__", []))
        if isinstance(error, PeerLost | fxpipe.RunError) or current_process_plays_all(forward_backward):
            return *raised, ""
        with pytest.raises(fxpipe.RunError) as again:
            forward_backward(batch(large=False))
        return *raised, str(again.value)
    raise AssertionError("it has not failed")


def current_process_plays_all(forward_backward: fxpipe.ForwardBackward) -> bool:
    return forward_backward._transport.pipe_rank is None


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("engine", ["local", "distributed"])
def test_an_error_keeps_its_type_and_bears_a_note(request: pytest.FixtureRequest, engine: str, where: str) -> None:
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    *others, (kind, text, notes, again) = run(2, failed, where, Refused)
    note = f"in the {where} of stage 1 `head`, micro-batch 2, step 2" + GIVEN * (where == "forward")
    assert (kind, text, notes) == ("Refused", "too large", [note])
    assert ("an earlier step failed (Refused: too large)" in again) == bool(others)
    for other_kind, other_text, _, _ in others:
        assert other_kind == "RunError"
        assert other_text == f"another rank failed: rank 1 (pipe 1): Refused: too large\n{note}"


def test_in_evaluation_no_step_is_counted() -> None:
    _, _, notes, _ = failed("forward", Refused, evaluates=True)
    assert notes == ["in the forward of stage 1 `head`, micro-batch 2, in evaluate" + GIVEN]


def refuse(gradient: Tensor) -> None:
    if gradient.abs().max() > 100:
        raise Refused("too large")


def failed_in_weights() -> list[str]:
    """The notes of a parameter's hook that fails in the second half of a backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].weight.register_hook(refuse)
    forward_backward = fxpipe.compile(
        model,
        TWO,
        microbatches=4,
        boundaries=["1"],
        schedule="zb_h1",
        loss_fn=lambda y, target: (y - target).square().mean(),
    )
    with pytest.raises(Refused) as error:
        forward_backward(batch(), target=torch.zeros(8, 1))
    return error.value.__notes__


def test_an_error_in_the_second_half_of_a_backward_says_so() -> None:
    assert failed_in_weights() == ["in the weight gradients of stage 1 `1`, micro-batch 2, step 0"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Slotted])
def test_any_error_bears_it_and_remains_what_it_is(kind: type[BaseException]) -> None:
    name, _, notes, _ = failed("forward", kind)
    assert name == kind.__name__
    assert notes == ["in the forward of stage 1 `head`, micro-batch 2, step 2" + GIVEN]


def test_an_error_that_takes_no_note_remains_what_it_is() -> None:
    assert failed("forward", Sealed)[:3] == ("Sealed", "too large", [])


def test_what_captured_stages_were_given_is_named() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Embedding(4, 4)

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            return (fxpipe.stage_boundary(self.a(x)) + self.b(tokens)).square().mean()

    tokens = torch.zeros(8, dtype=torch.long)
    forward_backward = fxpipe.compile(Chain(), TWO, microbatches=4, example_args=(batch(large=False), tokens))
    tokens[7] = 4
    with pytest.raises(IndexError, match="out of range") as error:
        forward_backward(batch(large=False), tokens)
    note = error.value.__notes__[-1]
    assert note.startswith("in the forward of stage 1 `b`, micro-batch 3, step 0\n")
    assert f"\n  tokens: int64 [2] on {HERE}" in note
    assert f": float32 [2, 4] on {HERE}" in note


def test_a_loss_that_is_none_says_where() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(fxpipe.stage_boundary(self.a(x)))

    with pytest.raises(fxpipe.RunError, match="must be one number") as error:
        fxpipe.compile(Rows(), TWO, microbatches=4)(batch())
    note = f"in the forward of stage 1 `b`, micro-batch 0, step 0\n  a: float32 [2, 4] on {HERE}"
    assert error.value.__notes__ == [note]


@pytest.mark.parametrize("make", [lambda: ValueError("x"), lambda: KeyError("x")])
def test_an_error_is_told_with_its_notes(make: Callable[[], Exception]) -> None:
    error = make()
    plain = f"{type(error).__name__}: {error}"
    assert describe_error(error) == plain
    error.add_note("here")
    error.add_note("and there")
    assert describe_error(error) == f"{plain}\nhere\nand there"
