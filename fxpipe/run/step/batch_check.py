"""Batch check: whether the ranks of a pipe group were given the same batch, reported one call later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.plan.plan import Plan
from fxpipe.progress import warn
from fxpipe.run.step.batch_digest import Digest, together

FIRST, EVERY = 3, 100
"""Checked are the first calls of a plan, those with one of the first kinds of batch, and one in so many of a plan."""
KINDS = 8
"""So many: where lengths are random, each batch is of a kind of its own."""

_USE_SAMPLER = "DataLoader(dataset, batch_size, sampler=topo.sampler(dataset, shuffle=True))"


def is_checked(number: int) -> bool:
    """Whether the call of that number, from 0, is checked."""
    return number < FIRST or number % EVERY == 0


class _Counts:
    """How many calls of each plan there were, and with each of the first kinds of batch."""

    def __init__(self) -> None:
        self._of_kind: dict[int, int] = {}
        self._of_plan: dict[int, tuple[Plan, int]] = {}
        """By its ``id``, which no other has as long as it is kept here."""

    def is_due(self, plan: Plan, kind: int) -> bool:
        """Whether the next call is checked; all ranks of a pipe group find the same."""
        _, count = self._of_plan.get(id(plan), (plan, 0))
        self._of_plan[id(plan)] = plan, count + 1
        due = is_checked(count)
        if kind in self._of_kind or len(self._of_kind) < KINDS:
            of_kind = self._of_kind.get(kind, 0)
            self._of_kind[kind] = of_kind + 1
            due = due or of_kind < FIRST
        return due

    def keep(self, plans: Sequence[Plan]) -> None:
        """Only these are known any more."""
        known = set(map(id, plans))
        self._of_plan = {key: counted for key, counted in self._of_plan.items() if key in known}


class _InputNumbers(NamedTuple):
    """What one rank was given: input → its number; and those inputs that have rows."""

    numbers: Mapping[str, int]
    with_rows: frozenset[str]


class BatchCheck:
    """Compares digests of what ranks were given, in the call after it, when they have long been made.

    Checked are the first 3 calls of each plan and every 100th of them, in training and in evaluation, and the first 3
    with each of the first 8 kinds of batch. Over a pipe group the inputs that two or more ranks were given must be
    equal; so must, in the first 3 steps and every 100th, those of a tensor group. In these steps replicas whose batches
    are equal are warned of, once, and so, once, are ranks of a pipe group that have no input in common. ``sampled``:
    whether ``topo.sampler`` draws the rows, so that they match without having been compared.
    """

    def __init__(self, transport: Transport, on: bool, tensor: bool, sampled: Callable[[], bool]) -> None:
        self._transport, self.on, self._tensor, self._sampled = transport, on, tensor, sampled
        self.counts = _Counts()
        self._left: tuple[str, Digest, bool] | None = None  # not compared yet; and whether it is due beyond the group
        self._beyond: tuple[str, dict[str, int]] | None = None  # what the pipe group has, to be compared beyond it
        self._warned: set[str] = set()

    def note(self, plan: Plan, kind: int, step: int, training: bool, batches: Sequence[Mapping[str, Any]]) -> None:
        """Takes the digest of a call of this kind of batch, if it is due. ``step``: how many steps were made before."""
        due = self.counts.is_due(plan, kind)
        beyond = training and is_checked(step) and (self._tensor or self._transport.data_size > 1)
        if self.on and (beyond or (due and len(self._transport.ranks("pipe")) > 1)):
            self._left = (f"step {step}" if training else f"evaluate before step {step}", Digest(batches), beyond)

    def compare(self, everywhere: bool) -> None:
        """Compares what an earlier call has left. A collective call of a pipe group; ``everywhere``: of all ranks.

        Raises:
            RunError: an input differs; on all ranks of the pipe group, or tensor group, alike.
        """
        if self._left is not None:
            (what, digest, beyond), self._left = self._left, None
            everyone = self._transport.gather("pipe", _InputNumbers(digest.numbers(), frozenset(digest.with_rows)))
            self._check_equal("pipe", what, everyone)
            self._warn_of_nothing_shared(what, everyone)
            if beyond:
                self._beyond = what, {name: number for sent in everyone for name, number in sent.numbers.items()}
        if everywhere and self._beyond is not None:  # all ranks have it from the same step
            (what, numbers), self._beyond = self._beyond, None
            if self._tensor:
                self._check_equal(
                    "tensor", what, self._transport.gather("tensor", _InputNumbers(numbers, frozenset(numbers)))
                )
            self._warn_of_equal_replicas(what, numbers)

    def _check_equal(self, scope: str, what: str, everyone: Sequence[_InputNumbers]) -> None:
        ranks = self._transport.ranks(scope)
        shared = _shared(everyone)
        differing = {name: numbers for name, numbers in shared.items() if len(set(numbers.values())) > 1}
        if not differing:
            return
        text = "; ".join(f"{name!r} of {_parted(numbers, ranks)}" for name, numbers in differing.items())
        raise RunError(
            f"{what}: the ranks {list(ranks)} of a {scope} group were given different batches, and must be given the "
            f"same; what differs is {text}. Draw the same rows on all of them with {_USE_SAMPLER}, or with "
            "DistributedSampler(dataset, num_replicas=topo.data_size, rank=topo.data_rank), whose defaults count every "
            "rank as a replica. Where the rows are the same but random augmentation differs, give these ranks one "
            "seed, such as by torch.manual_seed(topo.data_rank) in front of the loop, or pass None for an input where "
            "it is not in forward_backward.required_inputs. compile(check_batches=False) leaves this check out"
        )

    def _warn_of_nothing_shared(self, what: str, everyone: Sequence[_InputNumbers]) -> None:
        """Once, from one rank of all."""
        groups = _connected([sent.with_rows for sent in everyone])
        if self._transport.rank == 0 and len(groups) > 1 and not self._sampled():
            ranks = self._transport.ranks("pipe")
            text = "; ".join(
                f"{[ranks[place] for place in places]}: {', '.join(sorted(names))}" for places, names in groups
            )
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
        everyone = self._transport.gather_int("data", together(numbers))
        places: dict[int, list[int]] = {}
        for replica, number in enumerate(everyone):
            places.setdefault(number, []).append(replica)
        equal = [replicas for replicas in places.values() if len(replicas) > 1]
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


def _shared(everyone: Sequence[_InputNumbers]) -> dict[str, dict[int, int]]:
    """Input → place in the group → number, of those that two or more were given."""
    names = dict.fromkeys(name for sent in everyone for name in sent.numbers)
    given = {name: {p: sent.numbers[name] for p, sent in enumerate(everyone) if name in sent.numbers} for name in names}
    return {name: numbers for name, numbers in given.items() if len(numbers) > 1}


def _parted(numbers: Mapping[int, int], ranks: Sequence[int]) -> str:
    """The ranks that were given each value: "ranks [0, 1] and [2]"."""
    same: dict[int, list[int]] = {}
    for place, number in numbers.items():
        same.setdefault(number, []).append(ranks[place])
    return f"ranks {' and '.join(map(str, same.values()))}"


def _connected(names: Sequence[frozenset[str]]) -> list[tuple[list[int], frozenset[str]]]:
    """Which places are joined by names in common, directly or through others; those without names are left out."""
    groups: list[tuple[list[int], frozenset[str]]] = []
    for place, mine in enumerate(names):
        joined = [group for group in groups if group[1] & mine]
        groups = [group for group in groups if not group[1] & mine]
        if mine:
            places = sorted([place, *(p for group in joined for p in group[0])])
            groups.append((places, mine.union(*(group[1] for group in joined))))
    return groups
