"""Link speed: measures messages between pipe ranks and sums over the data axis, on a pipeline's own transport."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from fxpipe.distributed.collective import Collective
from fxpipe.distributed.stopwatch import clock_of
from fxpipe.distributed.transport import Transport

_TURNS = 10
_COPIES = 20  # copies of a large buffer: they keep a GPU busy while its host launches all turns


def link_speeds(transport: Transport, per_node: int, numbers: int) -> dict[str, float]:
    """Returns latency and bandwidth of messages to the next pipe rank, and of sums over this rank's data group.

    The latency is the time of the smallest message; the bandwidth follows from the additional time of a message of
    ``numbers`` float32 elements. Messages alternate in direction, each after the previous. Each link of a ring of k
    ranks carries 2n(k − 1)/k bytes of an all-reduce of n bytes, and half as many of a reduce-scatter.
    """
    pipe, data, here = transport.ranks("pipe"), transport.ranks("data"), transport.pipe_rank
    size, figures = len(data), dict[str, float]()
    buffer, spare = (torch.zeros(numbers // size * size, device=transport.device) for _ in range(2))

    def there_and_back(low: int, part: Tensor) -> None:
        for pair in ((low, low + 1), (low + 1, low)):
            (transport.send if here == pair[0] else transport.receive)(pair, part).wait()

    def reduce(operation: str, part: Tensor) -> None:
        buffers = (part,) if operation == "all_reduce" else (spare[: len(part) // size], part)
        transport.start([Collective(operation, "data", *buffers)], "doctor").wait()

    # (name, ranks, a turn, the messages of a turn, how many times a link carries the buffer). Pairs that share a rank
    # run in sequence.
    lows = [low for low in range(len(pipe) - 1) if here in (low, low + 1)]
    turns = [("message", pipe[low : low + 2], partial(there_and_back, low), 2, 2.0) for low in lows]
    for operation, rounds in (("all_reduce", 2), ("reduce_scatter", 1)) if size > 1 else ():
        turns.append((operation, data, partial(reduce, operation), 1, rounds * (size - 1) / size))
    for what, ranks, turn, messages, carried in turns:
        parts = buffer[:size], buffer
        small, large = (_seconds(partial(turn, part), buffer, spare) for part in parts)
        # On a busy machine the smallest message may take longer than the large one.
        rate = carried * (buffer.nbytes - parts[0].nbytes) / (large - small if large > small else large)
        where = "inside nodes" if ranks[0] // per_node == ranks[-1] // per_node else "between nodes"
        if what != "message" or ranks[0] == transport.rank:  # the first rank of a pair reports
            figures[f"{what} {where}: latency [µs]"] = small / messages * 1e6
            figures[f"{what} {where}: bandwidth [GB/s]"] = rate / 1e9
    return figures


def _seconds(turn: Callable[[], None], buffer: Tensor, spare: Tensor) -> float:
    """Returns the median seconds of a turn by the device's clock, without the first, in which ranks wait for others."""
    clock = clock_of(buffer.device)
    for _ in range(_COPIES if buffer.device.type != "cpu" else 0):  # during the copies the host launches all turns
        spare.copy_(buffer)
    marks = [clock.mark()]
    for _ in range(_TURNS + 1):
        turn()
        marks.append(clock.mark())
    return median(end - start for start, end in pairwise(clock.seconds(marks)[1:]))
