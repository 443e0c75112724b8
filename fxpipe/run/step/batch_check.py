"""Batch check: checks that the ranks of a pipe group got the same batch, and reports a difference in the next call.

The device computes a batch's digest, and the next call fetches it: no step waits for a digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.device import to_host
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.numerics.fingerprint import BITS, split_mix
from fxpipe.plain_data import digest_of
from fxpipe.progress import warn
from fxpipe.tensors.dtensors import local
from fxpipe.torch_compat import pytree

FIRST, EVERY = 3, 100
"""Checked are the first ``FIRST`` calls of a plan and of each kind of batch, and every ``EVERY``-th call of a plan."""
KINDS = 8
"""The number of kinds of batch whose first calls are checked: with random lengths each batch is a kind of its own."""

_USE_SAMPLER = "DataLoader(dataset, batch_size, sampler=topo.sampler(dataset, shuffle=True))"


def is_checked(number: int) -> bool:
    return number < FIRST or number % EVERY == 0


class _InputNumbers(NamedTuple):
    """A rank's inputs: input name → digest number; and the names of the inputs that have rows."""

    numbers: Mapping[str, int]
    with_rows: frozenset[str]


class BatchCheck:
    """Compares digests of the ranks' inputs in the next call, when the device has long computed the digests.

    Checked are the first 3 calls of each plan and every 100th of them, in training and in evaluation, and the first 3
    with each of the first 8 kinds of batch. Inputs that two or more ranks of a pipe group have must be equal. In
    the first 3 steps and every 100th, the same holds for the inputs of a tensor group, and for the tensors that
    ``topo.context_part`` cuts in a context group. In these steps a single rank warns, once, of replicas whose batches
    are equal, and of ranks of a pipe group that have no input in common, unless ``topo.sampler`` draws their rows.
    """

    def __init__(self, transport: Transport, topology: Topology, on: bool) -> None:
        self._transport, self._topology, self.on = transport, topology, on
        is_process = transport.pipe_rank is not None
        self._tensor = is_process and topology.size("tensor") > 1
        self._context = is_process and topology.size("context") > 1
        topology.cut.clear()  # of an example
        self._of_kind = Counter[int]()  # how many calls there were with each of the first kinds of batch
        # What to compare: the call, its inputs, what context_part cut, and whether beyond the pipe group, too.
        self._left: tuple[str, Digest, Digest, bool] | None = None
        self._warned: set[str] = set()

    def note(self, call: int, kind: int, step: int, training: bool, batches: Sequence[Mapping[str, Any]]) -> None:
        """Starts the digest of a call with this kind of batch, if a check is due; all ranks of a pipe group agree.

        ``call``: the number of the call among the calls of its plan. ``step``: the number of steps before this call.
        """
        is_due = is_checked(call)
        if kind in self._of_kind or len(self._of_kind) < KINDS:
            is_due = is_due or self._of_kind[kind] < FIRST
            self._of_kind[kind] += 1
        # Replicas compare by the number of the step, since their numbers of calls may differ.
        beyond = training and is_checked(step) and (self._tensor or self._transport.data_size > 1)
        if self.on and (beyond or (is_due and len(self._transport.ranks("pipe")) > 1)):
            called = f"step {step}" if training else f"evaluate before step {step}"
            cut = self._topology.cut if self._context else ()
            whole = [{f"tensor {number} of context_part": each} for number, each in enumerate(cut)]
            self._left = called, Digest(batches), Digest(whole), beyond
        self._topology.cut.clear()

    def compare(self) -> None:
        """Compares the digest of the previous call. A collective call of all ranks.

        Raises:
            RunError: an input differs; all ranks of the pipe group, or tensor group, raise it.
        """
        if self._left is None:
            return
        (what, digest, whole, beyond), self._left = self._left, None
        everyone = self._transport.gather("pipe", _InputNumbers(digest.numbers(), frozenset(digest.with_rows)))
        self._check_equal("pipe", what, [sent.numbers for sent in everyone])
        self._warn_of_nothing_shared(what, everyone)
        # Within the pipe group inputs are equal here, so that any rank's number of an input holds for the group.
        if beyond:  # also compare beyond the pipe group, on all ranks in the same step
            numbers = {name: number for sent in everyone for name, number in sent.numbers.items()}
            if self._tensor:
                self._check_equal("tensor", what, self._transport.gather("tensor", numbers))
            if self._context:
                self._check_equal("context", what, self._transport.gather("context", whole.numbers()))
            self._warn_of_equal_replicas(what, numbers)

    def _check_equal(self, scope: str, what: str, everyone: Sequence[Mapping[str, int]]) -> None:
        """RunError if an input that two or more ranks have differs between them."""
        ranks, differing = self._transport.ranks(scope), list[str]()
        for name in dict.fromkeys(name for numbers in everyone for name in numbers):
            places = _grouped({index: numbers[name] for index, numbers in enumerate(everyone) if name in numbers})
            if len(places) > 1:
                parted = " and ".join(str([ranks[index] for index in same]) for same in places)
                differing.append(f"{name!r} of ranks {parted}")
        if differing:
            raise RunError(
                f"{what}: the ranks {list(ranks)} of a {scope} group were given different batches, and must be given "
                f"the same; what differs is {'; '.join(differing)}. Draw the same rows on all of them with "
                f"{_USE_SAMPLER}, or with DistributedSampler(dataset, num_replicas=topo.data_size, "
                "rank=topo.data_rank), whose defaults count every rank as a replica. Where the rows are the same but "
                "random augmentation differs, give these ranks one seed, such as by torch.manual_seed(topo.data_rank) "
                "in front of the loop, or pass None for an input where it is not in forward_backward.required_inputs"
            )

    def _warn_of_nothing_shared(self, what: str, everyone: Sequence[_InputNumbers]) -> None:
        """Rank 0 warns, once, if inputs in common do not connect all ranks, directly or through other ranks."""
        groups: list[tuple[list[int], frozenset[str]]] = []
        for rank, sent in zip(self._transport.ranks("pipe"), everyone, strict=True):
            ranks, names = [rank], sent.with_rows
            # Connected components: ranks are joined where they share an input.
            for group in [group for group in groups if group[1] & sent.with_rows]:
                groups.remove(group)
                ranks, names = [*group[0], *ranks], group[1] | names
            if names:
                groups.append((sorted(ranks), names))
        if self._transport.rank == 0 and len(groups) > 1 and not self._topology.has_sampler:
            text = "; ".join(f"{ranks}: {', '.join(sorted(names))}" for ranks, names in groups)
            self._warn(
                "nothing shared",
                f"{what}: nobody can compare whether these ranks were given rows that belong together, for they have "
                f"no input in common ({text}). Draw the rows of all of them with {_USE_SAMPLER}, or give all of them "
                "the whole batch; checks=fxpipe.Checks(batches=False) leaves this check out",
            )

    def _warn_of_equal_replicas(self, what: str, numbers: Mapping[str, int]) -> None:
        """Rank 0 warns, once, of replicas with equal batches; the first rank of each pipe group compares."""
        if self._transport.data_size == 1 or self._transport.pipe_rank != 0:
            return
        everyone = self._transport.gather_int("data", digest_of([repr(sorted(numbers.items()))]))
        equal = [replicas for replicas in _grouped(dict(enumerate(everyone))) if len(replicas) > 1]
        if equal and numbers and self._transport.rank == 0:
            self._warn(
                "equal replicas",
                f"{what}: the replicas {'; '.join(map(str, equal))} of {len(everyone)} were given the same batch, from "
                f"which they learn nothing more than one would. Draw rows of their own with {_USE_SAMPLER}"
                + ", and give context ranks topo.context_part(tensor)"
                * self._context,
            )

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn(text, UserWarning)


def _grouped(numbers: Mapping[int, int]) -> list[list[int]]:
    """For each distinct number, the list of places that have it."""
    places: dict[int, list[int]] = {}
    for index, number in numbers.items():
        places.setdefault(number, []).append(index)
    return list(places.values())


# --- Digests: a number for each input of a call; inputs whose values are equal to the bit have equal numbers ---

_AT_A_TIME = 2**18
"""The number of elements that a digest reads at a time, with one weight for each place."""
_FACTOR = 6364136223846793005
"""The factor of Knuth's random number generator modulo 2⁶⁴ (The Art of Computer Programming 2, 3.3.4)."""
_PLAIN = (bool, int, float, complex, str, bytes)
"""Python values that ``repr`` distinguishes."""


class Digest:
    """The digest numbers of a call's inputs, under way to the host: the constructor waits for no device.

    A tensor's number is Σ bits_i · w_i modulo 2⁶⁴ over its elements in row-major order, whatever its strides, with a
    fixed w_i for each place. The number is the same on every device and in any order of summing, and changes if rows
    are permuted. ``batches``: inputs by name, of the whole batch or of each micro-batch; an input that is None has no
    number.
    """

    def __init__(self, batches: Sequence[Mapping[str, Any]]) -> None:
        self._parts: dict[str, list[str | int]] = {}
        self.with_rows: set[str] = set()
        """The names of the inputs that hold tensors with dimensions, and so may differ from row to row."""
        tensors = list[Tensor]()
        for name, value in (item for batch in batches for item in batch.items() if item[1] is not None):
            parts = self._parts.setdefault(name, [])
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.dim():
                    self.with_rows.add(name)
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    parts.append(len(tensors))
                    tensors.append(local(leaf.detach()))
                else:  # objects other than dense tensors and plain values count by their type alone
                    parts.append(repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__)
        self._arriving = to_host(list(map(_sum_of, tensors)))

    def numbers(self) -> dict[str, int]:
        """Returns input name → a number of 56 bits. Waits until the sums have arrived on the host."""
        sums = [each.item() for each in self._arriving()]
        return {
            name: digest_of([repr([part if isinstance(part, str) else sums[part] for part in parts])])
            for name, parts in self._parts.items()
        }


@torch.no_grad()
def _sum_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's weighted sum, an int64, on its device."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(BITS[flat.element_size()])
    weights = split_mix(torch.arange(min(len(bits), _AT_A_TIME), device=bits.device)) | 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _AT_A_TIME):
        # the factor distinguishes place 1 of piece 2 from place 2 of piece 1
        total = total * _FACTOR + (part * weights[: len(part)]).sum(dtype=torch.int64)
    return total
