"""Batches of any length and number of rows: few captures, and still bit for bit plain PyTorch."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from fxpipe.plan.agree import agreement
from fxpipe.plan.capture import auto_opaque
from tests.harness import accumulate, assert_same, current_seat, cut, engine_of, gradients_of, replica_of, strict
from tests.models import Inputs
from tests.pool import Pool
from tests.thinned import every

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


class Nested(Sized):
    """The second stage needs the sum of two sizes that lie in a container."""

    def forward(self, batch: dict[str, list[Tensor]], target: Tensor) -> Tensor:
        one, other = batch["words"]
        h = stage_boundary(self.front(one).mean(1))
        return F.mse_loss(self.second(h) * (one.shape[1] + other.shape[1]), target)


class Parity(Sized):
    def behind(self, h: Tensor, words: Tensor) -> Tensor:
        return self.second(h.mean(1)) * (2 if words.shape[1] % 2 else 1)


class Eights(Sized):
    """Fills up to a multiple of 8."""

    def behind(self, h: Tensor, words: Tensor) -> Tensor:
        h = F.pad(h, (0, 0, 0, -words.shape[1] % 8))
        return self.second(h.view(h.shape[0], -1, 8, WIDTH).sum(2).mean(1))


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
    options = {"tracer": "export", "microbatches": PARTS, "check_batches": False} | options
    example = sized(*SIZES[0])
    return fxpipe.compile(built(cls), topology or fxpipe.Topology([("pipe", 2)]), example_kwargs=example, **options)


Found = list[tuple[Tensor, dict[str, Tensor | None]]]


def ran(cls: type[nn.Module], sizes: Sequence[tuple[int, int]], **options: Any) -> Found:
    """Loss and gradients of a step for each of the sizes. Each rank is given what it needs, and nothing else."""
    return steps(compiled(cls, **options), sizes)


def steps(forward_backward: fxpipe.ForwardBackward, sizes: Sequence[tuple[int, int]]) -> Found:
    found = []
    for size in sizes:
        forward_backward.zero_grad()
        batch = sized(*size)
        needed = forward_backward.required_inputs
        loss = forward_backward(**{name: value if name in needed else None for name, value in batch.items()})
        found.append((loss, gradients_of(forward_backward.named_parameters())))
    return found


def check(runs: Sequence[Found], cls: type[nn.Module], sizes: Sequence[tuple[int, int]], calls: int = 1) -> None:
    """All of it is plain PyTorch's, to the last bit. ``calls``: after how many gradients are cleared."""
    plain = built(cls)
    for step, size in enumerate(sizes):
        if step % calls == 0:
            plain.zero_grad()
        loss, _ = accumulate(lambda place, part: plain(**part), cut(sized(*size), PARTS))
        for run in runs:
            assert_same(run[step][0], loss, f"loss of step {step}, of {size}")
            for name, gradient in run[step][1].items():
                assert_same(gradient, plain.get_parameter(name).grad, f"{name} of step {step}, of {size}")


# --- what code does with sizes


WAYS = {Rows: 1, Sized: 1, Limited: 2, Parity: 2, Eights: 2, Pooled: 1}
"""Ways through the code, by the number of words."""


@pytest.mark.parametrize("cls", every(3, list(WAYS)))
def test_any_length_is_plain_pytorchs(cls: type[nn.Module], captured: list[Any]) -> None:
    check([ran(cls, SIZES)], cls, SIZES)
    captured.clear()
    ran(cls, [(8, length) for length in (6, 9, 12, 7, 16, 24, 31)])
    assert len(captured) <= 1 + 1 + WAYS[cls], "one of each example's sizes, rows, and words"


@pytest.mark.parametrize("options", every(3, [{"schedule": "zb_h1"}, {}, {"recompute": True}]), ids=str)
def test_a_stage_has_a_size_of_an_input_that_its_rank_is_not_given(options: dict[str, Any]) -> None:
    runs = strict(1)(2, needing, options)
    assert [needed for needed, _ in runs] == [("words",), ("target",)]
    check([found for _, found in runs], Pooled, SIZES[:5])


def needing(options: dict[str, Any]) -> tuple[tuple[str, ...], Found]:
    forward_backward = compiled(Pooled, **options)
    return forward_backward.required_inputs, steps(forward_backward, SIZES[:5])


def test_sizes_of_what_lies_in_a_container_are_known_to_all_ranks() -> None:
    plain, pairs = built(Nested), [(6, 4), (9, 4), (9, 7), (5, 3), (3, 3)]
    batches = [
        {"batch": {"words": [sized(9, one)["words"], sized(9, other)["words"]]}, "target": sized(9, one)["target"]}
        for one, other in pairs
    ]
    losses = strict(1)(2, nested, batches)
    for step, batch in enumerate(batches):
        with torch.no_grad():
            loss = sum(plain(**part) * (len(part["target"]) / 9) for part in cut(batch, PARTS))
        for found in losses:
            assert_same(found[step], loss, f"loss of {pairs[step]}")


def nested(batches: Sequence[Inputs]) -> list[Tensor]:
    topology = fxpipe.Topology([("pipe", 2)])
    forward_backward = fxpipe.compile(
        built(Nested), topology, microbatches=PARTS, tracer="export", example_kwargs=batches[0], check_batches=False
    )
    needed = forward_backward.required_inputs
    given = [{name: value if name in needed else None for name, value in batch.items()} for batch in batches]
    return [forward_backward(**batch) for batch in given]


def test_what_makes_a_number_of_a_size_is_told_with_its_line_and_the_tenth_capture_too(
    captured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [(8, length) for length in range(3, 12)]
    check([ran(Numbered, sizes)], Numbered, sizes)
    told, tenth = capsys.readouterr().err.split("10 captures by now")
    assert told.count("'words' in dimension 1") == 1
    assert told.count("length = int(words.shape[1])  # each is a number of Python's") == 1
    assert "pad batches to a few sizes" in tenth
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


@pytest.mark.parametrize("engine", every(2, ["strict 1", "distributed"]))
def test_kinds_in_any_order_with_evaluations_other_tables_and_dropped_kinds_in_between(
    engine: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "KINDS", 3)
    draw = random.Random(5)
    sizes = [draw.choice([(8, 6), (8, 9), (11, 7), (12, 7), (9, 6)]) for _ in range(11)]
    check(engine_of(engine, lambda: request.getfixturevalue("pool"))(2, in_any_order, sizes), Sized, sizes)


def in_any_order(sizes: Sequence[tuple[int, int]]) -> Found:
    forward_backward, found = compiled(Sized), []
    forward_backward.record_timeline()
    with pytest.MonkeyPatch.context() as patch:
        if current_seat() is None:  # in a process of its own
            patch.setattr(agreement, "KINDS", 3)
        for step, size in enumerate(sizes):
            found += steps(forward_backward, [size])
            if step % 3 == 0:
                forward_backward.evaluate(**sized(*sizes[step // 2]))
            if step % 5 == 3:
                forward_backward.reschedule("gpipe" if step % 2 else "1f1b")
    return found


@pytest.mark.parametrize("engine", every(2, ["strict 1", "distributed"]))
def test_ranks_may_be_given_all_inputs_in_one_step_and_what_they_need_in_another(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """What ranks have met in one call may be new to one of them in the next."""
    draw = random.Random(7)
    sizes = [draw.choice([(8, 6), (8, 9), (11, 7), (8, 7), (12, 9)]) for _ in range(14)]
    given = [[draw.random() < 0.6 for _ in range(2)] for _ in sizes]
    runs = engine_of(engine, lambda: request.getfixturevalue("pool"))(2, given_some, sizes, given)
    check(runs, Sized, sizes)


def given_some(sizes: Sequence[tuple[int, int]], given: Sequence[Sequence[bool]]) -> Found:
    forward_backward, found = compiled(Sized), []
    rank = seat.rank if (seat := current_seat()) is not None else torch.distributed.get_rank()
    for size, has_all in zip(sizes, given, strict=True):
        batch, needed = sized(*size), forward_backward.required_inputs
        forward_backward.zero_grad()
        kept = {name: value if has_all[rank] or name in needed else None for name, value in batch.items()}
        found.append((forward_backward(**kept), gradients_of(forward_backward.named_parameters())))
    return found


# --- what is dropped


@pytest.mark.parametrize(("engine", "most", "kinds"), every(2, [("local", 4, 100), ("strict 1", 3, 2)]))
def test_what_is_dropped_is_the_least_recently_used_and_is_made_again(
    engine: str, most: int, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps gradients wait to be summed, and evaluations drop captures of steps."""
    monkeypatch.setattr(agreement, "MOST", most)
    monkeypatch.setattr(agreement, "KINDS", kinds)
    sizes = [(8, 6), (8, 9), (11, 7), (8, 5)] * 2
    runs = engine_of(engine, lambda: pytest.fail("no processes are needed"))(2, dropping, sizes, most, kinds)
    check(runs, Numbered, sizes, calls=2)


def dropping(sizes: Sequence[tuple[int, int]], most: int, kinds: int) -> Found:
    forward_backward, found = compiled(Numbered), []
    seen: WeakSet[Any] = WeakSet()
    for step, size in enumerate(sizes):
        if step % 2 == 0:
            forward_backward.zero_grad()
        forward_backward.set_requires_gradient_sync(step % 2 == 1)
        loss = forward_backward(**sized(*size))
        found.append((loss, gradients_of(forward_backward.named_parameters())))
        if step % 3 == 0:
            forward_backward.evaluate(**sized(*size))
        inside, planner = forward_backward._steps, forward_backward._planner
        assert planner.captures is not None
        needed = len(set(planner.first.captures)) + 2  # the batch at hand may have micro-batches of two sizes
        assert len(planner.captures.kept) <= max(most, needed)
        known: list[Any] = [inside.agreement._settled, inside.agreement._reported, inside.agreement._numbers]
        assert all(len(table) <= kinds for table in [*known, inside._plans])
        seen.update(stage.module for graph in planner.graphs for stage in graph)
    gc.collect()
    kept = {id(stage.module) for graph in planner.graphs for stage in graph}
    assert {id(module) for module in seen} == kept, "what was dropped is gone"
    return found


def test_a_capture_that_one_rank_cannot_make_is_refused_on_all_and_leaves_them_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture, failed = auto_opaque.capture, list[str]()

    def failing(request: Any, tracer: str) -> Any:
        seat = current_seat()
        is_new = request.example["words"].shape[1] == 9
        if is_new and seat is not None and seat.rank == 1 and not failed:
            failed.append("once")
            raise fxpipe.TraceError("no luck on this rank")
        return capture(request, tracer)

    monkeypatch.setattr(auto_opaque, "capture", failing)
    sizes = [(8, 6), (8, 9), (8, 12), (8, 9)]
    runs = strict(1)(2, refused_once, sizes)
    assert ["no luck on this rank" in error for error, _ in runs] == [True, True]
    check([found for _, found in runs], Sized, [(8, 6), (8, 12), (8, 9)])


def refused_once(sizes: Sequence[tuple[int, int]]) -> tuple[str, Found]:
    forward_backward, found, error = compiled(Sized), [], ""
    for size in sizes:
        forward_backward.zero_grad()
        try:
            loss = forward_backward(**sized(*size))
        except fxpipe.FxpipeError as raised:
            error += str(raised)
            continue
        found.append((loss, gradients_of(forward_backward.named_parameters())))
    return error, found


# --- replicas, and micro-batches of one step


OF_REPLICAS = [
    [(8, 6), (8, 9), (9, 12), (12, 5), (8, 6), (11, 31), (7, 8), (8, 17)],
    [(8, 6), (8, 6), (11, 7), (8, 30), (9, 6), (8, 31), (4, 9), (5, 16)],
]
"""(rows, words) of each step: at last micro-batches of one row."""


@pytest.mark.parametrize("zero", every(3, [2, 1, 0]))  # 0 and 1: other numbers of images, test_packed_inputs
def test_replicas_may_have_lengths_of_their_own(zero: int) -> None:
    check_replicas(strict(3)(4, of_replicas, zero))


def test_replicas_may_have_lengths_of_their_own_where_parameters_are_sharded(pool: Pool) -> None:
    check_replicas(pool.run(of_replicas, 3))


def check_replicas(runs: Sequence[tuple[list[Tensor], dict[str, Tensor]]]) -> None:
    """They are plain PyTorch's over the micro-batches of all, by their rows."""
    plain = built(Sized)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, sizes in enumerate(zip(*OF_REPLICAS, strict=True)):
        optimizer.zero_grad()
        parts = [part for place, size in enumerate(sizes) for part in cut(sized(*size, place), PARTS)]
        loss, _ = accumulate(lambda place, part: plain(**part), parts)
        optimizer.step()
        for losses, _ in runs:
            assert_same(losses[step], loss, f"loss of step {step}", 1e-6)
    for _, state in runs:
        for name, tensor in plain.state_dict().items():
            assert_same(state[name], tensor, name, 1e-6)


def of_replicas(zero: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    replica = replica_of(topology)
    forward_backward = compiled(Sized, topology, zero=zero)
    optimizer, losses = forward_backward.optimizer(torch.optim.SGD, lr=0.1), []
    for size in OF_REPLICAS[replica]:
        optimizer.zero_grad()
        losses.append(forward_backward(**sized(*size, replica)))
        optimizer.step()
    return losses, forward_backward.state_dict(full=True)


def test_micro_batches_of_one_step_may_each_have_a_length() -> None:
    forward_backward, plain = compiled(Pooled), built(Pooled)
    for shift in range(3):
        parts = [sized(2 + place % 2, length + shift) for place, length in enumerate([5, 9, 1, 17])]
        forward_backward.zero_grad()
        plain.zero_grad()
        loss = forward_backward.step_microbatches([((), part) for part in parts])
        wanted, _ = accumulate(lambda place, part: plain(**part), parts)
        assert_same(loss, wanted, "loss")
        for name, parameter in forward_backward.named_parameters():
            assert_same(parameter.grad, plain.get_parameter(name).grad, name)


def test_beyond_the_kinds_that_are_remembered_an_eighth_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "KINDS", 16)
    forward_backward = compiled(Sized)
    known = []
    for length in range(1, 21):
        forward_backward(**sized(8, length))
        known.append(len(forward_backward._steps.agreement.kinds))
    assert known == [*range(1, 17), 14, 15, 16, 14]
