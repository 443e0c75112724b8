"""What the device notices of order: races, lifetimes, pinned copies, waits of the host. And what orders."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests import simulated_gpu
from tests.gpus import Gpus


def other_stream() -> torch.cuda.Stream:
    """A stream that has nothing before it but what the host knows."""
    torch.cuda.synchronize()
    return torch.cuda.Stream()


def a_pinned_buffer_that_nobody_waits_for() -> None:
    x, pinned = torch.ones(8, device="cuda"), torch.zeros(8, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.empty(8, device="cuda").copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()


def two_streams_without_an_event() -> None:
    stream = other_stream()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.stream(stream):
        x.add_(1)


def a_read_that_a_write_follows() -> None:
    x = torch.zeros(8, device="cuda")
    stream = other_stream()
    with torch.cuda.stream(stream):
        y = x + 1
    x.add_(1)
    torch.cuda.synchronize()
    del y


def a_copy_beside_a_write() -> None:
    x, pinned = torch.zeros(8, device="cuda"), torch.zeros(8, pin_memory=True)
    stream = other_stream()
    with torch.cuda.stream(stream):
        x.copy_(pinned, non_blocking=True)
    x.sum()
    torch.cuda.synchronize()


def an_event_that_is_recorded_too_early() -> None:
    stream = other_stream()
    event = torch.cuda.current_stream().record_event()
    x = torch.zeros(8, device="cuda")
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        x.add_(1)


def pinned_memory_that_is_overwritten() -> None:
    x, pinned = torch.zeros(8, device="cuda"), torch.zeros(8, pin_memory=True)
    x.copy_(pinned, non_blocking=True)
    pinned.fill_(1)
    torch.cuda.synchronize()


def an_event_in_between() -> None:
    stream = other_stream()
    x = torch.zeros(8, device="cuda")
    stream.wait_event(torch.cuda.current_stream().record_event())
    with torch.cuda.stream(stream):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(stream)
    x.add_(1)


def an_event_by_way_of_a_third_stream() -> None:
    first, second = other_stream(), torch.cuda.Stream()
    x = torch.zeros(8, device="cuda")
    first.wait_stream(torch.cuda.current_stream())
    second.wait_stream(first)
    with torch.cuda.stream(second):
        x.add_(1)
    torch.cuda.synchronize()


def the_host_in_between() -> None:
    x = torch.zeros(8, device="cuda")
    with torch.cuda.stream(other_stream()):
        x.add_(1)
    torch.cuda.synchronize()


def two_reads() -> None:
    x = torch.zeros(8, device="cuda")
    with torch.cuda.stream(other_stream()):
        y = x + 1
    z = x + 1
    torch.cuda.synchronize()
    del y, z


def two_parts_of_one_tensor() -> None:
    x = torch.zeros(8, device="cuda")
    with torch.cuda.stream(other_stream()):
        x[:4].add_(1)
    x[4:].add_(1)
    torch.cuda.synchronize()


def freed(record: bool = False, wait: bool = False) -> None:
    """Memory that another stream uses is freed, and its own stream allocates."""
    x = torch.zeros(8, device="cuda")
    stream = other_stream()
    with torch.cuda.stream(stream):
        x.add_(1)
    if record:
        x.record_stream(stream)
    if wait:
        torch.cuda.current_stream().wait_stream(stream)
    del x
    torch.zeros(8, device="cuda")


FAULTS: list[tuple[Callable[[], None], set[str]]] = [
    (two_streams_without_an_event, {"race"}),
    (a_read_that_a_write_follows, {"race"}),
    (a_copy_beside_a_write, {"race"}),
    (an_event_that_is_recorded_too_early, {"race"}),
    (pinned_memory_that_is_overwritten, {"race"}),
    (a_pinned_buffer_that_nobody_waits_for, {"race"}),
    (an_event_in_between, set()),
    (an_event_by_way_of_a_third_stream, set()),
    (the_host_in_between, set()),
    (two_reads, set()),
    (two_parts_of_one_tensor, set()),
    (freed, {"lifetime"}),
    (partial(freed, record=True), set()),
    (partial(freed, wait=True), set()),
]


def faults_of(block: Callable[[], None]) -> set[str]:
    with simulated_gpu.watched() as found:
        block()
        torch.cuda.synchronize()
    return {report.kind for report in simulated_gpu.faults(found)}


@pytest.mark.parametrize(("block", "faults"), FAULTS)
def test_what_no_event_orders_is_a_fault(block: Callable[[], None], faults: set[str], gpus: Gpus) -> None:
    assert gpus.run(faults_of, block, ranks=1) == [faults]


def test_a_race_that_nobody_watches_for_fails_the_call(gpus: Gpus) -> None:
    with pytest.raises(AssertionError, match=r"race +aten::add.out writes on stream \d+ of device 0 what aten::zero_"):
        gpus.run(two_streams_without_an_event, ranks=1)


def pinned_copy() -> list[list[float]]:
    """What the host finds before it waits, after an event that is recorded before the copy, and after one behind it."""
    x, pinned = torch.ones(2, device="cuda"), torch.zeros(2, pin_memory=True)
    before = torch.cuda.current_stream().record_event()
    pinned.copy_(x, non_blocking=True)
    behind = torch.cuda.current_stream().record_event()
    found = [pinned.tolist()]
    for event in (before, behind):
        event.synchronize()
        found.append(pinned.tolist())
    return found


def test_a_pinned_copy_arrives_once_the_host_has_waited_for_it(gpus: Gpus) -> None:
    [(at_once, too_early, waited)] = gpus.run(pinned_copy, ranks=1)
    assert all(map(math.isnan, at_once + too_early))
    assert waited == [1.0, 1.0]


def through_pinned_memory() -> list[float]:
    """Twice to the host and back, on one stream, of which the host waits for nothing."""
    pinned, y = torch.zeros(2, pin_memory=True), torch.zeros(2, device="cuda")
    for value in (1.0, 2.0):
        pinned.copy_(torch.full((2,), value, device="cuda"), non_blocking=True)
        y.add_(torch.empty(2, device="cuda").copy_(pinned, non_blocking=True))
    return y.tolist()


def test_copies_of_one_stream_follow_each_other_in_pinned_memory(gpus: Gpus) -> None:
    assert gpus.run(through_pinned_memory, ranks=1) == [[3.0, 3.0]]


def waits() -> list[tuple[str, str]]:
    x, pinned = torch.ones(2, device="cuda"), torch.zeros(2, pin_memory=True)
    with simulated_gpu.watched() as found:
        x.sum().item()
        x.nonzero()
        x[x > 0]
        x.cpu()
        torch.ones(2).to("cuda", non_blocking=True)
        torch.equal(x, x)
        pinned.copy_(x, non_blocking=True)
        x.copy_(pinned, non_blocking=True)
        torch.cuda.current_stream().wait_event(torch.cuda.current_stream().record_event())
        torch.cuda.synchronize()
    return [(text, where.partition(" < ")[0].rpartition("/")[2]) for _, text, where in found]


def test_waits_of_the_host_are_recorded_with_their_place(gpus: Gpus) -> None:
    first = waits.__code__.co_firstlineno + 3
    assert gpus.run(waits, ranks=1) == [
        [
            ("item", f"test_order.py:{first}"),
            ("aten::nonzero", f"test_order.py:{first + 1}"),
            ("aten::nonzero", f"test_order.py:{first + 2}"),
            ("aten::index", f"test_order.py:{first + 2}"),
            ("copy to the host", f"test_order.py:{first + 3}"),
            ("copy to the device, of memory that is not pinned", f"test_order.py:{first + 4}"),
            ("aten::equal", f"test_order.py:{first + 5}"),
            ("synchronize the device", f"test_order.py:{first + 9}"),
        ]
    ]


def waiting_in_error_mode() -> str:
    x = torch.ones(2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        x.sum().item()
    except RuntimeError as error:
        return str(error).partition(" at ")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no error"


def test_a_wait_is_an_error_where_torchs_mode_says_so(gpus: Gpus) -> None:
    assert gpus.run(waiting_in_error_mode, ranks=1) == ["called a synchronizing CUDA operation: item"]
