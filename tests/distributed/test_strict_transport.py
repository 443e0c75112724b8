"""The strict transport: rendezvous, queues, interleavings that replay, and hangs that are told at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.distributed.collective import PeerLost
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from tests.strict_transport import connect, run_strict

T = TypeVar("T")

every_seed = pytest.mark.parametrize("seed", range(3))


def on_pipe(body: Callable[[int, Transport], T], ranks: int = 2, seed: int = 0) -> list[T]:
    """``body(rank, transport)`` on every rank of a pipe group, with a queue for each directed pair."""
    topology = Topology([("pipe", ranks)])

    def run(rank: int) -> T:
        transport = connect(topology)
        transport.open([(a, b) for a in range(ranks) for b in range(ranks) if a != b], [])
        return body(rank, transport)

    return run_strict(run, ranks, seed)


def number(value: float) -> Tensor:
    return torch.tensor([float(value)])


def meet(transport: Transport) -> None:
    """All ranks get here before any goes on."""
    transport.gather("pipe", None)


# --- sends and receives ---


@every_seed
def test_a_send_does_not_end_before_its_receive_is_posted(seed: int) -> None:
    log: list[str] = []

    def body(rank: int, transport: Transport) -> None:
        if rank == 0:
            work = transport.send((0, 1), number(5))
            meet(transport)
            work.wait()
            log.append("send ended")
        else:
            meet(transport)
            log.append("receive posted")
            transport.receive((0, 1), torch.empty(1)).wait()

    on_pipe(body, seed=seed)
    assert log == ["receive posted", "send ended"]


@every_seed
def test_the_two_directions_of_a_pair_do_not_wait_for_each_other(seed: int) -> None:
    def body(rank: int, transport: Transport) -> float:
        mine, theirs = number(rank), torch.zeros(1)
        receive = transport.receive((1 - rank, rank), theirs)  # both ranks receive first
        transport.send((rank, 1 - rank), mine).wait()
        receive.wait()
        return theirs.item()

    assert on_pipe(body, seed=seed) == [1.0, 0.0]


@every_seed
def test_a_buffer_that_is_overwritten_before_its_receive_is_posted_delivers_the_new_bytes(seed: int) -> None:
    def body(rank: int, transport: Transport) -> float:
        buffer = number(1) if rank == 0 else torch.zeros(1)
        if rank == 0:
            work = transport.send((0, 1), buffer)
            buffer.fill_(2)
            meet(transport)
            work.wait()
        else:
            meet(transport)
            transport.receive((0, 1), buffer).wait()
        return buffer.item()

    assert on_pipe(body, seed=seed)[1] == 2.0


def test_two_transports_of_one_rank_do_not_mix_their_messages() -> None:
    topology = Topology([("pipe", 2)])

    def body(rank: int) -> list[float]:
        transports = [connect(topology), connect(topology)]
        buffers = [number(1 + place) if rank == 0 else torch.zeros(1) for place in range(2)]
        for transport in transports:
            transport.open([(0, 1)], [])
        order = [0, 1] if rank == 0 else [1, 0]
        works = [(transports[i].send if rank == 0 else transports[i].receive)((0, 1), buffers[i]) for i in order]
        for work in works:
            work.wait()
        return [buffer.item() for buffer in buffers]

    assert run_strict(body, 2)[1] == [1.0, 2.0]


# --- hangs and errors ---


@every_seed
def test_a_hang_is_an_error_that_says_who_waits_for_whom(seed: int) -> None:
    def body(rank: int, transport: Transport) -> None:
        transport.receive(((rank + 1) % 3, rank), torch.zeros(1)).wait()

    with pytest.raises(RunError) as error:
        on_pipe(body, ranks=3, seed=seed)
    for told in (
        f"the ranks hang (seed {seed})",
        "rank 0 waits for a message from rank 1",
        "rank 1 waits for a message from rank 2",
        "rank 2 waits for a message from rank 0",
    ):
        assert told in str(error.value)


@every_seed
def test_an_error_of_one_rank_ends_the_others_and_is_the_one_that_is_raised(seed: int) -> None:
    ended: dict[int, str] = {}

    def body(rank: int, transport: Transport) -> None:
        if rank == 1:
            raise KeyError("the cause")
        try:
            transport.receive((1, rank), torch.zeros(1)).wait()
        except PeerLost as error:
            ended[rank] = str(error)
            raise

    with pytest.raises(KeyError, match="the cause"):
        on_pipe(body, ranks=3, seed=seed)
    assert sorted(ended) == [0, 2]
    assert all("the cause" in text for text in ended.values())


@every_seed
def test_a_wait_that_begins_after_the_error_ends_too(seed: int) -> None:
    def body(rank: int, transport: Transport) -> None:
        if rank == 0:
            transport.abort("gave up")
            return
        meet(transport)

    with pytest.raises(RunError, match="rank 0: gave up"):
        on_pipe(body, seed=seed)


def test_the_error_of_another_rank_is_told_once() -> None:
    told: list[str] = []

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(fxpipe.stage_boundary(self.one(x))).mean()

    def body(rank: int) -> None:
        forward_backward = fxpipe.compile(Broken(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
        try:
            forward_backward(torch.ones(4, 4))
        except RunError as error:
            told.append(str(error))
            raise

    with pytest.raises((RunError, RuntimeError), match="mat1 and mat2"):
        run_strict(body, 2)
    assert [text.count("another rank failed") for text in told] == [1]
    assert told[0].startswith("another rank failed: rank 1: RuntimeError: mat1 and mat2")


# --- interleavings ---


def interleaving(seed: int, ranks: int = 3) -> list[tuple[int, int]]:
    """Who ran when: each rank logs itself between waits."""
    log: list[tuple[int, int]] = []

    def body(rank: int, transport: Transport) -> None:
        for turn in range(5):
            log.append((rank, turn))
            meet(transport)

    on_pipe(body, ranks, seed)
    return log


@every_seed
def test_the_same_seed_replays_the_same_interleaving(seed: int) -> None:
    assert interleaving(seed) == interleaving(seed)


def test_one_rank_runs_at_a_time_until_it_must_wait() -> None:
    """Random numbers therefore do not depend on how threads happen to be scheduled."""

    def draw(seed: int) -> list[list[float]]:
        torch.manual_seed(0)

        def body(rank: int, transport: Transport) -> list[float]:
            numbers = []
            for _ in range(3):
                numbers += [torch.rand(1).item() for _ in range(50)]
                meet(transport)
            return numbers

        return on_pipe(body, 3, seed)

    assert draw(4) == draw(4)
    torch.manual_seed(0)
    alone = [torch.rand(1).item() for _ in range(450)]
    for numbers in draw(5):
        for start in range(0, 150, 50):  # 50 in a row, for nobody ran in between
            first = alone.index(numbers[start])
            assert numbers[start : start + 50] == alone[first : first + 50]


# --- collective calls ---


@every_seed
def test_collective_calls_over_the_pipe(seed: int) -> None:
    def body(rank: int, transport: Transport) -> tuple[object, ...]:
        total, copied = number(10**rank), number(rank)
        transport.all_reduce("pipe", total)
        transport.broadcast("pipe", copied, 2)
        return (
            total.item(),
            copied.item(),
            transport.gather("pipe", {"rank": rank}),
            transport.gather_int("pipe", rank - 1),
        )

    wanted = (111.0, 2.0, [{"rank": 0}, {"rank": 1}, {"rank": 2}], (-1, 0, 1))
    assert on_pipe(body, 3, seed) == [wanted] * 3


@every_seed
def test_mismatched_collective_calls_are_an_error_that_names_both(seed: int) -> None:
    def body(rank: int, transport: Transport) -> None:
        if rank == 0:
            transport.all_reduce("pipe", number(1))
        else:
            transport.broadcast("pipe", number(1), 0)

    with pytest.raises(RunError, match=r"calls (all_reduce|broadcast) where others call (all_reduce|broadcast)"):
        on_pipe(body, seed=seed)
