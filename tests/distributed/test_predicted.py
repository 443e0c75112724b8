"""Predicted: where all ranks expect the same they need not gather; over torch.distributed as by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import fxpipe.distributed.torch_transport as home
from fxpipe.distributed.activity import Alike, agree, announced, words
from fxpipe.distributed.processes import connect
from fxpipe.distributed.topology import Topology
from fxpipe.run.step.batch_check import KINDS
from tests.device import DEVICE
from tests.harness import compiled
from tests.models import CASES
from tests.pool import Pool
from tests.thinned import every

CALL, OTHER = 5 << 31, 6 << 31
MOST = (1 << 31) - 1


def of(*numbers: int) -> tuple[bytes, ...]:
    return tuple(bytes([number]) for number in numbers)


def met(*brought: tuple[int, ...]) -> bool:
    """What the maxima of what ranks bring tell each of them."""
    assert all(0 <= word < 1 << 63 for words_of in brought for word in words_of)
    return agree([max(each) for each in zip(*brought, strict=True)])


def test_they_agree_exactly_where_the_marks_and_the_values_are_alike() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        ranks = [(draw.choice([CALL, OTHER]) | draw.choice([0, 3, 4]), of(draw.choice([1, 2]))) for _ in range(3)]
        calls, alikes = {mark >> 31 for mark, _ in ranks}, {mark & MOST for mark, _ in ranks} - {0}
        wanted = len(calls) == 1 and len(alikes) <= 1 and len({values for _, values in ranks}) == 1
        assert met(*itertools.starmap(words, ranks)) == wanted


def gathered_again(kept: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """What each of several calls gives, and how many all-gathers it takes."""
    transport = connect(Topology([("pipe", 3)]))
    rank, found, counts = dist.get_rank(), list[tuple[int, ...]](), list[int]()
    gather, taken = dist.all_gather_single, list[int]()

    def counted(*args: object, **options: object) -> object:
        taken.append(1)
        return gather(*args, **options)

    items = [rank, rank, 7, rank if rank else 7, rank, 7, -rank, -rank, 8]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_single", counted)
        patch.setattr(home, "PREDICTED", kept)
        for number, item in enumerate(items):
            with announced(f"call {number}", alike=Alike(0 if rank == 1 else 1 + number)):
                found.append(transport.gather_int("pipe", item))
            counts.append(len(taken))
            taken.clear()
    transport.close()
    return found, counts


@pytest.mark.parametrize(
    ("kept", "gathers"),
    [
        # of (0, 1, 2) behind (7, 1, 2) ranks 1 and 2 expect the latter; of 7 rank 0 does; of 8 all expect it of all
        (home.PREDICTED, [1, 0, 0, 1, 1, 1, 1, 0, 0]),
        (3, [1, 0, 0, 1, 1, 0, 1, 0, 0]),  # only the last one is remembered: of 7 all expect it of all, too
    ],
)
def test_what_came_before_is_not_gathered_again(kept: int, gathers: list[int], pool: Pool) -> None:
    rows = [(0, 1, 2), (0, 1, 2), (7, 7, 7), (7, 1, 2), (0, 1, 2), (7, 7, 7), (0, -1, -2), (0, -1, -2), (8, 8, 8)]
    for found, counts in pool.run(gathered_again, kept, ranks=3):
        assert found == rows
        assert counts == gathers


LENGTHS = [0, 493, 494, 495, 70_000]
"""Of texts, which stand in quotation marks: what is longer than the first message comes in two."""


def gathered_texts() -> tuple[list[bool], list[int]]:
    """Whether each gather of texts came to what all ranks brought, and how many messages the longest took."""
    transport = connect(Topology([("pipe", 3)]))
    rank, found, sizes = dist.get_rank(), list[bool](), list[int]()
    gather = dist.all_gather_single

    def counted(items: Tensor, *args: object, **options: object) -> object:
        sizes.append(len(items) // 3)
        return gather(items, *args, **options)

    with pytest.MonkeyPatch.context() as patch, announced("call"):
        patch.setattr(dist, "all_gather_single", counted)
        for length in LENGTHS:
            everyone = ["é" * (length // 2 * (one == 1)) + "x" * one for one in range(3)]
            for texts in (everyone, everyone, [everyone[1]] * 3):
                found.append(transport.gather("pipe", texts[rank]) == texts)
    transport.close()
    return found, sizes


def test_texts_of_any_length_are_gathered_and_those_of_one_message_predicted(pool: Pool) -> None:
    for found, sizes in pool.run(gathered_texts, ranks=3):
        assert found == [True] * 3 * len(LENGTHS)
        head = home._HEAD
        rests = [length // 2 * 2 + 3 + home._NUMBERS.size - head for length in LENGTHS]
        # The second of three is predicted where the first was kept, and then rank 1 predicts another third one.
        wanted = [[head, head] if rest <= 0 else [head, rest] * 2 for rest in rests]
        assert sizes == [size for each in wanted for size in each]


def gathered_apart(texts: Sequence[str]) -> str:
    """Two ranks come to two calls: one gathers a number, and the other a text."""
    transport, rank = connect(Topology([("pipe", 2)])), dist.get_rank()
    gathers = [lambda: transport.gather_int("pipe", 3), lambda: transport.gather("pipe", texts)]
    with pytest.raises(home.PeerLost) as error, announced(["one", "another"][rank]):
        gathers[rank]()
    return transport.explain(error.value)


@pytest.mark.parametrize("length", [2000])
def test_ranks_that_gather_a_number_and_a_text_of_any_length_in_different_calls_are_told_so(
    length: int, pool: Pool
) -> None:
    for told in pool.run(gathered_apart, ["x" * length], ranks=2):
        assert "one" in told
        assert "another" in told


LOSS = ["broadcast of 2"] if DEVICE == "cuda" else []
"""On a GPU the loss is broadcast; gloo sends it to each rank."""


def collectives_of_steps(rows: Sequence[int], tracer: str) -> list[list[str]]:
    """What each step of batches of so many rows does together with other ranks."""
    forward_backward = compiled(
        CASES["two towers on 2 ranks"],
        topology=Topology([("pipe", 2)]),
        tracer=tracer,
        example_kwargs=CASES["two towers on 2 ranks"].batch(rows=rows[0]),
    )
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "broadcast", "all_gather_single"):
            patch.setattr(dist, name, partial(noted, calls, name, getattr(dist, name)))
        steps = []
        for count in rows:
            calls.clear()
            forward_backward(**CASES["two towers on 2 ranks"].batch(rows=count))
            steps.append(list(calls))
    return steps


def noted(calls: list[str], name: str, call: Any, *args: Any, **options: Any) -> Any:
    calls.append(f"{name} of {args[0].numel()}")
    return call(*args, **options)


def test_a_step_settles_by_one_small_collective_and_nothing_else(pool: Pool) -> None:
    for steps in pool.run(collectives_of_steps, [12] * 6, "symbolic", ranks=2):
        assert steps[4:] == [["all_reduce of 4", *LOSS]] * 2


@pytest.mark.parametrize("tracer", every(2, ["symbolic", "export"]))
def test_a_step_of_a_new_kind_of_batch_gathers_nothing_that_is_predicted(tracer: str, pool: Pool) -> None:
    """What all were given, and the plan; of a plan for any shape what the loss is, too."""
    new = ["all_reduce of 4"] * (3 if tracer == "symbolic" else 2) + LOSS
    rows = [12, *range(13, 13 + KINDS), 24, 25, 26]
    for steps in pool.run(collectives_of_steps, rows, tracer, ranks=2):
        assert steps[-3:] == [new] * 3
