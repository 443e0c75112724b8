"""Virtual time is what its formulas say, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxpipe
from tests import simulated_gpu
from tests.gpus import Gpus

US, MS = 1e-6, 1e-3
COSTS = {"launch": 5 * US, "kernel": 3 * US, "flops": 1e9, "bytes": 1e8, "copy_latency": 10 * US, "copy_bytes": 1e7}
MESSAGES = {"p2p_latency": 20 * US, "p2p_bytes": 1e7, "ring_latency": 30 * US, "ring_bytes": 2e7, "wire_latency": MS}


def time_of(call: Callable[[], object]) -> float:
    """Of the current stream, from a time at which it and the host are at one, in seconds."""
    start = simulated_gpu.align()
    call()
    return simulated_gpu.now() - start


def kernels() -> dict[str, float]:
    simulated_gpu.costs(**COSTS)
    x, small, pinned = torch.ones(64, 64, device="cuda"), torch.ones(4, device="cuda"), torch.ones(64, 64).pin_memory()
    found = {
        "small": time_of(lambda: small + 1),
        "by bytes": time_of(lambda: x + 1),
        "by operations": time_of(lambda: x @ x),
        "copy on the device": time_of(lambda: x.clone()),
        "copy from the host": time_of(lambda: x.copy_(pinned, non_blocking=True)),
    }
    simulated_gpu.fix({"aten::mm": 7 * MS})
    found["fixed"] = time_of(lambda: x @ x)
    return found


def test_of_kernels_and_copies(gpus: Gpus) -> None:
    size, launch = 64 * 64 * 4, COSTS["launch"]
    assert gpus.run(kernels, ranks=1) == [
        pytest.approx(
            {
                "small": launch + COSTS["kernel"],
                "by bytes": launch + 2 * size / COSTS["bytes"],
                "by operations": launch + 2 * 64**3 / COSTS["flops"],
                "copy on the device": launch + 2 * size / COSTS["bytes"],
                "copy from the host": launch + COSTS["copy_latency"] + size / COSTS["copy_bytes"],
                "fixed": launch + 7 * MS,
            },
            rel=1e-9,
        )
    ]


def streams() -> dict[str, float]:
    """Two kernels beside each other, and a third behind both; in milliseconds."""
    simulated_gpu.costs(**simulated_gpu.STRUCTURE)
    here, there = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.ones(4, device="cuda", requires_grad=True)
    start = simulated_gpu.align()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    y = torch.ops.sim.work(x, 2 * MS, 5 * MS)
    with torch.cuda.stream(there):
        torch.ops.sim.work(x.detach(), 3 * MS, 0.0)
        beside = simulated_gpu.now() - start
    here.wait_stream(there)
    torch.ops.sim.work(x.detach(), MS, 0.0)
    end.record()
    host = simulated_gpu.host_now() - start
    y.sum().backward()
    behind = simulated_gpu.now() - start
    end.synchronize()
    waited = simulated_gpu.host_now() - start
    torch.cuda.synchronize()
    found = {"beside": beside, "host": host, "backward": behind, "event": waited}
    ms = {name: seconds / MS for name, seconds in found.items()}
    return {**ms, "all": (simulated_gpu.host_now() - start) / MS, "elapsed": begin.elapsed_time(end)}


def launches() -> list[float]:
    simulated_gpu.costs(launch=5 * US, kernel=MS, query=2 * US)
    x = torch.ones(4, device="cuda")
    start = simulated_gpu.align()
    for _ in range(10):
        x.add_(1)
    event, looks = torch.cuda.current_stream().record_event(), 0
    launched = simulated_gpu.host_now() - start
    while not event.query():
        looks += 1
    return [launched, looks]


def test_the_host_spends_its_launches_and_looks(gpus: Gpus) -> None:
    [(launched, looks)] = gpus.run(launches, ranks=1)
    assert launched == pytest.approx(50 * US)
    assert looks == pytest.approx((10 * MS + 5 * US - 50 * US) / (2 * US), abs=1)


def messages() -> dict[str, float]:
    """The second rank comes 4 ms later to each."""
    fxpipe.init()
    simulated_gpu.costs(**simulated_gpu.STRUCTURE)
    simulated_gpu.costs(**MESSAGES)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, both = torch.ones(1000, device="cuda"), torch.empty(ranks * 1000, device="cuda")
    hosts = torch.zeros(1)

    def late(call: Callable[[], object]) -> float:
        call()  # torch connects groups at their first use
        start = simulated_gpu.align()
        if rank == 1:
            torch.ops.sim.work(x, 4 * MS, 0.0)
        call()
        return simulated_gpu.now() - start

    def host() -> None:
        if rank == 1:
            torch.cuda.synchronize()
        dist.all_reduce(hosts)

    return {
        "message": late(lambda: dist.send(x, 1 - rank) if rank else dist.recv(x, 1 - rank)) if rank < 2 else 0.0,
        "all_reduce": late(lambda: dist.all_reduce(x)),
        "all_gather": late(lambda: dist.all_gather_into_tensor(both, x)),
        "reduce_scatter": late(lambda: dist.reduce_scatter_tensor(x, both)),
        "all_to_all": late(lambda: dist.all_to_all_single(torch.empty_like(both), both)),
        "hosts": late(host),
    }


def test_messages_begin_once_both_ends_are_ready_and_collectives_once_all_are(gpus: Gpus) -> None:
    size, ring, late = 4000, MESSAGES["ring_latency"], 4 * MS
    expected = {
        "message": late + MESSAGES["p2p_latency"] + size / MESSAGES["p2p_bytes"],
        "all_reduce": late + ring + 2 * size / 2 / MESSAGES["ring_bytes"],
        "all_gather": late + ring + 2 * size / 2 / MESSAGES["ring_bytes"],
        "reduce_scatter": late + ring + 2 * size / 2 / MESSAGES["ring_bytes"],
        "all_to_all": late + ring + 2 * size / 2 / MESSAGES["ring_bytes"],
        "hosts": late + MESSAGES["wire_latency"],
    }
    assert gpus.run(messages, ranks=2) == [pytest.approx(expected, rel=1e-9)] * 2


def one_lane() -> float:
    """Two collectives beside a kernel that is longer than one of them."""
    fxpipe.init()
    simulated_gpu.costs(**{**simulated_gpu.STRUCTURE, "ring_latency": 2 * MS})
    x, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    dist.all_reduce(x)
    start = simulated_gpu.align()
    works = [dist.all_reduce(each, async_op=True) for each in (x, y)]
    torch.ops.sim.work(torch.ones(4, device="cuda"), 3 * MS, 0.0)
    for work in works:
        work.wait()
    return simulated_gpu.now() - start


def traced() -> list[tuple[str, float, float]]:
    simulated_gpu.costs(**simulated_gpu.STRUCTURE)
    x = torch.ones(4, device="cuda")
    start = simulated_gpu.align()
    simulated_gpu.trace(True)
    torch.ops.sim.work(x, 2 * MS, 0.0)
    torch.cuda.synchronize()
    return [(what, begin - start, end - start) for what, _, begin, end in simulated_gpu.trace(False)]


def contended() -> float:
    fxpipe.init()
    simulated_gpu.costs(**{**simulated_gpu.STRUCTURE, "ring_latency": 2 * MS, "contention": 0.25})
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    start = simulated_gpu.align()
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    torch.ops.sim.work(torch.ones(4, device="cuda"), 3 * MS, 0.0)
    end = simulated_gpu.now() - start
    work.wait()
    return end


def own_time() -> bool:
    simulated_gpu.costs(**{**simulated_gpu.STRUCTURE, "cpu": 1.0})
    start = simulated_gpu.host_now()
    sum(range(10_000))
    return simulated_gpu.host_now() > start


INSTANT, TWO_MS = pytest.approx(0, abs=1e-12), pytest.approx(2 * MS)
STREAMS = {"beside": 3.0, "host": 0.0, "backward": 9.0, "event": 4.0, "all": 9.0, "elapsed": 4.0}


@pytest.mark.parametrize(
    ("call", "ranks", "wanted"),
    [
        (streams, 1, pytest.approx(STREAMS, abs=1e-9)),
        (one_lane, 2, pytest.approx(4 * MS)),  # collectives of a group follow each other, beside kernels
        (contended, 2, pytest.approx((3 + 0.25 * 2) * MS)),  # kernels are slower while a message is under way
        (traced, 1, [("sim::work", INSTANT, TWO_MS), ("host waits", INSTANT, TWO_MS)]),
        (own_time, 1, True),
    ],
)
def test_of_streams_collectives_and_the_host(gpus: Gpus, call: Callable[[], object], ranks: int, wanted: Any) -> None:
    assert gpus.run(call, ranks=ranks) == [wanted] * ranks
