"""Batch check: whether the ranks of a pipe group were given the same batch, reported one call later.

A batch's digest is made on its device, and fetched in the call after it: no step waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.device import to_host
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.plain_data import digest_of
from fxpipe.parameters.dtensors import local
from fxpipe.progress import warn
from fxpipe.torch_compat import pytree

FIRST, EVERY = 3, 100
"""Checked are the first calls of a plan, those with one of the first kinds of batch, and one in so many of a plan."""
KINDS = 8
"""So many: where lengths are random, each batch is of a kind of its own."""

_USE_SAMPLER = "DataLoader(dataset, batch_size, sampler=topo.sampler(dataset, shuffle=True))"


def is_checked(number: int) -> bool:
    """Whether the call of that number, from 0, is checked."""
    return number < FIRST or number % EVERY == 0


class _InputNumbers(NamedTuple):
    """What one rank was given: input → its number; and those inputs that have rows."""

    numbers: Mapping[str, int]
    with_rows: frozenset[str]


class BatchCheck:
    """Compares digests of what ranks were given, in the call after it, when they have long been made.

    Checked are the first 3 calls of each plan and every 100th of them, in training and in evaluation, and the first 3
    with each of the first 8 kinds of batch. Over a pipe group the inputs that two or more ranks were given must be
    equal; so must, in the first 3 steps and every 100th, those of a tensor group. In these steps one rank warns,
    once, of replicas whose batches are equal, and of ranks of a pipe group that have no input in common. ``sampled``:
    whether ``topo.sampler`` draws the rows, so that they match without having been compared.
    """

    def __init__(self, transport: Transport, on: bool, tensor: bool, sampled: Callable[[], bool]) -> None:
        self._transport, self.on, self._tensor, self._sampled = transport, on, tensor, sampled
        self._of_kind = Counter[int]()  # how many calls there were with each of the first kinds of batch
        self._left: tuple[str, Digest, bool] | None = None  # not compared yet; and whether it is due beyond the group
        self._warned: set[str] = set()

    def note(self, call: int, kind: int, step: int, training: bool, batches: Sequence[Mapping[str, Any]]) -> None:
        """Takes the digest of a call of this kind of batch, if it is due; all ranks of a pipe group find the same.

        ``call``: its number among those of its plan. ``step``: how many steps were made before.
        """
        is_due = is_checked(call)
        if kind in self._of_kind or len(self._of_kind) < KINDS:
            is_due = is_due or self._of_kind[kind] < FIRST
            self._of_kind[kind] += 1
        # Replicas meet in these calls only, by the number of the step: their numbers of calls may differ.
        beyond = training and is_checked(step) and (self._tensor or self._transport.data_size > 1)
        if self.on and (beyond or (is_due and len(self._transport.ranks("pipe")) > 1)):
            self._left = (f"step {step}" if training else f"evaluate before step {step}", Digest(batches), beyond)

    def compare(self) -> None:
        """Compares what the call before has left. A collective call of all ranks.

        Raises:
            RunError: an input differs; all ranks of the pipe group, or tensor group, raise it.
        """
        if self._left is None:
            return
        (what, digest, beyond), self._left = self._left, None
        everyone = self._transport.gather("pipe", _InputNumbers(digest.numbers(), frozenset(digest.with_rows)))
        self._check_equal("pipe", what, [sent.numbers for sent in everyone])
        self._warn_of_nothing_shared(what, everyone)
        # Within the pipe group inputs are equal by now, so that any rank's number of an input is the group's.
        if beyond:  # the pipe group, on all ranks in the same step
            numbers = {name: number for sent in everyone for name, number in sent.numbers.items()}
            if self._tensor:
                self._check_equal("tensor", what, self._transport.gather("tensor", numbers))
            self._warn_of_equal_replicas(what, numbers)

    def _check_equal(self, scope: str, what: str, everyone: Sequence[Mapping[str, int]]) -> None:
        """RunError where an input that two or more ranks were given has several numbers."""
        ranks, differing = self._transport.ranks(scope), list[str]()
        for name in dict.fromkeys(name for numbers in everyone for name in numbers):
            places = _grouped({place: numbers[name] for place, numbers in enumerate(everyone) if name in numbers})
            if len(places) > 1:
                parted = " and ".join(str([ranks[place] for place in same]) for same in places)
                differing.append(f"{name!r} of ranks {parted}")
        if differing:
            raise RunError(
                f"{what}: the ranks {list(ranks)} of a {scope} group were given different batches, and must be given "
                f"the same; what differs is {'; '.join(differing)}. Draw the same rows on all of them with "
                f"{_USE_SAMPLER}, or with DistributedSampler(dataset, num_replicas=topo.data_size, "
                "rank=topo.data_rank), whose defaults count every rank as a replica. Where the rows are the same but "
                "random augmentation differs, give these ranks one seed, such as by torch.manual_seed(topo.data_rank) "
                "in front of the loop, or pass None for an input where it is not in forward_backward.required_inputs. "
                "compile(check_batches=False) leaves this check out"
            )

    def _warn_of_nothing_shared(self, what: str, everyone: Sequence[_InputNumbers]) -> None:
        """Once, from one rank of all. Ranks are joined by inputs in common, directly or through others."""
        groups: list[tuple[list[int], frozenset[str]]] = []
        for rank, sent in zip(self._transport.ranks("pipe"), everyone, strict=True):
            ranks, names = [rank], sent.with_rows
            # Connected components: ranks are joined where they share an input.
            for group in [group for group in groups if group[1] & sent.with_rows]:
                groups.remove(group)
                ranks, names = [*group[0], *ranks], group[1] | names
            if names:
                groups.append((sorted(ranks), names))
        if self._transport.rank == 0 and len(groups) > 1 and not self._sampled():
            text = "; ".join(f"{ranks}: {', '.join(sorted(names))}" for ranks, names in groups)
            self._warn(
                "nothing shared",
                f"{what}: nobody can compare whether these ranks were given rows that belong together, for they have "
                f"no input in common ({text}). Draw the rows of all of them with {_USE_SAMPLER}, or give all of them "
                "the whole batch",
            )

    def _warn_of_equal_replicas(self, what: str, numbers: Mapping[str, int]) -> None:
        """Once, from one rank of all; the first rank of each pipe group speaks for it."""
        if self._transport.data_size == 1 or self._transport.pipe_rank != 0:
            return
        everyone = self._transport.gather_int("data", digest_of([repr(sorted(numbers.items()))]))
        equal = [replicas for replicas in _grouped(dict(enumerate(everyone))) if len(replicas) > 1]
        if equal and numbers and self._transport.rank == 0:
            self._warn(
                "equal replicas",
                f"{what}: the replicas {'; '.join(map(str, equal))} of {len(everyone)} were given the same batch, from "
                f"which they learn nothing more than one would. Draw rows of their own with {_USE_SAMPLER}",
            )

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn(f"{text}. compile(check_batches=False) leaves this check out", UserWarning)


def _grouped(numbers: Mapping[int, int]) -> list[list[int]]:
    """The places of each number."""
    places: dict[int, list[int]] = {}
    for place, number in numbers.items():
        places.setdefault(number, []).append(place)
    return list(places.values())


# --- Digests: for each input of a call a number, equal where all its values are equal to the bit ---

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_A_TIME = 2**18
"""How many elements are worked on at a time, which bounds the memory that a digest takes beside the batch."""
_FACTOR = 6364136223846793005
"""Of Knuth's generator of random numbers modulo 2⁶⁴ (The Art of Computer Programming 2, 3.3.4)."""
_PLAIN = (bool, int, float, complex, str, bytes)
"""Python values that ``repr`` distinguishes."""


class Digest:
    """The numbers of a call's inputs, on their way to the host: making one waits for no device.

    A tensor's number is Σ bits_i · w_i modulo 2⁶⁴ over its elements in row-major order, whatever its strides, with a
    fixed w_i for each place. It is the same to the bit on every device and in any order of summing, and another where
    rows are permuted. ``batches``: inputs by name, of the whole batch or of each micro-batch; None has no
    number.
    """

    def __init__(self, batches: Sequence[Mapping[str, Any]]) -> None:
        self._parts: dict[str, list[str | tuple[torch.device, int]]] = {}
        self.with_rows: set[str] = set()
        """The inputs that hold tensors with dimensions, and so may differ from row to row."""
        tensors: dict[torch.device, list[Tensor]] = {}
        for name, value in (item for batch in batches for item in batch.items() if item[1] is not None):
            parts = self._parts.setdefault(name, [])
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.dim():
                    self.with_rows.add(name)
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    tensor = local(leaf.detach())
                    beside = tensors.setdefault(tensor.device, [])
                    parts.append((tensor.device, len(beside)))
                    beside.append(tensor)
                else:  # of other objects than dense tensors and plain values, the type alone
                    parts.append(repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__)
        self._devices, sums = list(tensors), [_sums_of(held, device) for device, held in tensors.items()]
        self._arriving = to_host(sums)

    def numbers(self) -> dict[str, int]:
        """Input → a number of 56 bits. Waits until the sums are there."""
        sums = {device: each.tolist() for device, each in zip(self._devices, self._arriving(), strict=True)}
        return {
            name: digest_of([repr([part if isinstance(part, str) else sums[part[0]][part[1]] for part in parts])])
            for name, parts in self._parts.items()
        }


@torch.no_grad()
def _sums_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Each tensor's sum: a vector of int64, whose arithmetic wraps."""
    pieces = [list(_pieces(tensor)) for tensor in tensors]
    weights = _weights(max(len(part) for parts in pieces for part in parts), device)
    sums = []
    for parts in pieces:
        total = torch.zeros((), dtype=torch.int64, device=device)
        for part in parts:
            # the factor tells place 1 of piece 2 from place 2 of piece 1
            total = total * _FACTOR + (part * weights[: len(part)]).sum(dtype=torch.int64)
        sums.append(total)
    return torch.stack(sums)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's bits as integers, in row-major order, some at a time. Where it is cut depends on its shape alone."""
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    # Whole rows first: a tensor with strides is then copied piece by piece, never as a whole.
    rows = max(1, _AT_A_TIME * len(tensor) // max(tensor.numel(), 1))
    for part in torch.split(tensor, rows):
        part = part.resolve_conj().resolve_neg()
        part = torch.view_as_real(part) if part.is_complex() else part
        yield from torch.split(part.contiguous().view(-1).view(_BITS[part.element_size()]), _AT_A_TIME)


def _weights(count: int, device: torch.device) -> Tensor:
    """An odd number for each place: SplitMix64 (Steele, Lea and Flood 2014), seeded with 0."""
    # Its factors are above 2⁶³, and int64 holds them less 2⁶⁴.
    z = torch.arange(1, count + 1, dtype=torch.int64, device=device) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, by: int) -> Tensor:
    """A right shift that brings zeros, where int64's brings the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)
