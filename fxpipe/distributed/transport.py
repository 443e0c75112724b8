"""Transport: how tensors move between the ranks of a pipe group and of a data group.

A transport moves bytes and agrees on small objects; it knows nothing of stages. There are two: ``LocalTransport`` (one
process plays every pipe rank), and in a file of its own ``DistributedTransport`` (torch.distributed, one process a
rank). The tests have a third, ``StrictTransport``, which behaves as NCCL does, without NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.distributed.collective import Collective, OnceAwaited, PeerLost, Scope, Work, without_frames
from fxpipe.errors import RunError, describe_error
from fxpipe.graph.plain_data import digest_of

Pair = tuple[int, int]
"""(sending, receiving) pipe rank."""

Groups = Mapping[str, Sequence[Sequence[int]]]
"""Scope → its groups of ranks, which cover all ranks."""

NO_GROUPS: Groups = MappingProxyType({})


class Transport(Protocol):
    """One rank's view. A scope is "pipe" (its pipe group), "data", a tuple of pipe ranks, or one that was opened.

    What the methods do here is what they come to in one process that plays every rank of a pipe group.
    """

    number: int
    """How many transports this process has made, with this one; the same on all ranks."""
    rank: int
    """Its number over the whole topology."""
    pipe_rank: int | None
    """This rank's place in its pipe group; None where one process plays them all."""
    data_rank: int
    data_size: int
    device: torch.device
    """Where buffers live, and what a rank without parameters works on."""

    def open(self, pairs: Sequence[Pair], owners: Sequence[tuple[int, ...]], groups: Groups = NO_GROUPS) -> None:
        """Makes ready, on all ranks: a queue for each pair, a group for each set of owners and each scope."""

    def open_more(self, pairs: Sequence[Pair]) -> None:
        """Makes a queue for each further pair, between two steps. A collective call of a pipe group, and of no more."""

    def ranks(self, scope: Scope) -> tuple[int, ...]:
        """The ranks of this rank's group of a scope, counted over the whole topology."""
        return (0,)

    def send(self, pair: Pair, buffer: Tensor) -> Work:
        raise RunError(f"one process plays all pipe ranks, so nothing travels from rank {pair[0]} to {pair[1]}")

    def receive(self, pair: Pair, buffer: Tensor) -> Work:
        raise RunError(f"one process plays all pipe ranks, so nothing travels from rank {pair[0]} to {pair[1]}")

    def gather(self, scope: str, item: Any) -> list[Any]:
        """Every rank's ``item``, by rank in the group: plain data as ``plain_data`` has it, on the host.

        RunError on all of them where one rank's item is none.
        """
        return [item]

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        """The same for one 63-bit integer, faster."""
        return (item,)

    def all_reduce(self, scope: Scope, tensor: Tensor) -> None:
        """Sums ``tensor`` over the group, in place; the same bits on every rank."""

    def broadcast(self, scope: Scope, tensor: Tensor, source: int) -> None:
        """Overwrites ``tensor`` by that of the group's rank number ``source``."""

    def tell(self, scope: Scope, tensor: Tensor, source: int) -> Work:
        """``broadcast``, done once it was waited for, where the others may come to it long before the source does. Of a
        scope only one is under way."""
        return OnceAwaited(lambda: None)

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        """Starts collectives that run one after another, beside the caller.

        Each scope takes them in the order in which they were started, which must be the same on all ranks of a group.
        """
        for step in steps:
            step.alone()
            step.then()
        return OnceAwaited(lambda: None)

    def abort(self, reason: str) -> None:
        """Makes every rank that waits for this one end with an error."""

    def close(self) -> None:
        """Gives back the connections. Nothing may be under way."""

    def process_groups(self) -> Collection[object]:
        """The process groups that this rank has open."""
        return ()

    def explain(self, lost: PeerLost) -> str:
        """Says why a wait ended: which rank failed, and how."""
        return str(lost)


class LocalTransport(Transport):
    """One process that plays every pipe rank of one replica: nobody to talk to."""

    number = 1
    rank = 0
    pipe_rank = None
    data_rank = 0
    data_size = 1
    device = torch.device("cpu")

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    open = open_more = all_reduce = broadcast = abort = close = _nothing


def member(transport: Transport, scope: str, place: int) -> str:
    """A rank of a group, numbered over all ranks, with its place: "rank 6 (pipe 3)"."""
    if transport.pipe_rank is None:  # one process plays them all
        return f"{scope} rank {place}"
    return f"rank {transport.ranks(scope)[place]} ({scope} {place})"


@contextlib.contextmanager
def failing_together(
    transport: Transport,
    give_up: Callable[[str], None],
    spare: tuple[type[BaseException], ...] = (),
    let_go: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """What fails inside fails on every rank: ``give_up(reason)`` aborts, so that nobody waits for this one.

    ``spare``: errors that all ranks raise, with nothing started: one can go on after them. ``let_go`` drops what
    keeps connections open, while it is found out who is lost.
    """
    # A lost peer is no error of this rank's: it asks why first, and then gives up with that reason.
    lost: PeerLost | None = None
    try:
        yield
    except PeerLost as error:
        lost = without_frames(error)
    except BaseException as error:
        if not isinstance(error, spare):
            give_up(describe_error(error))
        raise
    if lost is not None:  # outside of the handler, whose traceback would keep the connections open
        let_go()
        reason = transport.explain(lost)
        give_up(reason)
        raise RunError(reason) from None


def broadcast(tensors: Sequence[Tensor], transport: Transport, scope: Scope, source: int) -> None:
    """Overwrites the tensors by those of the group's rank number ``source``."""
    # as bytes: a backend may not know every type
    in_flat_buffers(tensors, lambda flat: transport.broadcast(scope, flat.view(torch.uint8), source))


def in_flat_buffers(tensors: Sequence[Tensor], call: Callable[[Tensor], object]) -> None:
    """Has ``call`` change the tensors in place: all of a type at once, as one flat buffer."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    # One collective for many tensors: a small one costs about as much as a large one.
    for group in groups.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        call(flat)
        offset = 0
        for tensor in group:
            overwrite(tensor, flat[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """``tensor.copy_(values)``, also where ``expand`` has made it, into whose repetitions torch writes nothing.

    RunError where the values do not repeat.
    """
    for dim, stride in enumerate(tensor.stride()):
        # A dimension of stride 0 is one memory seen several times: it is written once, if all values agree (or are
        # NaN).
        if stride == 0 and tensor.shape[dim] > 1:
            once = values.narrow(dim, 0, 1)
            if not bool(((values == once) | (values != values)).all()):
                raise RunError(
                    f"a tensor of shape {list(tensor.shape)} repeats one memory, as expand() makes it, and is given "
                    "values that differ there; register tensor.expand(...).clone()"
                )
            tensor, values = tensor.narrow(dim, 0, 1), once
    tensor.copy_(values)


def differing(transport: Transport, fact: Any) -> list[Any]:
    """Each replica's ``fact``, where they differ; nothing where all have one: then a number travels, its hash.

    A collective call of the data axis.
    """
    digests = transport.gather_int("data", digest_of([repr(fact)]))
    return [] if len(set(digests)) == 1 else transport.gather("data", fact)
