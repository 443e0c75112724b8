"""Collectives and messages of the simulated NCCL give what plain PyTorch computes, in its order and its ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxpipe
from tests import simulated_gpu
from tests.gpus import Gpus

SUM, MEAN, LARGEST = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def given(rank: int, *sizes: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    return torch.randint(-99, 99, sizes, generator=torch.Generator().manual_seed(rank)).float()


def of_all(ranks: int, *sizes: int) -> list[Tensor]:
    return [given(rank, *sizes) for rank in range(ranks)]


def on_gpu(*sizes: int) -> Tensor:
    return given(dist.get_rank(), *sizes).cuda()


def all_reduce(rank: int, ranks: int) -> tuple[Any, Any]:
    sums, means, largest = on_gpu(3, 4), on_gpu(3, 4), on_gpu(3, 4).to(torch.bfloat16)
    for tensor, op in ((sums, SUM), (means, MEAN), (largest, LARGEST)):
        dist.all_reduce(tensor, op)
    every = torch.stack(of_all(ranks, 3, 4))
    return (sums, means, largest.float()), (every.sum(0), every.mean(0), every.max(0).values)


def all_reduce_of_another_layout(rank: int, ranks: int) -> tuple[Any, Any]:
    tensor = on_gpu(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    return tensor, torch.stack(of_all(ranks, 2, 3, 4, 5)).sum(0)


def all_gather(rank: int, ranks: int) -> tuple[Any, Any]:
    parts, whole = [torch.empty(3, device="cuda") for _ in range(ranks)], torch.empty(ranks * 3, device="cuda")
    dist.all_gather(parts, on_gpu(3))
    dist.all_gather_into_tensor(whole, on_gpu(3))
    return (*parts, whole), (*of_all(ranks, 3), torch.cat(of_all(ranks, 3)))


def reduce_scatter(rank: int, ranks: int) -> tuple[Any, Any]:
    from_whole, from_parts = torch.empty(2, device="cuda"), torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(from_whole, on_gpu(ranks * 2))
    dist.reduce_scatter(from_parts, list(on_gpu(ranks, 2)), MEAN)
    whole = torch.stack(of_all(ranks, ranks * 2)).sum(0)
    return (from_whole, from_parts), (whole.chunk(ranks)[rank], torch.stack(of_all(ranks, ranks, 2)).mean(0)[rank])


def coalesced(rank: int, ranks: int) -> tuple[Any, Any]:
    sums, parts = [on_gpu(size) for size in (1, 3)], [torch.empty(size, device="cuda") for size in (2, 3)]
    wholes = [torch.empty(ranks * size, device="cuda") for size in (1, 2)]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as work:
        for part, size in zip(parts, (2, 3), strict=True):
            dist.reduce_scatter_tensor(part, on_gpu(ranks * size))
    work.wait()
    with dist._coalescing_manager(device=torch.device("cuda")):
        for tensor in sums:
            dist.all_reduce(tensor)
    with dist._coalescing_manager(device=torch.device("cuda")):
        for whole, size in zip(wholes, (1, 2), strict=True):
            dist.all_gather_into_tensor(whole, on_gpu(size))
    return (*parts, *sums, *wholes), (
        *(torch.stack(of_all(ranks, ranks * size)).sum(0).chunk(ranks)[rank] for size in (2, 3)),
        *(torch.stack(of_all(ranks, size)).sum(0) for size in (1, 3)),
        *(torch.cat(of_all(ranks, size)) for size in (1, 2)),
    )


def all_to_all(rank: int, ranks: int) -> tuple[Any, Any]:
    even, parts = torch.empty(ranks, 2, device="cuda"), [torch.empty(rank + 1, device="cuda") for _ in range(ranks)]
    uneven = torch.empty(ranks * (rank + 1), 2, device="cuda")
    rows = [peer + 1 for peer in range(ranks)]
    dist.all_to_all_single(even, on_gpu(ranks, 2))
    dist.all_to_all_single(uneven, on_gpu(sum(rows), 2), [rank + 1] * ranks, rows)
    dist.all_to_all(parts, list(on_gpu(sum(rows)).split(rows)))
    return (even, uneven, *parts), (
        torch.stack([each[rank] for each in of_all(ranks, ranks, 2)]),
        torch.cat([each.split(rows)[rank] for each in of_all(ranks, sum(rows), 2)]),
        *(each.split(rows)[rank] for each in of_all(ranks, sum(rows))),
    )


def one_behind_the_other(rank: int, ranks: int) -> tuple[Any, Any]:
    tensor = on_gpu(3)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    return tensor, torch.stack(of_all(ranks, 3)).sum(0) * ranks**2


def rooted(rank: int, ranks: int) -> tuple[Any, Any]:
    """From and to the last rank: its result alone is looked at where the others' is not defined."""
    last = ranks - 1
    shared, summed, part = on_gpu(3), on_gpu(3), torch.empty(2, device="cuda")
    parts = [torch.empty(3, device="cuda") for _ in range(ranks)]
    dist.broadcast(shared, last)
    dist.scatter(part, list(on_gpu(ranks, 2)) if rank == last else None, last)
    dist.reduce(summed, last)
    dist.gather(on_gpu(3), parts if rank == last else None, last)
    found, expected = [shared, part], [given(last, 3), given(last, ranks, 2)[rank]]
    if rank == last:
        found, expected = [*found, summed, *parts], [*expected, torch.stack(of_all(ranks, 3)).sum(0), *of_all(ranks, 3)]
    return found, expected


def messages(rank: int, ranks: int) -> tuple[Any, Any]:
    """Around a ring, alone and in a batch, two at once."""
    before, behind = (rank - 1) % ranks, (rank + 1) % ranks
    got = [torch.empty(3, device="cuda") for _ in range(4)]
    sends, receives = (dist.isend, on_gpu(3), behind), (dist.irecv, got[0], before)
    calls = (sends, receives) if rank % 2 else (receives, sends)  # messages with one peer follow each other
    works = [call(tensor, peer) for call, tensor, peer in calls]
    for work in works:
        work.wait()
    batch = [dist.P2POp(dist.isend, on_gpu(3) + number, behind) for number in range(3)]
    batch += [dist.P2POp(dist.irecv, tensor, before) for tensor in got[1:]]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return got, [given(before, 3) + number for number in (0, 0, 1, 2)]


def outcome(call: Callable[[int, int], tuple[Any, Any]]) -> list[tuple[list[float], list[float]]]:
    fxpipe.init()
    found, expected = call(dist.get_rank(), dist.get_world_size())
    pairs = zip(found, expected, strict=True) if isinstance(found, (tuple, list)) else [(found, expected)]
    return [(gpu.cpu().tolist(), cpu.tolist()) for gpu, cpu in pairs]


CALLS = [
    all_reduce,
    all_reduce_of_another_layout,
    all_gather,
    reduce_scatter,
    coalesced,
    all_to_all,
    one_behind_the_other,
    rooted,
    messages,
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_results(call: Callable[[int, int], tuple[Any, Any]], ranks: int, gpus: Gpus) -> None:
    for pairs in gpus.run(outcome, call, ranks=ranks):
        for found, expected in pairs:
            assert found == pytest.approx(expected) if isinstance(found, float) else found == expected


def unordered(kind: str) -> set[str]:
    """What is received is used before, and what is sent is overwritten before somebody has waited."""
    fxpipe.init()
    x = torch.ones(3, device="cuda")
    with simulated_gpu.watched() as found:
        if kind == "all_reduce":
            work = dist.all_reduce(x, async_op=True)
        else:
            work = dist.irecv(x, 1) if dist.get_rank() == 0 else dist.isend(x, 0)
        x.add_(1)
        work.wait()
    return {report.kind for report in simulated_gpu.faults(found)}


def on_another_stream() -> set[str]:
    """The wait lets one stream wait, and no other one."""
    fxpipe.init()
    x, stream = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with simulated_gpu.watched() as found:
        dist.all_reduce(x)
        with torch.cuda.stream(stream):
            x + 1
    torch.cuda.synchronize()
    return {report.kind for report in simulated_gpu.faults(found)}


@pytest.mark.parametrize("block", [partial(unordered, "all_reduce"), partial(unordered, "message"), on_another_stream])
def test_a_tensor_that_is_used_before_the_wait_is_a_race(block: Callable[[], set[str]], gpus: Gpus) -> None:
    assert gpus.run(block) == [{"race"}] * 2


def sent_first() -> bool:
    """Whether a send is over before its receive is posted, of which the other rank gives word by gloo."""
    fxpipe.init()
    x, word = torch.ones(3, device="cuda"), torch.zeros(1)
    work = None if dist.get_rank() else dist.isend(x, 1)
    early = work is not None and work.is_completed()
    dist.all_reduce(word)
    if work is None:
        dist.recv(x, 0)
    else:
        work.wait()
    return early


def test_a_send_is_over_once_its_receive_is_posted(gpus: Gpus) -> None:
    assert gpus.run(sent_first) == [False, False]


def refused() -> str:
    fxpipe.init()
    try:
        dist.group.WORLD._get_backend(torch.device("cuda")).allreduce(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_tensors_of_the_cpu_are_refused(gpus: Gpus) -> None:
    assert all("Tensors must be CUDA and dense" in error for error in gpus.run(refused))
