"""Foreseen: ranks that all expect the same are told so, alike, and others gather; over torch.distributed as by hand."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import fxpipe.distributed.torch_transport as home
from fxpipe.distributed.connect import connect
from fxpipe.distributed.foreseen import _KEPT, Foreseen, agree, words
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.whereabouts import Alike, announced
from tests.harness import compiled
from tests.models import CASES
from tests.pool import Pool

CALL, OTHER = 5 << 31, 6 << 31
MOST = (1 << 31) - 1


def met(*brought: tuple[int, int]) -> bool:
    """What the maxima of what ranks bring tell each of them."""
    assert all(0 <= word < 1 << 63 for words_of in brought for word in words_of)
    return agree([max(each) for each in zip(*brought, strict=True)])


def test_ranks_agree_where_all_expect_the_same_in_the_same_call() -> None:
    same = words(CALL, (1, 2, 3))
    assert met(same, same, same)
    assert not met(same, same, words(CALL, (1, 2, 4)))
    assert not met(same, words(OTHER, (1, 2, 3)))


def test_a_rank_that_expects_nothing_agrees_with_none() -> None:
    nothing, *others = words(CALL, None), words(CALL, (1,)), words(CALL, (2,))
    assert not met(nothing, nothing)
    for other in others:
        assert not met(nothing, other)


@pytest.mark.parametrize("digest", [1, 2, MOST - 1, MOST])
def test_what_must_be_alike_is_left_out_by_ranks_that_have_none(digest: int) -> None:
    some, none = words(CALL | digest, (1,)), words(CALL, (1,))
    assert met(some, some)
    assert met(some, none, some)
    assert met(none, none)
    for other in {1, 2, MOST - 1, MOST} - {digest}:
        assert not met(some, words(CALL | other, (1,)), none)


def test_they_agree_exactly_where_the_marks_and_the_values_are_alike() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        ranks = [(draw.choice([CALL, OTHER]) | draw.choice([0, 3, 4]), (draw.choice([1, 2]),)) for _ in range(3)]
        calls, alikes = {mark >> 31 for mark, _ in ranks}, {mark & MOST for mark, _ in ranks} - {0}
        wanted = len(calls) == 1 and len(alikes) <= 1 and len({values for _, values in ranks}) == 1
        assert met(*itertools.starmap(words, ranks)) == wanted


def test_few_are_kept() -> None:
    expected = Foreseen()
    for item in range(_KEPT + 1):
        expected.keep("pipe", item, (item,))
    assert expected.of("pipe", 0) is None
    assert expected.of("pipe", _KEPT) == (_KEPT,)
    assert expected.of("data", _KEPT) is None


def gathered_again() -> tuple[list[tuple[int, ...]], list[int]]:
    """What each of several calls gives, and how many all-gathers it takes."""
    transport = connect(Topology([("pipe", 3)]))
    rank, found, counts = dist.get_rank(), list[tuple[int, ...]](), list[int]()
    gather, taken = home.all_gather_single, list[int]()

    def counted(*args: object, **options: object) -> object:
        taken.append(1)
        return gather(*args, **options)

    items = [rank, rank, 7, rank if rank else 7, rank, 7, -rank, -rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "all_gather_single", counted)
        for number, item in enumerate(items):
            with announced(f"call {number}", alike=Alike(0 if rank == 1 else 1 + number)):
                found.append(transport.gather_int("pipe", item))
            counts.append(len(taken))
            taken.clear()
    transport.close()
    return found, counts


def test_what_came_before_is_not_gathered_again(pool: Pool) -> None:
    rows = [(0, 1, 2), (0, 1, 2), (7, 7, 7), (7, 1, 2), (0, 1, 2), (7, 7, 7), (0, -1, -2), (0, -1, -2)]
    for found, counts in pool.run(gathered_again, ranks=3):
        assert found == rows
        # of (0, 1, 2) behind (7, 1, 2) ranks 1 and 2 expect the latter; of 7 rank 0 does
        assert counts == [1, 0, 1, 1, 1, 1, 1, 0]


def settled_apart() -> str:
    """Two ranks come to two calls, each of which was gathered before."""
    transport = connect(Topology([("pipe", 2)]))
    for _ in range(2):
        for name in ("one", "another"):
            with announced(name):
                transport.gather_int("pipe", 3)
    with pytest.raises(home.PeerLost) as error, announced(["one", "another"][dist.get_rank()]):
        transport.gather_int("pipe", 3)
    return transport.explain(error.value)


def test_ranks_in_different_calls_are_told_so(pool: Pool) -> None:
    for told in pool.run(settled_apart, ranks=2):
        assert "one" in told
        assert "another" in told


def collectives_of_steps(data: int) -> list[list[str]]:
    """What each of two steps, of a kind of batch that has been met often, does together with other ranks."""
    topology = Topology([("pipe", 2), ("data", data)])
    forward_backward = compiled(CASES["two towers on 2 ranks"], topology=topology)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((dist, "all_reduce"), (dist, "broadcast"), (home, "all_gather_single")):
            patch.setattr(owner, name, partial(noted, calls, name, getattr(owner, name)))
        steps = []
        for _ in range(6):
            calls.clear()
            forward_backward(**CASES["two towers on 2 ranks"].batch())
            steps.append(list(calls))
    return steps[4:]


def noted(calls: list[str], name: str, call: Any, *args: Any, **options: Any) -> Any:
    calls.append(f"{name} of {args[0].numel()}")
    return call(*args, **options)


def test_a_step_settles_by_one_small_collective_and_nothing_else(pool: Pool) -> None:
    assert pool.run(collectives_of_steps, 1, ranks=2) == [[["all_reduce of 2"]] * 2] * 2
