"""Batches of any length and number of rows: few captures, and still bit for bit plain PyTorch."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Sequence
from itertools import starmap
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from fxpipe.run.step import agreement
from tests.harness import (
    Engines,
    Steps,
    accumulate,
    assert_gradients,
    assert_same,
    assert_steps,
    assert_trains,
    current_seat,
    gradients_of,
    steps_of,
    strict,
)
from tests.models import Case, Inputs

WIDTH, PARTS = 8, 4
SIZES = [(9, 6), (11, 9), (10, 12), (12, 1), (8, 31), (8, 2), (5, 16)]
"""(rows, words): among the micro-batches of four are some of one row, and one batch has one word to a row."""


class Sized(nn.Module):
    """Words, averaged behind the boundary; what is there may ask for their number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(50, WIDTH), nn.Embedding(40, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def front(self, words: Tensor) -> Tensor:
        return torch.tanh(self.first(self.embed(words)))

    def behind(self, h: Tensor, words: Tensor) -> Tensor:
        return self.second(h.mean(1))

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.behind(stage_boundary(self.front(words)), words), target)


class Pooled(Sized):
    """The second stage needs the number of words, which nothing that arrives there has."""

    def front(self, words: Tensor) -> Tensor:
        return super().front(words).mean(1)

    def behind(self, h: Tensor, words: Tensor) -> Tensor:
        length = words.shape[1]
        places = self.places(torch.arange(length)).sum(0) + self.places.weight[: length // 2].sum(0)
        return self.second(h + places * length)


class Cached(Sized):
    """Looks a number up by a size."""

    def behind(self, h: Tensor, words: Tensor) -> Tensor:
        return self.second(h.mean(1)) * squared(words.shape[1])


@functools.lru_cache
def squared(length: int) -> int:
    return length**2


class Limited(Sized):
    def behind(self, h: Tensor, words: Tensor) -> Tensor:
        return self.second((h[:, :10] if words.shape[1] > 10 else h).mean(1))


class Rows(Sized):
    """Takes ``len()`` of its rows, as CLIP's loss does."""

    def behind(self, h: Tensor, words: Tensor) -> Tensor:
        return self.second(h.mean(1)) * torch.arange(len(words))[:, None]


class Numbered(Sized):
    def behind(self, h: Tensor, words: Tensor) -> Tensor:
        length = int(words.shape[1])  # each is a number of Python's
        return self.second(h.sum(1)) / length


def sized(rows: int, length: int, replica: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * replica + 100 * rows + length)
    words = torch.randint(0, 50, (rows, length), generator=generator)
    return {"words": words, "target": torch.randn(rows, WIDTH, generator=generator)}


def built(cls: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return cls()


def compiled(cls: type[nn.Module], topology: fxpipe.Topology | None = None, **options: Any) -> fxpipe.ForwardBackward:
    options = {"tracer": "export", "microbatches": PARTS, "checks": fxpipe.Checks(batches=False)} | options
    example = sized(*SIZES[0])
    return fxpipe.compile(built(cls), topology or fxpipe.Topology([("pipe", 2)]), example_kwargs=example, **options)


def ran(cls: type[nn.Module], sizes: Sequence[tuple[int, int]], **options: Any) -> Steps:
    return steps(compiled(cls, **options), sizes)


def steps(forward_backward: fxpipe.ForwardBackward, sizes: Sequence[tuple[int, int]]) -> Steps:
    """Each rank is given what it needs, and nothing else."""
    found = []
    for batch in starmap(sized, sizes):
        needed = forward_backward.required_inputs
        found += steps_of(forward_backward, [{k: value if k in needed else None for k, value in batch.items()}])
    return found


def check(runs: Sequence[Steps], cls: type[nn.Module], sizes: Sequence[tuple[int, int]]) -> None:
    assert_steps(runs, built(cls), list(starmap(sized, sizes)), PARTS)


# --- what code does with sizes


@pytest.mark.parametrize(("cls", "ways"), [(Rows, 1), (Limited, 2)])
def test_any_length_is_plain_pytorchs(cls: type[nn.Module], ways: int, captured: list[Any]) -> None:
    """``ways``: through the code, by the number of words."""
    check([ran(cls, SIZES)], cls, SIZES)
    captured.clear()
    ran(cls, [(8, length) for length in (6, 9, 12, 7, 16, 24, 31)])
    assert len(captured) <= 1 + 1 + ways, "one of each example's sizes, rows, and words"


def test_a_stage_has_a_size_of_an_input_that_its_rank_is_not_given() -> None:
    runs = strict(1)(2, needing)
    assert [needed for needed, _ in runs] == [("words",), ("target",)]
    check([found for _, found in runs], Pooled, SIZES[:5])


def needing() -> tuple[tuple[str, ...], Steps]:
    forward_backward = compiled(Pooled, schedule="zb_h1")
    return forward_backward.required_inputs, steps(forward_backward, SIZES[:5])


def test_what_makes_a_number_of_a_size_is_told_with_its_line_and_the_tenth_capture_too(
    captured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [(8, length) for length in range(3, 12)]
    check([ran(Numbered, sizes)], Numbered, sizes)
    told, tenth = capsys.readouterr().err.split("10 captures by now")
    assert told.count("'words' in dimension 1") == 1
    assert told.count("length = int(words.shape[1])  # each is a number of Python's") == 1
    assert "sizes of 'words', 'target' change: pad batches to a few sizes" in tenth
    assert len(captured) >= 10


def test_a_cache_by_a_size_takes_a_capture_for_each(captured: list[Any]) -> None:
    """As transformers' DETR and DINOv3 have. torch.export refuses a key that has no number of its own."""
    sizes = [(8, length) for length in (6, 7, 9, 6)]
    check([ran(Cached, sizes)], Cached, sizes)
    assert len(captured) == 1 + 3, "one of the example, and of each length"
    assert "len" not in globals()


# --- what travels

LENGTHS = [((8, 6), 1), ((8, 6), 0), ((11, 9), 2), ((12, 9), 0), ((9, 9), 0), ((11, 6), 2), ((8, 6), 0)]
"""(rows, words) of each step, and how many of the shapes of its four micro-batches, of 2 or 3 rows each, are new. That
of the first step was captured alone; when it comes back, another capture holds for it."""


def test_what_messages_look_like_is_told_once_for_each_shape_of_a_micro_batch() -> None:
    for sent in strict(2)(2, counts_of_sends, [size for size, _ in LENGTHS]):
        assert sent == [PARTS + new for _, new in LENGTHS]


def counts_of_sends(sizes: Sequence[tuple[int, int]]) -> list[int]:
    forward_backward, counts = compiled(Sized), []
    for size in sizes:
        forward_backward(**sized(*size))
        counts.append(sum(row.count for row in forward_backward.traffic().select("send")))
        forward_backward.evaluate(**sized(*size))  # which has messages of its own
    return counts


def test_kinds_in_any_order_with_evaluations_other_tables_and_dropped_kinds_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "KINDS", 3)
    draw = random.Random(5)
    sizes = [draw.choice([(8, 6), (8, 9), (11, 7), (12, 7), (9, 6)]) for _ in range(7)]
    check(strict(1)(2, in_any_order, sizes), Sized, sizes)


def in_any_order(sizes: Sequence[tuple[int, int]]) -> Steps:
    forward_backward, found = compiled(Sized), []
    forward_backward.record_timeline()
    for step, size in enumerate(sizes):
        found += steps(forward_backward, [size])
        if step % 3 == 0:
            forward_backward.evaluate(**sized(*sizes[step // 2]))
        if step % 5 == 3:
            forward_backward.reschedule("gpipe" if step % 2 else "1f1b")
    return found


def test_ranks_may_be_given_all_inputs_in_one_step_and_what_they_need_in_another() -> None:
    """What ranks have met in one call may be new to one of them in the next."""
    draw = random.Random(7)
    sizes = [draw.choice([(8, 6), (8, 9), (11, 7), (8, 7), (12, 9)]) for _ in range(9)]
    given = [[draw.random() < 0.6 for _ in range(2)] for _ in sizes]
    check(strict(1)(2, given_some, sizes, given), Sized, sizes)


def given_some(sizes: Sequence[tuple[int, int]], given: Sequence[Sequence[bool]]) -> Steps:
    forward_backward, found = compiled(Sized), []
    seat = current_seat()
    assert seat is not None
    for size, has_all in zip(sizes, given, strict=True):
        all_of_it = has_all[seat.rank]
        found += steps_of(forward_backward, [sized(*size)]) if all_of_it else steps(forward_backward, [size])
    return found


# --- what is dropped


def test_what_is_dropped_is_made_again_and_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While evaluations drop captures of steps."""
    monkeypatch.setattr(agreement, "MOST", 3)
    monkeypatch.setattr(agreement, "KINDS", 2)
    sizes = [(8, 6), (8, 9), (11, 7), (8, 5), (8, 6)]
    check(strict(1)(2, dropping, sizes), Numbered, sizes)


def dropping(sizes: Sequence[tuple[int, int]]) -> Steps:
    forward_backward, found = compiled(Numbered), []
    seen: WeakSet[Any] = WeakSet()
    for step, size in enumerate(sizes):
        found += steps(forward_backward, [size])
        if step % 3 == 0:
            forward_backward.evaluate(**sized(*size))
        plans = forward_backward._plans
        seen.update(stage.module for graph in plans.graphs for stage in graph)
    gc.collect()
    assert {id(module) for module in seen} == {id(stage.module) for graph in plans.graphs for stage in graph}
    return found


# --- replicas, and micro-batches of one step


OF_REPLICAS = [
    [(8, 6), (9, 12), (8, 6), (11, 31), (7, 8)],
    [(8, 6), (11, 7), (8, 30), (9, 6), (4, 9)],
]
"""(rows, words) of each step: at last micro-batches of one row."""


@pytest.mark.parametrize(("zero", "engine"), [(2, "strict 3"), (3, "distributed")])
def test_replicas_may_have_lengths_of_their_own(zero: int, engine: str, engines: Engines) -> None:
    """They are plain PyTorch's over the micro-batches of all, by their rows."""
    case = Case(Sized, stages=2, ranks=2, optimizer=torch.optim.SGD, optimizer_options={"lr": 0.1})
    batches = [
        tuple(sized(*size, replica) for replica, size in enumerate(sizes)) for sizes in zip(*OF_REPLICAS, strict=True)
    ]
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    options = {"tracer": "export", "checks": fxpipe.Checks(batches=False), "example_kwargs": sized(*SIZES[0])}
    assert_trains(case, engines(engine), batches, topology=topology, zero=zero, **options)


def test_micro_batches_of_one_step_may_each_have_a_length() -> None:
    forward_backward, plain = compiled(Pooled), built(Pooled)
    for shift in range(3):
        parts = [sized(2 + place % 2, length + shift) for place, length in enumerate([5, 9, 1, 17])]
        forward_backward.zero_grad()
        plain.zero_grad()
        loss = forward_backward.step_microbatches([((), part) for part in parts])
        wanted, _ = accumulate(lambda place, part: plain(**part), parts)
        assert_same(loss, wanted, "loss")
        assert_gradients(gradients_of(forward_backward.named_parameters()), plain)
