"""torch.distributed as a transport: whatever it was started with, and closed or aborted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fxpipe
from fxpipe.distributed import torch_transport
from fxpipe.distributed.activity import announced
from fxpipe.distributed.collective import Collective
from fxpipe.distributed.processes import connect
from fxpipe.distributed.transport import Transport
from fxpipe.errors import TopologyError
from fxpipe.torch_compat.groups import ranks_without_processes
from tests.device import BACKEND
from tests.gpus import Gpus
from tests.pool import Pool
from tests.replicas import Kinds

TOPOLOGY = fxpipe.Topology([("pipe", 2)])


def trained_on(backend: str | None) -> Tensor:
    dist.init_process_group(backend)
    return fxpipe.compile(Kinds(), TOPOLOGY, microbatches=2)(torch.ones(4, 4))


@pytest.mark.parametrize("backend", [None, BACKEND])
def test_torch_distributed_may_have_been_started_in_any_way(pool: Pool, backend: str | None) -> None:
    wanted = Kinds()(torch.ones(4, 4)).detach()
    for loss in pool.run(trained_on, backend, ranks=2):
        torch.testing.assert_close(loss, wanted)


def opened() -> Transport:
    transport = connect(TOPOLOGY)
    transport.open([(0, 1), (1, 0)], [(0, 1)])
    return transport


CALLS: dict[str, Callable[[Transport], Any]] = {
    "gather": lambda t: t.gather("pipe", 1),
    "gather_int": lambda t: t.gather_int("pipe", 1),
    "a chain": lambda t: t.start([Collective("all_reduce", "pipe", torch.zeros(1))], "a chain").wait(),
    "all_reduce": lambda t: t.all_reduce("pipe", torch.zeros(1)),
    "all_reduce of owners": lambda t: t.all_reduce((0, 1), torch.zeros(1)),
    "broadcast": lambda t: t.broadcast("pipe", torch.zeros(1), 0),
    "tell": lambda t: t.tell("pipe", torch.zeros(1), 0),
    "send": lambda t: t.send((0, 1), torch.zeros(1)),
    "receive": lambda t: t.receive((0, 1), torch.zeros(1)),
}


def errors_of(transport: Transport) -> dict[str, str]:
    """What each call of a transport raises."""
    found = {}
    for name, call in CALLS.items():
        try:
            call(transport)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def errors_after(end: str) -> dict[str, str]:
    transport = opened()
    transport.gather("pipe", None)
    ends = {"abort": lambda: transport.abort("it broke"), "destroy": dist.destroy_process_group}
    ends.get(end, transport.close)()
    if end != "destroy":
        transport.close()  # once more does nothing
    return errors_of(transport)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("abort", "an earlier step failed and closed the connections"),
        ("close", "the connections were closed by close()"),
        ("destroy", "torch.distributed was ended by destroy_process_group()"),
    ],
)
def test_after_the_end_every_call_says_what_to_do(pool: Pool, end: str, text: str) -> None:
    for errors in pool.run(errors_after, end, ranks=2):
        assert errors == dict.fromkeys(CALLS, f"RunError: {text}; compile again")


def groups_of_a_life() -> list[int]:
    """The number of process groups before, during and after a transport, and with the next one."""
    fxpipe.init()
    groups = dist.distributed_c10d._world.pg_map
    counts = [len(groups)]
    for _ in range(2):
        transport = opened()
        counts.append(len(groups))
        assert transport.gather("pipe", dist.get_rank()) == [0, 1]
        transport.close()
        counts.append(len(groups))
    return counts


def test_close_gives_back_every_process_group(pool: Pool) -> None:
    for before, during, after, again, end in pool.run(groups_of_a_life, ranks=2):
        assert before == after == end == 1
        assert during == again > 4


def groups_of_a_failure() -> tuple[int, set[int]]:
    """How many groups are destroyed behind a failure, and which of them were not aborted before."""
    transport, aborted, destroyed = opened(), set[int](), list[int]()
    abort, destroy = dist.ProcessGroup.abort, dist.destroy_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "abort", lambda group: [aborted.add(id(group)), abort(group)])
        patch.setattr(dist, "destroy_process_group", lambda group: [destroyed.append(id(group)), destroy(group)])
        transport.abort("it has failed")
    return len(destroyed), set(destroyed) - aborted


def test_behind_a_failure_groups_are_aborted_for_nccl_waits_for_what_is_under_way(gpus: Gpus) -> None:
    for destroyed, not_aborted in gpus.run(groups_of_a_failure):
        assert destroyed >= 2
        assert not not_aborted


def gathered_under_a_default_device() -> tuple[int, ...]:
    """What is gathered so, by a transport that is closed behind torch.distributed."""
    transport = opened()
    with torch.device("meta"):
        numbers = transport.gather_int("pipe", 5 + dist.get_rank())
    dist.destroy_process_group()
    transport.close()
    return numbers


def test_a_default_device_changes_nothing_and_torch_distributed_may_end_first(pool: Pool) -> None:
    assert pool.run(gathered_under_a_default_device, ranks=2) == [(5, 6), (5, 6)]


def told_in_steps(few: int) -> list[list[float]]:
    """What a rank hears of rank 1, for which the others listen before they meet it, three times."""
    transport, heard, rank = connect(fxpipe.Topology([("pipe", 3)])), list[list[float]](), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch, announced("telling"):
        patch.setattr(torch_transport, "_FEW", few)
        for number in range(3):
            tensor = torch.full((2,), float(rank + 10 * number))
            listening = transport.tell("pipe", tensor, 1) if rank != 1 else None
            assert transport.gather_int("pipe", number) == (number,) * 3
            (listening or transport.tell("pipe", tensor, 1)).wait()
            heard.append(tensor.tolist())
    transport.close()
    return heard


@pytest.mark.parametrize("few", [0, 32])
def test_one_rank_tells_all_others_that_listen_already(pool: Pool, few: int) -> None:
    """As messages to each, beside which they meet; or, of many, all at once."""
    assert pool.run(told_in_steps, few, ranks=3) == [[[1.0] * 2, [11.0] * 2, [21.0] * 2]] * 3


def connected(ranks: int) -> None:
    connect(fxpipe.Topology([("pipe", ranks)]))


def test_a_process_group_that_sends_nothing_is_refused() -> None:
    with ranks_without_processes(2), pytest.raises(TopologyError, match=r'backend "fake", .* fxpipe\.preview\(model'):
        connect(fxpipe.Topology([("pipe", 2)]))


def test_a_topology_of_another_size_is_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(connected, 4, ranks=2):
        assert isinstance(outcome.error, TopologyError)
        assert "4 ranks (pipe 4), but 2 processes run; start 4" in str(outcome.error)


class TiedEnds(nn.Module):
    """Three stages, of which the first and the last use one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(fxpipe.stage_boundary(self.b(fxpipe.stage_boundary(self.a(x))))).square().mean()


def groups_of_a_run(axes: Sequence[tuple[str, int]], zero: int, options: Mapping[str, Any], folder: str) -> list[int]:
    """How many groups this rank makes, how many of these it is in, and how often the world's communicator is split."""
    from tests.simulated_gpu.nccl import splits_of_world

    device, calls, real = fxpipe.init(), list[Any](), dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(real(*args, **kwargs))
        return calls[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        topo = fxpipe.Topology(axes)
        x = torch.ones(4, 4, device=device)
        step = fxpipe.compile(TiedEnds().to(device), topo, microbatches=2, zero=zero, example_args=(x,), **options)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
        step(x)
        step.clip_grad_norm_(1.0)
        optimizer.step()
        fxpipe.save(folder, step, optimizer, step=1)
        for name in ("model", "batch", axes[-1][0]):
            assert dist.get_world_size(topo.group(name)) == len(topo.groups(name)[0])
    members = [group for group in calls if group is not dist.GroupMember.NON_GROUP_MEMBER]
    return [len(calls), len(members), splits_of_world().count]


def sharded(stage: nn.Module, mesh: Any) -> None:
    fully_shard(stage, mesh=mesh["data"])


@pytest.mark.parametrize(
    ("axes", "zero", "options"),
    [
        ([("pipe", 3)], 0, {}),
        ([("pipe", 4)], 0, {"placement": {"a": (0, 1, 2), "b": 1, "c": 3}}),
        *(([("pipe", 2), ("data", 2)], zero, {}) for zero in range(4)),
        ([("pipe", 2), ("data", 2)], 0, {"parallelize": sharded}),
        ([("pipe", 2), ("expert", 2)], 0, {}),
        ([("tensor", 2), ("pipe", 2)], 0, {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_a_rank_makes_the_groups_that_it_is_in_alone_and_splits_no_communicator_of_others(
    gpus: Gpus, axes: list[tuple[str, int]], zero: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """NCCL waits for ever if a rank splits the world's communicator more often than another: tied weights on three
    ranks did so. Each group of others takes a rank a round through the store, 6,307 of them on 16 x 1,024 ranks."""
    ranks = math.prod(size for _, size in axes)
    for made, mine, splits in gpus.run(groups_of_a_run, axes, zero, options, str(tmp_path), ranks=ranks):
        assert made == mine <= 24
        assert splits == 0
