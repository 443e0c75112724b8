"""The transport over torch.distributed: one process a rank."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.distributed.collective import Collective, PeerLost, Scope, Starter, Streams, Threads, Work
from fxpipe.distributed.topology import Topology, served_device_type
from fxpipe.distributed.transport import NO_GROUPS, Groups, Pair
from fxpipe.errors import RunError
from fxpipe.graph.plain_data import check_length, decode, encode_for_all
from fxpipe.torch_compat import all_gather_single, bytes_of, default_store, reduce_scatter_single


class _Waiting:
    """A torch.distributed work whose failure is a PeerLost. It lets go of the work, which keeps a connection open."""

    def __init__(self, work: dist.Work | None, call: Any, peer: int) -> None:
        self._work, self._call, self._peer = work, call, peer

    def wait(self) -> None:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise PeerLost(f"{self._call.__name__} with rank {self._peer}: {error}") from None
            finally:
                self._work = None


class DistributedTransport:
    """torch.distributed: gloo between CPUs, nccl between GPUs, gloo for what the host must know.

    Each directed pair of ranks has a process group of its own. On one group, the order of messages is the order in
    which they were started, whatever their tags; with two directions, or activations and gradients, on one group,
    each can come to wait for the other.
    """

    def __init__(self, topology: Topology, timeout: float = 1800.0) -> None:
        self.rank, self.process = dist.get_rank(), os.getpid()
        self._timeout = datetime.timedelta(seconds=timeout)
        self._pipes = topology.groups("pipe")
        coordinate = {"pipe": self._pipes, "data": topology.groups("data")}
        self._ranks: dict[Scope, list[int]] = {
            scope: next(group for group in groups if self.rank in group) for scope, groups in coordinate.items()
        }
        self.pipe_rank: int | None = self._ranks["pipe"].index(self.rank)
        self.data_rank = self._ranks["data"].index(self.rank)
        self.data_size = len(self._ranks["data"])
        self._on_cuda = served_device_type() == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self._on_cuda else torch.device("cpu")
        self._closed = ""  # why, once it is
        self._links: dict[Pair, dist.ProcessGroup] = {}
        self._groups: dict[Scope, dist.ProcessGroup] = {}
        self._hosts: dict[Scope, dist.ProcessGroup] = {}
        for scope, groups in coordinate.items():
            self._new_scope(scope, groups)
        self._beside: Starter = Streams(self._perform) if self._on_cuda else Threads(self._perform, self._look_up)
        _open.add(self)
        self._store = dist.distributed_c10d.PrefixStore(f"fxpipe/{_next_number()}", default_store())

    def _new_scope(self, scope: Scope, groups: Sequence[Sequence[int]]) -> None:
        """Makes a device group and a host group for each list of ranks; all ranks of the world, in one order."""
        for ranks in groups:
            if len(ranks) == 1 and scope not in ("pipe", "data"):  # with whom nothing is shared
                if self.rank in ranks:
                    self._ranks[scope] = list(ranks)
                continue
            group = dist.new_group(list(ranks), timeout=self._timeout)
            host = group
            if self._on_cuda:
                host = dist.new_group(list(ranks), timeout=self._timeout, backend="gloo")
            if self.rank in ranks:
                self._groups[scope], self._hosts[scope], self._ranks[scope] = group, host, list(ranks)

    def ranks(self, scope: Scope) -> tuple[int, ...]:
        return tuple(self._ranks[scope])

    def open(self, pairs: Sequence[Pair], owners: Sequence[tuple[int, ...]], groups: Groups = NO_GROUPS) -> None:
        for sender, receiver in pairs:
            for pipe in self._pipes:
                group = dist.new_group([pipe[sender], pipe[receiver]], timeout=self._timeout)
                if self.rank in (pipe[sender], pipe[receiver]):
                    self._links[sender, receiver] = group
        for owner in owners:
            self._new_scope(owner, [[pipe[rank] for rank in owner] for pipe in self._pipes])
        for scope, ranks in groups.items():
            self._new_scope(scope, ranks)
        self._connect()

    def _connect(self) -> None:
        """Connects every link before the first step, in one order on all ranks, so that none connects mid-step."""
        works = []
        for sender, receiver in sorted(self._links):
            token = torch.zeros(1, dtype=torch.uint8, device=self.device)
            start = self.send if self.pipe_rank == sender else self.receive
            works.append((start((sender, receiver), token), token))
        for work, _ in works:
            work.wait()

    def _link(self, pair: Pair) -> dist.ProcessGroup:
        if pair not in self._links:
            raise RunError(self._closed or f"no queue from pipe rank {pair[0]} to {pair[1]} is open")
        return self._links[pair]

    def send(self, pair: Pair, buffer: Tensor) -> Work:
        return self._start(dist.isend, buffer, self._ranks["pipe"][pair[1]], self._link(pair))

    def receive(self, pair: Pair, buffer: Tensor) -> Work:
        return self._start(dist.irecv, buffer, self._ranks["pipe"][pair[0]], self._link(pair))

    @staticmethod
    def _start(call: Any, buffer: Tensor, peer: int, group: dist.ProcessGroup) -> Work:
        try:
            return _Waiting(call(buffer, peer, group=group), call, peer)
        except RuntimeError as error:
            raise PeerLost(f"{call.__name__} with rank {peer}: {error}") from None

    def gather(self, scope: str, item: Any) -> list[Any]:
        group, count = self._member(self._hosts, scope), len(self._ranks[scope])
        if count == 1:
            return [item]
        # torch's all_gather_object pickles. As data, and filled up to the longest.
        told, names = encode_for_all(item), [f"rank {rank}" for rank in self._ranks[scope]]
        longest = max(map(check_length, self.gather_int(scope, len(told)), names))
        mine = torch.frombuffer(bytearray(told.ljust(longest)), dtype=torch.uint8)
        items = torch.empty(count * longest, dtype=torch.uint8, device="cpu")
        _together(f"an all-gather over {scope}", all_gather_single, items, mine, group=group)
        return [decode(bytes_of(each), name) for each, name in zip(items.chunk(count), names, strict=True)]

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        group = self._member(self._hosts, scope)
        if len(self._ranks[scope]) == 1:
            return (item,)
        items = torch.empty(len(self._ranks[scope]), dtype=torch.int64, device="cpu")
        mine = torch.tensor([item], device="cpu")
        _together(f"an all-gather over {scope}", all_gather_single, items, mine, group=group)
        return tuple(items.tolist())

    def _member(self, groups: Mapping[Scope, dist.ProcessGroup], scope: Scope) -> dist.ProcessGroup:
        if scope not in groups:
            raise RunError(self._closed or f"no group of ranks {scope} is open")
        return groups[scope]

    def all_reduce(self, scope: Scope, tensor: Tensor) -> None:
        group = self._member(self._groups, scope)
        if len(self._ranks[scope]) > 1:
            _together(f"an all-reduce over {scope}", dist.all_reduce, tensor, group=group)

    def broadcast(self, scope: Scope, tensor: Tensor, source: int) -> None:
        root, group = self._ranks[scope][source], self._member(self._groups, scope)
        if len(self._ranks[scope]) > 1:
            _together(f"a broadcast over {scope}", dist.broadcast, tensor, root, group=group)

    def start(self, steps: Sequence[Collective], what: str, ended: Callable[[], object] | None = None) -> Work:
        return self._beside.start(steps, what, ended)

    def _perform(self, step: Collective) -> None:
        """Runs a collective to its end, or puts it on the current stream."""
        ranks = self._ranks[step.scope]
        if len(ranks) == 1:
            step.alone()
            return
        group, root = self._member(self._groups, step.scope), ranks[step.root]
        work: dist.Work
        match step.operation:
            case "all_reduce":
                work = dist.all_reduce(step.output, group=group, async_op=True)
            case "maximum":
                work = dist.all_reduce(step.output, dist.ReduceOp.MAX, group=group, async_op=True)
            case "reduce_scatter" if self._on_cuda:
                work = reduce_scatter_single(step.output, step.input, group=group, async_op=True)
            case "reduce_scatter":  # gloo's own is an all-reduce of a copy, whose wait cannot be left
                work = dist.all_reduce(step.input, group=group, async_op=True)
            case "all_gather":
                work = all_gather_single(step.output, step.input, group=group, async_op=True)
            case "reduce":
                work = dist.reduce(step.output, root, group=group, async_op=True)
            case "broadcast":
                work = dist.broadcast(step.output, root, group=group, async_op=True)
            case other:
                raise ValueError(f"no collective is called {other!r}")
        if self._on_cuda:
            work.wait()
            return
        self._finish(work, group)
        if step.operation == "reduce_scatter" and step.input is not None:
            step.output.copy_(step.input.chunk(len(ranks))[ranks.index(self.rank)])

    def _finish(self, work: dist.Work, group: dist.ProcessGroup) -> None:
        """Waits on a thread of its own, which must not be inside of torch when the process ends."""
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():  # now, or with an error
                    work.wait()
                    return
                if self._closed:
                    _keep_for_good(work, group)
                    raise

    def _look_up(self) -> None:
        """PeerLost where another rank has given up, or lost its connection to a third one."""
        reason = self._told()
        if reason or self._calls_roll():
            raise PeerLost(reason or "a sum over ranks that others have given up")

    def abort(self, reason: str) -> None:
        """Says why in the store, then closes this rank's connections: whoever waits on one gets an error at once."""
        with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
            self._store.compare_set("failed", "", f"rank {self.rank}: {reason}")
        self._give_up()

    def _give_up(self) -> None:
        if not self._closed:
            why = "an earlier step failed and closed the connections; compile again"
            self._beside.fail(RunError(why))
            self._destroy(why)

    def close(self) -> None:
        self._beside.close()
        if not self._closed:
            self._destroy("the connections were closed by close(); compile again")

    def _destroy(self, why: str) -> None:
        self._closed = why
        groups = {*self._links.values(), *self._groups.values(), *self._hosts.values()}
        self._links.clear()
        self._groups.clear()
        self._hosts.clear()
        while groups:
            with contextlib.suppress(ValueError):  # it has ended with torch.distributed itself
                dist.destroy_process_group(groups.pop())

    def explain(self, lost: PeerLost) -> str:
        reason = self._told()
        if not reason:
            self._give_up()  # first, so that all the others get to the roll call, too
            gone = self._missing()
            who = f"rank {', '.join(map(str, gone))}" if gone else "a peer"
            reason = f"{who} is gone; rank {self.rank} was in {lost}"
        return reason

    def _told(self) -> str:
        """What the first rank that failed has said; empty where none did."""
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else ""
        except RuntimeError:  # the process that holds the store is gone, too
            return ""

    def _calls_roll(self) -> bool:
        try:
            return self._store.check([_ROLL_CALL])
        except RuntimeError:
            return True

    def _missing(self) -> list[int]:
        """The ranks that do not answer within some seconds, once everybody's connections close."""
        everyone = {rank: f"here {rank}" for rank in range(dist.get_world_size())}
        try:
            self._store.set(_ROLL_CALL, "")
            self._store.set(everyone[self.rank], "")
            left = datetime.timedelta(seconds=_ANSWER_SECONDS)
            with contextlib.suppress(RuntimeError):  # the time is over
                self._store.wait(list(everyone.values()), left)
            return [rank for rank, key in everyone.items() if not self._store.check([key])]
        except RuntimeError:
            return []


_ROLL_CALL = "who is there"
_SLICE = datetime.timedelta(seconds=0.5)
"""How long a thread waits inside of torch at a time."""

_ANSWER_SECONDS = 5.0
"""How long a rank may take to notice that another is gone, before it counts as gone itself."""


def _keep_for_good(*things: object) -> None:
    """Never destroys these: gloo cannot end an operation that is under way, and its destructor waits for the end."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _together(what: str, call: Any, *args: Any, **kwargs: Any) -> None:
    """A collective call whose failure is a PeerLost."""
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        raise PeerLost(f"{what}: {error}") from None


_open: WeakSet[DistributedTransport] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Lets go of every process group while Python still runs."""
    for transport in list(_open):
        if transport.process == os.getpid():  # and not one that was forked from it
            transport.close()


_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def _next_number() -> int:
    """Counts the transports of this world of processes: all its ranks make them in the same order."""
    world = dist.group.WORLD
    assert world is not None
    _made[world] = _made.get(world, 0) + 1
    return _made[world]
