"""Chains of collectives: each does what its name says, in order, beside the caller, on threads and on strict ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.distributed.collective import Collective, PeerLost, Streams
from fxpipe.distributed.transport import LocalTransport, Transport
from tests.gpus import Gpus
from tests.harness import engine_of
from tests.pool import Pool
from tests.strict_transport import connect

TOPOLOGY = fxpipe.Topology([("pipe", 1), ("data", 4)], ranks_per_node=2)
NODES, ACROSS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def opened() -> Transport:
    transport = connect(TOPOLOGY)
    transport.open([], [], {"shard": NODES, "gather": NODES, "replica": ACROSS, "all": [[0, 1, 2, 3]]})
    return transport


@pytest.fixture(params=["strict 0", "distributed"])
def on_four(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    engine = engine_of(request.param, lambda: request.getfixturevalue("pool"))
    return lambda fn, *args: engine(4, fn, *args)


def ramp(rank: int) -> Tensor:
    """Four numbers of a rank, all different over all ranks: 0, 1, 2, 3, then 10, 11, 12, 13, ..."""
    return 10.0 * rank + torch.arange(4.0)


def done(operation: str, scope: str, root: int = 0) -> list[float]:
    transport = opened()
    mine = ramp(transport.rank)
    output, given = mine, None
    if operation == "reduce_scatter":
        output, given = torch.empty(2), mine
    elif operation == "all_gather":
        output, given = torch.empty(8), mine
    transport.start([Collective(operation, scope, output, given, root)], "a test").wait()
    transport.close()
    return output.tolist()


WANTED = {
    ("all_reduce", "shard"): [[10, 12, 14, 16]] * 2 + [[50, 52, 54, 56]] * 2,
    ("all_reduce", "all"): [[60, 64, 68, 72]] * 4,
    ("maximum", "replica"): [[20, 21, 22, 23], [30, 31, 32, 33]] * 2,
    ("reduce_scatter", "shard"): [[10, 12], [14, 16], [50, 52], [54, 56]],
    ("all_gather", "replica"): [[0, 1, 2, 3, 20, 21, 22, 23], [10, 11, 12, 13, 30, 31, 32, 33]] * 2,
    ("broadcast", "shard"): [[10, 11, 12, 13]] * 2 + [[30, 31, 32, 33]] * 2,
}


@pytest.mark.parametrize("call", WANTED, ids=" ".join)
def test_each_operation_does_what_its_name_says(on_four: Callable[..., list[Any]], call: tuple[str, str]) -> None:
    assert on_four(done, *call, 1) == WANTED[call]


def test_a_reduction_to_one_rank_is_complete_there(on_four: Callable[..., list[Any]]) -> None:
    results = on_four(done, "reduce", "shard", 1)
    assert [results[1], results[3]] == [[10, 12, 14, 16], [50, 52, 54, 56]]


def hierarchical(chains: int) -> tuple[list[list[float]], list[str]]:
    """All-reduces in three steps, several of them started before any is waited for."""
    transport = opened()
    log: list[str] = []
    works, buffers = [], []
    for number in range(chains):
        buffer = ramp(transport.rank) * (number + 1)
        part = torch.empty(2)
        steps = [
            Collective("reduce_scatter", "shard", part, buffer, then=lambda n=number: log.append(f"{n} in")),
            Collective("all_reduce", "replica", part, then=lambda n=number: log.append(f"{n} across")),
            Collective("all_gather", "gather", buffer, part, then=lambda n=number: log.append(f"{n} out")),
        ]
        steps[-1] = steps[-1].followed_by(lambda n=number: log.append(f"{n} ended"))
        works.append(transport.start(steps, f"chain {number}"))
        buffers.append(buffer)
    for work in reversed(works):
        work.wait()
    transport.close()
    return [buffer.tolist() for buffer in buffers], log


def test_chains_run_in_order_and_beside_each_other(on_four: Callable[..., list[Any]]) -> None:
    for buffers, log in on_four(hierarchical, 5):
        assert buffers == [[60 * n, 64 * n, 68 * n, 72 * n] for n in range(1, 6)]
        for number in range(5):
            assert [line for line in log if line.startswith(str(number))] == [
                f"{number} {what}" for what in ("in", "across", "out", "ended")
            ]
        for what in ("in", "across", "out"):
            assert [line[0] for line in log if line.endswith(f" {what}")] == list("01234")


class Stream:
    """Stands for torch's: what is put on it has run at once."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def record_event(self) -> None: ...

    def wait_event(self, event: None) -> None: ...


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams that torch was asked for."""
    asked: list[Stream] = []
    monkeypatch.setattr(torch, "Stream", lambda: asked.append(Stream()) or asked[-1])
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    return asked


def failing() -> str:
    transport = opened()
    reached = []

    def fail() -> None:
        raise ValueError("in the middle")

    buffer, never = torch.ones(2, 4, device=transport.device)
    steps = [Collective("all_reduce", "shard", buffer, then=fail), Collective("all_reduce", "replica", never)]
    first = transport.start(steps, "a chain")
    try:
        first.wait()
    except ValueError as error:
        reached.append(f"{error}: {buffer.tolist()}, {never.tolist()}")
    transport.close()
    return "".join(reached)


def test_what_fails_beside_the_caller_is_raised_where_it_is_waited_for(pool: Pool) -> None:
    assert pool.run(failing, ranks=4) == ["in the middle: [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]"] * 4


def test_what_fails_beside_a_gpu_s_stream_is_raised_where_it_is_waited_for(gpus: Gpus) -> None:
    assert gpus.run(failing, ranks=4) == ["in the middle: [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]"] * 4


def test_a_chain_on_streams_raises_where_it_is_waited_for_and_runs_nothing_more(streams: list[Stream]) -> None:
    performed: list[str] = []
    chains = Streams(lambda step: performed.append(str(step.scope)))

    def fail() -> None:
        raise ValueError("in the middle")

    steps = [Collective("all_reduce", scope, torch.ones(1)) for scope in ("shard", "replica", "gather")]
    steps[1] = steps[1].followed_by(fail)
    work = chains.start(steps, "a chain")
    with pytest.raises(ValueError, match="in the middle"):
        work.wait()
    assert performed == ["shard", "replica"]
    chains.start(steps[:1], "another").wait()
    assert performed == ["shard", "replica", "shard"]


def test_a_group_that_fails_on_streams_is_a_lost_peer(streams: list[Stream]) -> None:
    def perform(step: Collective) -> None:
        raise RuntimeError("NCCL communicator was aborted")

    work = Streams(perform).start([Collective("all_reduce", "shard", torch.ones(4))], "stage 0")
    with pytest.raises(PeerLost, match=r"^all-reduce of 4 elements over shard \(stage 0\)$") as caught:
        work.wait()
    assert caught.value.reason == "NCCL communicator was aborted"


def test_each_scope_has_one_stream(streams: list[Stream]) -> None:
    """Of a pool of 32, which NCCL shares: with more, unrelated work waits for each other."""
    chains = Streams(lambda step: None)
    for _ in range(100):
        chains.start([Collective("all_reduce", scope, torch.ones(1)) for scope in ("shard", "replica")], "a chain")
    assert len(streams) == 2


def test_a_group_of_one_has_nothing_to_wait_for() -> None:
    log: list[str] = []
    output = torch.empty(2)
    steps = [Collective("all_gather", "gather", output, torch.ones(2), then=lambda: log.append("then"))]
    LocalTransport().start([steps[0].followed_by(lambda: log.append("ended"))], "a test").wait()
    assert output.tolist() == [1, 1]
    assert log == ["then", "ended"]
