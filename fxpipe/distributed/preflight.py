"""Pre-flight: before ranks open connections, they compare what they run, and with what."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

import torch
from torch.distributed.distributed_c10d import Store

from fxpipe.distributed.topology import Topology
from fxpipe.errors import RunError

_SHOWN = 4  # facts and ranks that a message tells of at once
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
    store: Store, rank: int, size: int, facts: Facts, wait: Callable[[str], None], named: Callable[[int], str]
) -> None:
    """RunError on all ranks where their facts differ. A collective call of all ranks; it needs no connections.

    ``wait``: waits for a key of the store, with an error where it never comes. The first rank compares.
    """
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    if store.add("came", 1) == size:
        store.set("all came", "")
    if rank == 0:
        wait("all came")
        texts = store.multi_get([f"facts/{each}" for each in range(size)])
        store.set("preflight", difference(dict(enumerate(map(json.loads, texts))), named))
    wait("preflight")
    differing = store.get("preflight").decode()
    if differing:
        raise RunError(f"the ranks do not run the same: {differing}; give all ranks the same")


def difference(everyone: Mapping[int, Facts], named: Callable[[int], str]) -> str:
    """In which facts ranks differ, in words; empty where they do not."""
    names = dict.fromkeys(name for facts in everyone.values() for name in facts)
    told = [_told(name, {r: facts.get(name, "not known") for r, facts in everyone.items()}, named) for name in names]
    return "; ".join([text for text in told if text][:_SHOWN])


def _told(name: str, values: Mapping[int, str], named: Callable[[int], str]) -> str:
    """ "zero is 1 on rank 0 and 2 others, and 0 on rank 3 (pipe 1)"; empty where all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    parts = [f"{value:.{_LONGEST}} on {_some(some, named)}" for value, some in ranks.items()]
    return f"{name} is {', and '.join(parts)}"


def _some(ranks: Sequence[int], named: Callable[[int], str]) -> str:
    others = len(ranks) - _SHOWN
    return ", ".join(map(named, ranks[:_SHOWN])) + (f" and {others} others" if others > 0 else "")
