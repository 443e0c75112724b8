"""Gathering: what ranks send each other about a checkpoint, as JSON: nothing of a peer is unpickled.

Between steps over the transport, where a collective call is one of all ranks; while training goes on over the store
that the processes met in, which other threads do not use.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fxpipe.distributed.transport import Transport
from fxpipe.errors import CheckpointError, describe_error
from fxpipe.torch_compat import default_store

PATIENCE = 1800.0
"""Seconds for which a rank that has written its part waits for the others' while training goes on."""
_AT_EXIT = 20.0
"""The same once the program is over: a rank that still writes then has until then."""
_SLICE = 0.05
_NEVER = threading.Event()  # waited for in place of time.sleep: the wait ends with a signal
# How long the first rank, which may hold the store, stays until the others have read the outcome.
_FAREWELL = 5.0


class TransportGathering:
    """Over the transport: collective calls of all ranks, or of one process that plays them all."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        """This process's number among those that meet."""

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return [json.loads(message) for message in self._transport.gather("all", json.dumps(mine))]

    to_first = gather

    def from_first(self, mine: Any) -> Any:
        """The first rank's value on all."""
        return self.gather(mine)[0]


class StoreGathering:
    """Over a store of torch.distributed. ``name``: of this gathering, the same on all ranks and new each time."""

    def __init__(self, store: dist.distributed_c10d.Store, name: str, rank: int, ranks: int) -> None:
        self.rank, self._ranks = rank, range(ranks)
        self._store = dist.distributed_c10d.PrefixStore(f"fxpipe/checkpoint/{name}", store.clone())  # type: ignore[attr-defined]
        self._since = time.monotonic()

    def to_first(self, mine: Any) -> list[Any]:
        """Every rank's value, by rank, on the first rank."""
        self._store.set(f"part {self.rank}", json.dumps(mine))
        self._since = time.monotonic()
        return [json.loads(self._get(f"part {rank}", rank)) for rank in self._ranks] if self.rank == 0 else []

    def from_first(self, mine: Any) -> Any:
        if self.rank:
            outcome = json.loads(self._get("outcome", 0))
            # The first rank may end, and the store with it, once all have said so.
            self._store.set(f"seen {self.rank}", "")
            return outcome
        self._store.set("outcome", json.dumps(mine))
        seen = [f"seen {rank}" for rank in self._ranks[1:]]
        end = time.monotonic() + _FAREWELL  # the store may end with this process: others read what it has, if they live
        while not self._arrived(seen) and time.monotonic() < end:
            continue
        for key in ["outcome", *seen, *(f"part {rank}" for rank in self._ranks)]:
            self._store.delete_key(key)
        return mine

    def _get(self, key: str, rank: int) -> bytes:
        while not self._arrived([key]):
            waited = time.monotonic() - self._since
            is_over = not threading.main_thread().is_alive()
            if waited > (_AT_EXIT if is_over else PATIENCE):
                raise CheckpointError(f"rank {rank} has not written its part of the checkpoint after {waited:.0f} s")
        return bytes(self._store.get(key))

    def _arrived(self, keys: list[str]) -> bool:
        """Whether they are there, or else after waiting a little: a wait of the store's own warns where it is over."""
        try:
            arrived: bool = self._store.check(keys)
        except RuntimeError as error:
            raise CheckpointError(f"the store that the processes met in is gone: {error}") from error
        if not arrived:
            _NEVER.wait(_SLICE)
        return arrived


Gathering = TransportGathering | StoreGathering


class Verdict:
    """What a rank's part of a common task came to: a value for ``json``, or an error. ``folder``: it works there."""

    def __init__(self, folder: Path, make: Callable[[], Any]) -> None:
        self.error: Exception | None = None
        try:
            value = make()
            json.dumps(value)
            self.message = [value, None]
        except Exception as error:
            self.error = error
            if isinstance(error, OSError) and error.strerror is not None:
                where = error.filename or folder  # what fails within an open file has no name
                text = f"{where}: {error.strerror}; the checkpoints that were complete are as they were"
                self.error = CheckpointError(text)
                self.error.__cause__ = error
            self.message = [None, describe_error(self.error)]


def values_of(messages: list[list[Any]], own: Verdict) -> list[Any]:
    """All ranks' values; where one has failed, its own error on that rank, and a CheckpointError on the others."""
    if own.error is not None:
        raise own.error
    for rank, (_, error) in enumerate(messages):
        if error is not None:
            raise CheckpointError(f"rank {rank}: {error.removeprefix('CheckpointError: ')}")
    return [value for value, _ in messages]


def agreed(gathering: TransportGathering, folder: Path, make: Callable[[], Any]) -> list[Any]:
    """What ``make`` gives in ``folder`` on each rank; where it fails on one, all raise. A collective call of all."""
    # All ranks gather whether they failed or not, so that none waits for one that has raised.
    verdict = Verdict(folder, make)
    return values_of(gathering.gather(verdict.message), verdict)


def gathering_beside(transport: Transport, name: str) -> Gathering | None:
    """Where ranks meet while training goes on; None where they cannot: several ranks in one process."""
    if transport.pipe_rank is None:
        return TransportGathering(transport)
    if not dist.is_initialized():
        return None
    return StoreGathering(default_store(), name, transport.rank, len(transport.ranks("all")))
