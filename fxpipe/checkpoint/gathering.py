"""Gathering: exchanges a checkpoint's messages between ranks, as JSON: a rank never unpickles data of a peer.

Between steps the messages go over the transport, in collective calls of all ranks. While training goes on, they go over
the store that the processes met in, which no other thread uses.
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
from fxpipe.torch_compat.groups import default_store

PATIENCE = 1800.0
"""Seconds for which a rank that has written its part waits for the other ranks while training goes on."""
_AT_EXIT = 20.0
"""The same limit, in seconds, once the main thread has ended."""
_SLICE = 0.05
_NEVER = threading.Event()  # its wait replaces time.sleep: a signal ends the wait
# Seconds for which the first rank, which may hold the store, waits until the others have read the outcome.
_FAREWELL = 5.0


class TransportGathering:
    """A gathering over the transport: collective calls of all ranks, or of one process that plays every rank."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        """This process's rank among the processes of the gathering."""

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        return [json.loads(message) for message in self._transport.gather("all", json.dumps(mine))]

    to_first = gather

    def from_first(self, mine: Any) -> Any:
        """The first rank's value, on all ranks."""
        return self.gather(mine)[0]


class StoreGathering:
    """A gathering over a torch.distributed store. ``name``: equal on all ranks, and unique to this gathering."""

    def __init__(self, store: dist.distributed_c10d.Store, name: str, rank: int, ranks: int) -> None:
        self.rank, self._ranks = rank, range(ranks)
        self._store = dist.distributed_c10d.PrefixStore(f"fxpipe/checkpoint/{name}", store.clone())  # type: ignore[attr-defined]
        self._since = time.monotonic()

    def to_first(self, mine: Any) -> list[Any]:
        """On the first rank, every rank's value in the order of ranks; on other ranks, an empty list."""
        self._store.set(f"part {self.rank}", json.dumps(mine))
        self._since = time.monotonic()
        return [json.loads(self._get(f"part {rank}", rank)) for rank in self._ranks] if self.rank == 0 else []

    def from_first(self, mine: Any) -> Any:
        if self.rank:
            outcome = json.loads(self._get("outcome", 0))
            # Once all ranks have set this key, the first rank may end, and the store with it.
            self._store.set(f"seen {self.rank}", "")
            return outcome
        self._store.set("outcome", json.dumps(mine))
        seen = [f"seen {rank}" for rank in self._ranks[1:]]
        end = time.monotonic() + _FAREWELL  # the store may end with this process: the others read first
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
        """Whether the store has all keys; if not, waits ``_SLICE`` seconds. (The store's wait warns on a timeout.)"""
        try:
            arrived: bool = self._store.check(keys)
        except RuntimeError as error:
            raise CheckpointError(f"the store that the processes met in is gone: {error}") from error
        if not arrived:
            _NEVER.wait(_SLICE)
        return arrived


Gathering = TransportGathering | StoreGathering


class Verdict:
    """The result of a rank's part of a common task: a JSON value or an error. ``folder``: named in OSError texts."""

    def __init__(self, folder: Path, make: Callable[[], Any]) -> None:
        self.error: Exception | None = None
        try:
            value = make()
            json.dumps(value)
            self.message = [value, None]
        except Exception as error:
            self.error = error
            if isinstance(error, OSError) and error.strerror is not None:
                where = error.filename or folder  # an error within an open file has no file name
                text = f"{where}: {error.strerror}; the checkpoints that were complete are as they were"
                self.error = CheckpointError(text)
                self.error.__cause__ = error
            self.message = [None, describe_error(self.error)]


def values_of(messages: list[list[Any]], own: Verdict) -> list[Any]:
    """All ranks' values. If a rank failed, that rank raises its own error and the others raise a CheckpointError."""
    if own.error is not None:
        raise own.error
    for rank, (_, error) in enumerate(messages):
        if error is not None:
            raise CheckpointError(f"rank {rank}: {error.removeprefix('CheckpointError: ')}")
    return [value for value, _ in messages]


def agreed(gathering: TransportGathering, folder: Path, make: Callable[[], Any]) -> list[Any]:
    """Each rank's result of ``make``; if ``make`` fails on a rank, all ranks raise. A collective call of all ranks."""
    # Ranks on which ``make`` failed gather, too, so that no rank waits forever.
    verdict = Verdict(folder, make)
    return values_of(gathering.gather(verdict.message), verdict)


def gathering_beside(transport: Transport, name: str) -> Gathering:
    """A gathering for use while training goes on."""
    if transport.pipe_rank is None:
        return TransportGathering(transport)
    return StoreGathering(default_store(), name, transport.rank, len(transport.ranks("all")))
