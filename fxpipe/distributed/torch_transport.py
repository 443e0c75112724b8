"""The transport over torch.distributed, with a process for each rank."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial
from importlib import metadata
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.device import bytes_of
from fxpipe.distributed.activity import Waiting, agree, are_apart, entered, here, words
from fxpipe.distributed.collective import (
    SLICE_SECONDS,
    Collective,
    OnceAwaited,
    PeerLost,
    Scope,
    Streams,
    Threads,
    Work,
    wait_in_slices,
)
from fxpipe.distributed.grid import BATCH
from fxpipe.distributed.heartbeat import Ending
from fxpipe.distributed.topology import Topology, served_device
from fxpipe.distributed.transport import NO_GROUPS, Groups, Pair
from fxpipe.distributed.watchdog import EXTENSION, Watchdog, ends_later, say, watchdog
from fxpipe.errors import RunError
from fxpipe.plain_data import check_length, decode, encode_for_all
from fxpipe.torch_compat.groups import default_store, group_of_members

T = TypeVar("T")
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


def facts_of(topology: Topology, options: Mapping[str, str]) -> dict[str, str]:
    """Returns this rank's versions, topology and options: names and values that must be the same on all ranks."""
    try:
        version = metadata.version("fxpipe")
    except metadata.PackageNotFoundError:  # fxpipe is not installed, but run from its source
        version = "unknown"
    axes = ", ".join(f"{name} {size}" for name, size in topology.axes)
    return {
        "the version of Python": platform.python_version(),
        "the version of torch": torch.__version__,
        "the version of fxpipe": version,
        "the topology": f"({axes}), ranks_per_node={topology.ranks_per_node}",
        **options,
    }


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Starts a call of torch that may never return, for example if a peer is gone. Its thread is then abandoned, and
    ends with the process."""
    later: Future[T] = Future()

    def run() -> None:
        try:
            later.set_result(call())
        except BaseException as error:  # the future raises it
            later.set_exception(error)

    threading.Thread(target=run, name="fxpipe connecting", daemon=True).start()
    return later


class _PairLink(NamedTuple):
    """A directed pair of this rank and ``peer``. ``group_rank``: the peer's rank in the group."""

    group: dist.ProcessGroup
    peer: int
    group_rank: int


class DistributedTransport:
    """Uses gloo between CPUs and NCCL between GPUs; always gloo for values that the host needs.

    Each directed pair of ranks has its own process group. On a group, messages complete in the order in which they
    were started, whatever their tags; if two directions, or activations and gradients, shared a group, they could
    deadlock.
    """

    def __init__(self, topology: Topology, timeout: float = 300.0, options: Mapping[str, str] = NO_OPTIONS) -> None:
        self.rank, self.process, self.timeout = dist.get_rank(), os.getpid(), timeout
        self.device = served_device()
        self._on_host = self.device.type == "cpu"
        # On a CPU the watchdog ends waits, and may extend their timeout; on a GPU only NCCL can end them.
        self._longest = datetime.timedelta(seconds=timeout * (EXTENSION + 2))
        self._timeout = self._longest if self._on_host else datetime.timedelta(seconds=timeout)
        self.for_good: tuple[datetime.timedelta, ...] = (self._longest,) if self._on_host else ()
        self.watchdog: Watchdog = watchdog()
        world = dist.group.WORLD
        assert world is not None
        self.number = _made[world] = _made.get(world, 0) + 1
        self._explained = False
        self._closed = ""  # why the transport is closed; empty while it is open
        self._store = dist.distributed_c10d.PrefixStore(f"fxpipe/{self.number}", default_store())
        self._pipes = topology.groups("pipe")
        coordinate = {"pipe": self._pipes, "data": topology.groups(BATCH)}
        self._axes = [*coordinate, *["tensor"] * (topology.size("tensor") > 1)]
        self._ranks: dict[Scope, list[int]] = {"all": list(range(dist.get_world_size()))}
        for scope, groups in coordinate.items():
            self._ranks[scope] = next(group for group in groups if self.rank in group)
        self.pipe_rank: int | None = self._ranks["pipe"].index(self.rank)
        self.data_rank = self._ranks["data"].index(self.rank)
        self.data_size = len(self._ranks["data"])
        self._links: dict[Pair, _PairLink] = {}
        self._groups: dict[Scope, dist.ProcessGroup] = {}
        self._hosts: dict[Scope, dist.ProcessGroup] = {}
        # (scope, the bytes this rank sends) → the bytes that all ranks of the scope sent the last time. If ranks
        # remember different values, they do not agree, and gather.
        self._predicted: dict[tuple[Scope, bytes], tuple[bytes, ...]] = {}
        self._beside = Threads(self._perform, self._waiting)  # collectives of CPU tensors
        self._on_device = self._beside if self._on_host else Streams(self._perform)
        _open.add(self)
        try:
            self._meet(topology, options)
            self._apart(lambda: self._new_scopes(coordinate.items()))
        except PeerLost as lost:
            raise RunError(self.explain(lost)) from None
        except RunError:  # the ranks differ; all ranks raise this
            self.watchdog.unwatch(self.number)
            raise

    def _meet(self, topology: Topology, options: Mapping[str, str]) -> None:
        """Waits until all ranks have arrived; RunError on all ranks if their facts differ."""
        self.watchdog.watch(self.number, topology)
        # Compare through the store before connecting: ranks of different topologies would open different connections.
        # Rank 0 compares the facts, and writes the difference to the store for the other ranks.
        keys = [f"facts/{rank}" for rank in self._ranks["all"]]
        self._store.set(keys[self.rank], json.dumps(facts_of(topology, options)))
        if self.rank == 0:
            self._await_keys(keys)
            everyone = dict(enumerate(map(json.loads, self._store.multi_get(keys))))
            self._store.set("difference", self.watchdog.difference(everyone))
        self._await_keys(["difference"])
        differing = self._store.get("difference").decode()
        if differing:
            raise RunError(f"the ranks do not run the same: {differing}; give all ranks the same")

    def _await_keys(self, keys: list[str]) -> None:
        """Waits until ``keys`` are in the store. The store's own wait would write to stderr at each timeout."""
        with self._waiting(lambda: ("all ranks to come to fxpipe.compile", "all")) as look_up:
            pause = 0.01
            while not self._store.check(keys):
                threading.Event().wait(pause)
                look_up()
                pause = min(2 * pause, SLICE_SECONDS)

    def _apart(self, connect: Callable[[], object]) -> None:
        """Runs ``connect``, which torch cannot interrupt, in a thread, while this thread waits in slices."""
        device = self.device

        def run() -> None:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device)
            connect()

        connected = in_thread(run)
        with self._waiting(lambda: ("all ranks to open their connections", "all")) as look_up:
            while not wait([connected], SLICE_SECONDS).done:
                look_up()
        if isinstance(error := connected.exception(), RuntimeError):
            raise PeerLost("all ranks to open their connections", reason=error)
        connected.result()  # raises any other error

    @contextlib.contextmanager
    def _waiting(self, what: Callable[[], tuple[str, Scope]]) -> Iterator[Callable[[], None]]:
        """Registers a wait in slices with the watchdog; yields the function to call after each slice."""

        def event() -> tuple[str, Sequence[int]]:
            words, scope = what()
            return words, [rank for rank in self.ranks(scope) if rank != self.rank]

        def look_up() -> None:
            if self._closed or self.watchdog.verdict(self.number) is not None:
                raise PeerLost(*event())

        here.waiting = Waiting(self.number, self.timeout, time.monotonic(), event, lambda: None)
        try:
            yield look_up
        finally:
            here.waiting = None

    def _new_scopes(self, groups: Iterable[tuple[Scope, Sequence[Sequence[int]]]]) -> None:
        """Makes a device and a host group for each list that this rank is in; the order is the same on all ranks."""
        for scope, ranks in ((scope, list(ranks)) for scope, some in groups for ranks in some if self.rank in ranks):
            self._ranks[scope] = ranks
            if len(ranks) == 1 and scope not in ("pipe", "data"):  # a group of a single rank communicates nothing
                continue
            name = f"fxpipe {self.number}: {scope} of {ranks[0]}"
            group = host = group_of_members(ranks, name, timeout=self._timeout)
            if not self._on_host:
                host = group_of_members(ranks, f"{name}, on hosts", timeout=self._longest, backend="gloo")
            self._groups[scope], self._hosts[scope] = group, host

    def ranks(self, scope: Scope) -> tuple[int, ...]:
        return tuple(self._ranks[scope])

    def open(self, pairs: Sequence[Pair], owners: Sequence[tuple[int, ...]], groups: Groups = NO_GROUPS) -> None:
        of_owners = {owner: [[pipe[rank] for rank in owner] for pipe in self._pipes] for owner in owners}
        self._apart(lambda: self._new_scopes([*of_owners.items(), *groups.items()]))
        self.open_more(pairs)

    def open_more(self, pairs: Sequence[Pair]) -> None:
        self._check_open()
        mine = [pair for pair in sorted(pairs) if self.pipe_rank in pair]  # same order on all ranks: no deadlock
        self._apart(lambda: self._new_links(mine))
        # Send a byte over each link now: torch connects lazily, and a step must not wait for connections.
        sent = torch.zeros(len(mine), 1, dtype=torch.uint8, device=self.device)
        starts = (self.send if self.pipe_rank == pair[0] else self.receive for pair in mine)
        for work in [start(pair, byte) for start, pair, byte in zip(starts, mine, sent, strict=True)]:
            work.wait()

    def _new_links(self, pairs: Sequence[Pair]) -> None:
        """Makes a group for each pair in a call of its two ranks alone: other replicas may not need the pair."""
        for pair in pairs:
            ranks = [self._ranks["pipe"][end] for end in pair]
            name = f"fxpipe {self.number}: {ranks[0]} to {ranks[1]}"
            group = group_of_members(ranks, name, timeout=self._timeout)
            peer = ranks[self.rank == ranks[0]]
            self._links[pair] = _PairLink(group, peer, dist.get_group_rank(group, peer))

    def _link(self, pair: Pair) -> _PairLink:
        self._check_open()
        return self._links[pair]

    def _check_open(self) -> None:
        if self._closed or not self.watchdog.is_on():
            raise RunError(self._closed or "torch.distributed was ended by destroy_process_group(); compile again")

    def send(self, pair: Pair, buffer: Tensor) -> Work:
        return self._start(buffer, self._link(pair), sends=True)

    def receive(self, pair: Pair, buffer: Tensor) -> Work:
        return self._start(buffer, self._link(pair), sends=False)

    def _start(self, buffer: Tensor, link: _PairLink, sends: bool) -> Work:
        """Starts a send or receive, as ``dist.isend`` and ``irecv`` do after their checks."""
        call = link.group.send if sends else link.group.recv
        try:
            return _Transfer(self, call([buffer], link.group_rank, 0), link.peer, sends)
        except RuntimeError as error:
            raise PeerLost(f"a message with {self.watchdog.named(link.peer)}", (link.peer,), error) from None

    def gather(self, scope: str, item: Any) -> list[Any]:
        if scope == "all":
            values = self._over_axes(item)
            return [values[index] for index in self._order]
        self._member(self._hosts, scope)
        if len(self._ranks[scope]) == 1:
            return [item]
        # Encode as plain data: torch's all_gather_object would pickle.
        everyone = zip(self._gathered(scope, encode_for_all(item)), self._ranks[scope], strict=True)
        return [decode(sent, f"rank {rank}") for sent, rank in everyone]

    def _over_axes(self, item: Any) -> list[Any]:
        """Returns all ranks' items, gathered over one axis after the other, so that no group connects all ranks."""
        values = [item]
        for scope in self._axes:
            values = [each for some in self.gather(scope, values) for each in some]
        return values

    @cached_property
    def _order(self) -> list[int]:
        """Each rank's index in the results of ``_over_axes``. All ranks ask for them in the same call of ``gather``."""
        ranks = self._over_axes(self.rank)
        return sorted(range(len(ranks)), key=ranks.__getitem__)

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        if scope == "all":
            return tuple(self.gather(scope, item))
        self._member(self._hosts, scope)
        if len(self._ranks[scope]) == 1:
            return (item,)
        everyone = self._gathered(scope, item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True))
        return tuple(int.from_bytes(sent, "little", signed=True) for sent in everyone)

    def _gathered(self, scope: str, sent: bytes) -> tuple[bytes, ...]:
        """Returns each rank's bytes. Ranks in different calls make the same collectives until all see a difference."""
        ranks = self._ranks[scope]
        expected = self._predicted.get((scope, sent)) or (sent,) * len(ranks)
        greatest = torch.tensor(words(entered.mark, expected), device="cpu")
        group = self._hosts[scope]
        self._together("an all-gather", scope, group, dist.all_reduce, greatest, dist.ReduceOp.MAX)
        if agree(greatest.tolist()):
            return expected
        # All ranks know that they disagree: a head of fixed length shows each rank's call and the length of its
        # message, so that the rest can have the same length on all ranks, as an all-gather requires.
        numbers = _NUMBERS.pack(entered.mark, len(sent))
        heads = self._gathered_bytes(scope, numbers + sent[:_IN_HEAD], _HEAD)
        marks, lengths = zip(*map(_NUMBERS.unpack_from, heads), strict=True)
        if len(set(marks)) > 1 and are_apart(marks):
            self._differ(scope)
        longest = max(map(check_length, lengths, [f"rank {rank}" for rank in ranks]))
        texts = [head[_NUMBERS.size :] for head in heads]
        if longest > _IN_HEAD:
            rests = self._gathered_bytes(scope, sent[_IN_HEAD:], longest - _IN_HEAD)
            texts = [text + rest for text, rest in zip(texts, rests, strict=True)]
        values = tuple(text[:length] for text, length in zip(texts, lengths, strict=True))
        if longest <= _IN_HEAD:
            if len(self._predicted) * len(ranks) >= PREDICTED:
                self._predicted.clear()
            self._predicted[scope, sent] = values
        return values

    def _gathered_bytes(self, scope: str, sent: bytes, size: int) -> list[bytes]:
        """All-gathers ``size`` bytes of each rank: the bytes it sends, padded with spaces."""
        count, group = len(self._ranks[scope]), self._hosts[scope]
        mine = torch.frombuffer(bytearray(sent.ljust(size)), dtype=torch.uint8)
        items = torch.empty(count * size, dtype=torch.uint8, device="cpu")
        self._together("an all-gather", scope, group, dist.all_gather_single, items, mine)
        return [bytes_of(each) for each in items.chunk(count)]

    def _differ(self, scope: str) -> None:
        """Raises an error that names each rank's call; all ranks of the group know that their calls differ."""
        sent = encode_for_all((entered.name, dict(entered.alike.facts())))
        if len(sent) > _LONGEST:
            sent = encode_for_all((entered.name, {}))
        everyone = zip(self._ranks[scope], self._gathered_bytes(scope, sent, _LONGEST), strict=True)
        names, facts = {}, {}
        for rank, each in everyone:
            names[rank], facts[rank] = decode(each, f"rank {rank}")
        text = f"in {entered.name}: {self.watchdog.difference(facts)}; give all ranks the same"
        if len(set(names.values())) > 1:
            text = self.watchdog.describe_calls(names)
        self.watchdog.record_verdict(self.number, Ending(text))
        raise PeerLost(f"an all-gather over {scope}")

    def _member(self, groups: Mapping[Scope, dist.ProcessGroup], scope: Scope) -> dist.ProcessGroup:
        self._check_open()
        return groups[scope]

    def all_reduce(self, scope: Scope, tensor: Tensor) -> None:
        group = self._member(self._groups, scope)
        if len(self._ranks[scope]) > 1:
            self._together("an all-reduce", scope, group, dist.all_reduce, tensor)

    def broadcast(self, scope: Scope, tensor: Tensor, source: int) -> None:
        root, group = self._ranks[scope][source], self._member(self._groups, scope)
        if len(self._ranks[scope]) > 1:
            self._together("a broadcast", scope, group, dist.broadcast, tensor, root)

    def tell(self, scope: Scope, tensor: Tensor, source: int) -> Work:
        # Send a message to each receiver: a broadcast would block the source until all receivers have come.
        group, ranks = self._member(self._groups, scope), self._ranks[scope]
        if tensor.device.type != "cpu" or len(ranks) > _FEW:  # an early NCCL receive would block the device
            return OnceAwaited(partial(self.broadcast, scope, tensor, source))
        others = [rank for rank in ranks if rank != self.rank] if ranks[source] == self.rank else [ranks[source]]
        links = [_PairLink(group, peer, dist.get_group_rank(group, peer)) for peer in others]
        works = [self._start(tensor, link, sends=ranks[source] == self.rank) for link in links]
        return OnceAwaited(lambda: [work.wait() for work in works])

    def _together(self, what: str, scope: Scope, group: dist.ProcessGroup, call: Any, *args: Any) -> None:
        """Makes a collective call that blocks this rank; raises a failure as PeerLost."""
        words = f"{what} over {scope}{here.when()}"
        with self._waiting(lambda: (words, scope)) as look_up:
            try:
                work = call(*args, group=group, async_op=True)
                if args[0].device.type == "cpu":
                    wait_in_slices(work, group, look_up)
                else:
                    work.wait()
            except PeerLost:
                raise
            except RuntimeError as error:
                raise PeerLost(words, [rank for rank in self.ranks(scope) if rank != self.rank], error) from None

    def start(self, steps: Sequence[Collective], what: str) -> Work:
        beside = self._beside if steps[0].output.device.type == "cpu" else self._on_device
        return beside.start(steps, what)

    def _perform(self, step: Collective) -> None:
        """Runs a CPU collective to its end; enqueues a GPU collective on the current stream."""
        ranks = self._ranks[step.scope]
        if len(ranks) == 1:
            step.alone()
            return
        step = step.in_bytes()
        on_host = step.output.device.type == "cpu"
        group, root = self._member(self._hosts if on_host else self._groups, step.scope), ranks[step.root]
        calls = {
            "all_reduce": partial(dist.all_reduce, step.output),
            "maximum": partial(dist.all_reduce, step.output, dist.ReduceOp.MAX),
            # On the CPU by all_reduce: gloo's own reduce-scatter copies, and its wait cannot be interrupted.
            "reduce_scatter": partial(dist.reduce_scatter_single, step.output, step.input)
            if not on_host
            else partial(dist.all_reduce, step.input),
            "all_gather": partial(dist.all_gather_single, step.output, step.input),
            "reduce": partial(dist.reduce, step.output, root),
            "broadcast": partial(dist.broadcast, step.output, root),
        }
        work: Any = calls[step.operation](group=group, async_op=True)
        if not on_host:
            work.wait()
            return

        def look_up() -> None:  # called on a worker thread, which must not be inside torch when the process ends
            if self._closed:
                raise RuntimeError(self._closed)

        wait_in_slices(work, group, look_up)
        if step.operation == "reduce_scatter" and step.input is not None:
            step.output.copy_(step.input.chunk(len(ranks))[ranks.index(self.rank)])

    def abort(self, reason: str) -> None:
        """Reports the reason to all ranks, then closes this rank's connections, so that waiting peers fail at once."""
        text = f"{self.watchdog.named(self.rank)}: {reason}"
        self._end(Ending(text, (self.rank,), error=True), text)
        if not self._closed:
            why = "an earlier step failed and closed the connections; compile again"
            for beside in {self._beside, self._on_device}:
                beside.fail(RunError(why))
            self._destroy(why, aborts=not self._on_host)

    def close(self) -> None:
        for beside in {self._beside, self._on_device}:
            beside.close()
        if not self._closed:
            self._destroy("the connections were closed by close(); compile again")

    def _destroy(self, why: str, aborts: bool = False) -> None:
        self._closed = why
        self.watchdog.unwatch(self.number)
        groups = self.process_groups()
        self._links.clear()
        self._groups.clear()
        self._hosts.clear()
        while groups:
            group = groups.pop()
            if aborts:  # otherwise NCCL waits for the group's pending collectives, forever if a rank has failed
                group.abort()
            with contextlib.suppress(ValueError):  # destroy_process_group() has ended the group already
                dist.destroy_process_group(group)

    def process_groups(self) -> set[dist.ProcessGroup]:
        return {*(link.group for link in self._links.values()), *self._groups.values(), *self._hosts.values()}

    def explain(self, lost: PeerLost) -> str:
        with ends_later():
            ending = self.watchdog.why(self.number, lost.ranks, lost.reason)
            message = self.watchdog.message(ending, str(lost))
            self._end(ending, message)
        return message

    def _end(self, ending: Ending, message: str) -> None:
        """Prints why the waits of this transport end, and reports the ending to all ranks; only once."""
        # If several waits break at once, only the first is explained: the others break for the same reason.
        if not self._explained:
            self._explained = True
            say(message)
            self.watchdog.end(self.number, ending)


class _Transfer:
    """A send or receive under way. ``wait`` drops torch's work, which keeps a connection open."""

    __slots__ = ("_home", "_peer", "_sends", "_work")

    def __init__(self, home: DistributedTransport, work: dist.Work | None, peer: int, sends: bool) -> None:
        self._home, self._work, self._peer, self._sends = home, work, peer, sends

    def wait(self) -> None:
        if self._work is None:
            return
        here.waiting = Waiting(self._home.number, self._home.timeout, time.monotonic(), self._what, self._end)
        try:
            self._work.wait(*self._home.for_good)
        except RuntimeError as error:
            raise PeerLost(*self._what(), error) from None
        finally:
            here.waiting = self._work = None

    def _what(self) -> tuple[str, Sequence[int]]:
        name, awaited = self._home.watchdog.named(self._peer), here.awaited
        if self._sends:
            return f"{name} to take a message", (self._peer,)
        return f"{awaited() if awaited is not None else 'a message'} from {name}", (self._peer,)

    def _end(self) -> None:
        """Ends the wait: gloo breaks the connection if any thread's wait times out before the message arrives."""
        work = self._work
        if work is not None and self._home.for_good:
            with contextlib.suppress(RuntimeError):
                work.wait(_AT_ONCE)


_AT_ONCE = datetime.timedelta(milliseconds=1)
_FEW = 32
"""The largest group in which ``tell`` sends a separate message to each rank."""
_HEAD, _NUMBERS = 512, struct.Struct("<Qq")
"""Bytes of the head that all ranks of a group send first if a gather is not predicted: the call's mark, the message's
length and its beginning. A message may have any length."""
_IN_HEAD = _HEAD - _NUMBERS.size
_LONGEST = 2**16
"""The most bytes of a rank's report about the call it is in."""
PREDICTED = 1 << 15
"""The most values that a rank remembers, of all ranks together: mostly a few bytes each."""


_open: WeakSet[DistributedTransport] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all transports, and so their process groups, while Python still runs."""
    for transport in list(_open):
        if transport.process == os.getpid():  # skip transports of the process that this process was forked from
            transport.close()


_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""World → the number of transports made in it: all its ranks make transports in the same order."""
