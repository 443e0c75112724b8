"""What ranks compare before they go on: what they run, and what a gather will come to.

Before they open connections they compare facts, through a store. In a step they need only compare whether all expect
the same of a gather: an all-gather of gloo takes a hop for each rank of the group, one behind another. A maximum over a
few numbers takes far less, and shows every rank whether all brought the same: where max(h) = min(h), which is −max(−h).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

import torch
from torch.distributed.distributed_c10d import Store

from fxpipe.distributed.activity import ALIKE_BITS
from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError

_SHOWN = 4  # facts and ranks that a message names at once
_LONGEST = 200  # characters of a value in a message

Facts = Mapping[str, str]
"""What → its value in words; the same on all ranks, or nothing is begun."""


def facts_of(topology: Topology, options: Mapping[str, str]) -> dict[str, str]:
    """What this rank runs."""
    try:
        version = metadata.version("fxpipe")
    except metadata.PackageNotFoundError:  # run from its source
        version = "unknown"
    axes = ", ".join(f"{name} {size}" for name, size in topology.axes)
    return {
        "the version of Python": platform.python_version(),
        "the version of torch": torch.__version__,
        "the version of fxpipe": version,
        "the topology": f"({axes}), ranks_per_node={topology.ranks_per_node}",
        **options,
    }


def compare_facts(
    store: Store,
    rank: int,
    size: int,
    facts: Facts,
    wait: Callable[[Sequence[str]], None],
    named: Callable[[int], str],
) -> None:
    """RunError on all ranks where their facts differ. A collective call of all ranks; it needs no connections.

    ``wait``: waits for keys of the store, with an error where they never come. The first rank compares.
    """
    keys = [f"facts/{each}" for each in range(size)]
    store.set(keys[rank], json.dumps(dict(facts)))
    if rank == 0:
        wait(keys)
        everyone = dict(enumerate(map(json.loads, store.multi_get(keys))))
        store.set("preflight", difference(everyone, named))
    wait(["preflight"])
    differing = store.get("preflight").decode()
    if differing:
        raise RunError(f"the ranks do not run the same: {differing}; give all ranks the same")


def difference(everyone: Mapping[int, Facts], named: Callable[[int], str]) -> str:
    """In which facts ranks differ: "zero is 1 on rank 0 and 2 others, and 0 on rank 3 (pipe 1)"; else empty."""
    found = []
    for name in dict.fromkeys(name for facts in everyone.values() for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in everyone.items():
            ranks.setdefault(facts.get(name, "not known"), []).append(rank)
        parts = []
        for value, some in ranks.items():
            others = f" and {len(some) - _SHOWN} others" if len(some) > _SHOWN else ""
            parts.append(f"{value:.{_LONGEST}} on {', '.join(map(named, some[:_SHOWN]))}{others}")
        if len(ranks) > 1:
            found.append(f"{name} is {', and '.join(parts)}")
    return "; ".join(found[:_SHOWN])


Values = tuple[bytes, ...]
_KEPT = 1 << 15
"""Values, of all ranks together, of some 500 bytes at most, and mostly of few."""
_MOST = (1 << 63) - 1
_ALIKE = (1 << ALIKE_BITS) - 1


class Predicted:
    """What messages have come to. Ranks may remember different things: then they do not agree, and gather."""

    def __init__(self) -> None:
        self._values: dict[tuple[object, bytes], Values] = {}
        self._count = 0

    def of(self, scope: object, mine: bytes, count: int) -> Values:
        """What ``count`` ranks will bring, this one ``mine``: what they brought beside it the last time, or else the
        same."""
        return self._values.get((scope, mine)) or (mine,) * count

    def keep(self, scope: object, mine: bytes, values: Values) -> None:
        self._count += len(values)
        if self._count > _KEPT:
            self._values.clear()
            self._count = len(values)
        self._values[scope, mine] = values


def words(mark: int, values: Values) -> tuple[int, int, int, int]:
    """What a rank brings: a hash of the call and of what it expects, and what must be the same; and each of both less
    than nothing, so that the maxima give the least and the greatest. ``mark``: as ``activity.LastCall`` has it."""
    call, alike = mark >> ALIKE_BITS, mark & _ALIKE
    each_once = {value: place for place, value in enumerate(dict.fromkeys(values))}  # they may be long
    text = repr((call, list(each_once), [each_once[value] for value in values]))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    return number, _MOST - number, alike, _ALIKE - alike if alike else 0


def agree(greatest: Sequence[int]) -> bool:
    """Whether all ranks that brought words with these maxima expect the same. Some leave out what must be the same, and
    have 0 there."""
    most, least, alike, least_alike = greatest
    return most == _MOST - least and (not alike or alike == _ALIKE - least_alike)
