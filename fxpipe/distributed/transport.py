"""Transport: moves tensors between the ranks of a pipe group and of a data group.

A transport moves bytes and gathers small objects; it does not know stages. ``LocalTransport`` is for a single process
that plays every pipe rank; ``DistributedTransport``, in its own file, is for a process per rank over torch.distributed.
The tests add ``StrictTransport``, which behaves like NCCL without NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.distributed.collective import Collective, OnceAwaited, PeerLost, Scope, Work, lost_in_stage, without_frames
from fxpipe.errors import RunError, describe_error

Pair = tuple[int, int]
"""(sending, receiving) pipe rank."""

Groups = Mapping[str, Sequence[Sequence[int]]]
"""Scope → its groups of ranks, which together cover all ranks."""

NO_GROUPS: Groups = MappingProxyType({})


class Transport(Protocol):
    """A rank's transport. A scope is "pipe" (its pipe group), "data", a tuple of pipe ranks, or an opened scope.

    The methods here implement a single process that plays every rank of a pipe group.
    """

    number: int
    """The number of transports that this process has made, including this one; the same on all ranks."""
    rank: int
    """The rank in the whole topology."""
    pipe_rank: int | None
    """This rank's place in its pipe group; None if the process plays all pipe ranks."""
    data_rank: int
    data_size: int
    device: torch.device
    """The device of buffers, and the device that a rank without parameters works on."""

    def open(self, pairs: Sequence[Pair], owners: Sequence[tuple[int, ...]], groups: Groups = NO_GROUPS) -> None:
        """Opens a queue for each pair, and a group for each set of owners and each scope. A call of all ranks."""

    def open_more(self, pairs: Sequence[Pair]) -> None:
        """Opens a queue for each further pair, between two steps. A collective call of a single pipe group."""

    def ranks(self, scope: Scope) -> tuple[int, ...]:
        """Returns the ranks of this rank's group of a scope, numbered over the whole topology."""
        return (0,)

    def send(self, pair: Pair, buffer: Tensor) -> Work:
        raise RunError(f"one process plays all pipe ranks, so nothing travels from rank {pair[0]} to {pair[1]}")

    def receive(self, pair: Pair, buffer: Tensor) -> Work:
        raise RunError(f"one process plays all pipe ranks, so nothing travels from rank {pair[0]} to {pair[1]}")

    def gather(self, scope: str, item: Any) -> list[Any]:
        """Returns every rank's ``item``, by rank in the group: plain data of the ``plain_data`` module, on the host.
        Equal items, and items that the same ranks have sent before, travel as a digest.

        RunError on all ranks of the group if an item is no plain data.
        """
        return [item]

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        """A faster ``gather`` for an integer per rank."""
        return (item,)

    def all_reduce(self, scope: Scope, tensor: Tensor) -> None:
        """Sums ``tensor`` over the group, in place; every rank gets the same bits."""

    def broadcast(self, scope: Scope, tensor: Tensor, source: int) -> None:
        """Overwrites ``tensor`` by the tensor of rank number ``source`` in the group."""

    def tell(self, scope: Scope, tensor: Tensor, source: int) -> Work:
        """Starts a ``broadcast`` that ``wait`` completes; receivers may call ``tell`` long before the source does. A
        scope has only one ``tell`` under way."""
        return OnceAwaited(lambda: None)

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        """Starts collectives that run in order, asynchronously to the caller.

        Each scope runs them in the order in which they were started, which must be the same on all ranks of a group.
        """
        for step in steps:
            step.alone()
            step.then()
        return OnceAwaited(lambda: None)

    def abort(self, reason: str) -> None:
        """Makes every rank that waits for this rank fail."""

    def close(self) -> None:
        """Closes the connections. No communication may be under way."""

    def process_groups(self) -> Collection[object]:
        """Returns the process groups that this rank has open."""
        return ()

    def explain(self, lost: PeerLost) -> str:
        """Returns why a wait ended: which rank failed, and how."""
        return str(lost)


class LocalTransport(Transport):
    """The transport of a single process that plays every pipe rank of a single replica, without communication."""

    number = 1
    rank = 0
    pipe_rank = None
    data_rank = 0
    data_size = 1
    device = torch.device("cpu")

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    open = open_more = all_reduce = broadcast = abort = close = _nothing


def member(transport: Transport, scope: str, rank: int) -> str:
    """Names rank ``rank`` of a group, with its rank in the topology: "rank 6 (pipe 3)"."""
    if transport.pipe_rank is None:  # a single process plays all pipe ranks
        return f"{scope} rank {rank}"
    return f"rank {transport.ranks(scope)[rank]} ({scope} {rank})"


@contextlib.contextmanager
def failing_together(
    transport: Transport,
    give_up: Callable[[str], None],
    spare: tuple[type[BaseException], ...] = (),
    let_go: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """An error in this context fails every rank: ``give_up(reason)`` aborts, so that no rank waits for this rank.

    ``spare``: errors that all ranks raise with nothing started, after which they can go on. If a peer is lost,
    ``let_go`` first drops objects that keep connections open, and then the transport finds the lost rank.
    """
    # A lost peer is not this rank's own error: find the reason first, and then give up with this reason.
    lost: PeerLost | None = None
    try:
        yield
    except PeerLost as error:
        lost = without_frames(error)
    except BaseException as error:
        lost = lost_in_stage(error)
        if lost is None:
            if not isinstance(error, spare):
                give_up(describe_error(error))
            raise
        without_frames(error)
    if lost is not None:  # outside the except clause, whose traceback would keep the connections open
        let_go()
        reason = transport.explain(lost)
        give_up(reason)
        raise RunError(reason) from None


def broadcast(tensors: Sequence[Tensor], transport: Transport, scope: Scope, source: int) -> None:
    """Overwrites the tensors by the tensors of rank number ``source`` in the group."""
    # Broadcast bytes: a backend may not support every dtype.
    in_flat_buffers(tensors, lambda flat: transport.broadcast(scope, flat.view(torch.uint8), source))


def in_flat_buffers(tensors: Sequence[Tensor], call: Callable[[Tensor], object]) -> None:
    """Applies ``call``, in place, to flat buffers that hold all tensors of a dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    # Join many tensors to a single collective: a small collective costs about as much as a large collective.
    for group in groups.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        call(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            overwrite(tensor, part.view_as(tensor))


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Does ``tensor.copy_(values)``, also for a tensor made by ``expand``, which torch's ``copy_`` refuses.

    RunError if ``values`` differ between places of the same memory.
    """
    for dim, stride in enumerate(tensor.stride()):
        # A dimension of stride 0 repeats the same memory: write it once, if all values agree (or are NaN).
        if stride == 0 and tensor.shape[dim] > 1:
            once = values.narrow(dim, 0, 1)
            if not bool(((values == once) | (values != values)).all()):
                raise RunError(
                    f"a tensor of shape {list(tensor.shape)} repeats one memory, as expand() makes it, and is given "
                    "values that differ there; register tensor.expand(...).clone()"
                )
            tensor, values = tensor.narrow(dim, 0, 1), once
    tensor.copy_(values)


def differing(transport: Transport, scope: str, fact: Any) -> list[Any]:
    """Returns every rank's ``fact``, which is plain data, if they differ; else an empty list. A collective call."""
    everyone = transport.gather(scope, fact)
    return everyone if any(other != fact for other in everyone) else []
