"""Reported call: each rank's proposal for one call, and what they make together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from fxpipe.errors import RunError
from fxpipe.graph.modes import Ambient
from fxpipe.graph.plain_data import admitted
from fxpipe.graph.question import Answers
from fxpipe.packed import BatchDim
from fxpipe.plan.inputs.batch import Description, merge, sendable, with_own
from fxpipe.plan.inputs.counts import Counts, merge_counts
from fxpipe.plan.inputs.cuts import split_description
from fxpipe.plan.inputs.pattern import Flags, Pattern, pattern_of
from fxpipe.plan.inputs.rows import row_count, split_rows
from fxpipe.plan.planner import Planner


@admitted
@dataclass(frozen=True)
class Proposal:
    """One rank's side of a call: what it was given, described; or what is wrong with it."""

    training: bool
    split_evenly: bool
    flags: Flags
    ambient: Ambient
    given: tuple[Description, ...]
    counts: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = ()
    """Of each, what is cut by a count, as far as this rank can count it."""
    error: str = ""
    answers: tuple[Answers, ...] = ()
    """Of each micro-batch, what forward asks about its inputs, as far as this rank can answer it."""

    def sent(self) -> Proposal:
        """As other ranks may be sent it."""
        return dataclasses.replace(self, given=tuple(map(sendable, self.given)))


class ReportedCall(NamedTuple):
    """All proposals for a call, the micro-batches put together, or the batch, and its rows."""

    proposals: tuple[Proposal, ...]
    merged: list[Description]
    counts: list[Counts]
    sizes: tuple[int, ...]
    has_rows: bool
    """Whether any input gives how many rows there are."""

    @staticmethod
    def of(
        proposals: Sequence[Proposal], mine: Proposal, planner: Planner, named: Callable[[int], str]
    ) -> ReportedCall:
        """``proposals``: of all ranks, this one too; ``mine``: its own, with its objects. ``named``: a rank in words.

        RunError, on all ranks, where they make different calls, or one has reported what is wrong with its own.
        """
        _check_same_call(proposals, named, planner.module)
        batch_dim = planner.options.batch_dim
        reported = list(map(merge, zip(*(proposal.given for proposal in proposals), strict=True)))
        counts = [
            merge_counts(list(map(dict, each)))
            for each in zip(*(proposal.counts for proposal in proposals), strict=True)
        ]
        each = zip(reported, counts, strict=True)
        rows = [row_count(description, batch_dim, counted) for description, counted in each]
        has_rows = any(count is not None for count in rows)
        merged = [with_own(description, own) for description, own in zip(reported, mine.given, strict=True)]
        return ReportedCall(
            tuple(proposals), merged, counts, sizes_of(rows, proposals[0], planner.microbatches), has_rows
        )

    def pattern(self, planner: Planner, everyone: tuple[int, ...]) -> Pattern:
        """What the plan of such a call depends on. ``everyone``: the rows of each micro-batch on all replicas together,
        where stages see them."""
        first, items, merged = self.proposals[0], planner.items, self.merged
        if first.split_evenly:
            merged = split_description(merged[0], planner.options.batch_dim, self.sizes, self.counts[0])
        if items is not None:
            merged = [items.described(description) for description in merged]
        pattern = pattern_of(merged, first.training, planner.options.loss_fn, first.flags, first.ambient)
        return dataclasses.replace(pattern, everyone=everyone, answers=self._answers)

    @property
    def _answers(self) -> tuple[Answers, ...]:
        """Of each micro-batch, what any rank has answered; the first rank's where two have."""
        each = [proposal.answers for proposal in self.proposals if proposal.answers]
        return tuple(tuple(sorted(dict(chain(*reversed(answers))).items())) for answers in zip(*each, strict=True))

    def inputs(self, batch_dim: BatchDim) -> list[tuple[Any, ...]]:
        """For each micro-batch what each rank was given of it."""
        reported = list(dict.fromkeys(proposal.given for proposal in self.proposals))  # most ranks were given the same
        who = tuple(reported.index(proposal.given) for proposal in self.proposals)
        if self.proposals[0].split_evenly:
            parts = [split_description(given[0], batch_dim, self.sizes, self.counts[0]) for given in reported]
            return [(who, *part) for part in zip(*parts, strict=True)]
        return [(who, *(given[place] for given in reported)) for place in range(len(self.sizes))]


def sizes_of(rows: Sequence[int | None], call: Proposal, wanted: int) -> tuple[int, ...]:
    if not call.split_evenly:
        return tuple(1 if count is None else count for count in rows)
    return split_rows(rows[0], wanted if call.training else min(wanted, rows[0] or wanted))


def _check_same_call(proposals: Sequence[Proposal], named: Callable[[int], str], model: nn.Module) -> None:
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        if proposal.error:
            raise RunError(proposal.error if len(proposals) == 1 else f"{named(rank)}: {proposal.error}")
    for rank, proposal in enumerate(proposals):
        alike = proposal.training == first.training and proposal.split_evenly == first.split_evenly
        if proposal.ambient != first.ambient:
            raise RunError(
                f"{named(0)} and {named(rank)} call under different {first.ambient.difference(proposal.ambient)}; set "
                "or enter the same on every rank"
            )
        if not alike or len(proposal.given) != len(first.given):
            raise RunError(
                f"{named(0)} and {named(rank)} make different calls, with {len(first.given)} and {len(proposal.given)} "
                "batches; all ranks of a pipe group make the same ones: none under `if rank == 0`"
            )
        if proposal.flags != first.flags:
            raise RunError(f"{named(0)} and {named(rank)} {_difference(first.flags, proposal.flags, model)}")


def _difference(one: Flags, other: Flags, model: nn.Module) -> str:
    """How the models of two ranks differ, by what is known of their modules and parameters."""
    if (len(one.training), len(one.trainable)) != (len(other.training), len(other.trainable)):
        sizes = [f"{len(each.training)} modules with {len(each.trainable)} parameters" for each in (one, other)]
        return f"have models of their own, of {' and '.join(sizes)}; build the same model on every rank"
    kinds: Any = [("training flag", one.training, other.training, model.named_modules())]
    kinds += [("requires_grad", one.trainable, other.trainable, model.named_parameters())]
    flags = (
        (flag, *pair, name)
        for flag, mine, its, named in kinds
        for *pair, (name, _) in zip(mine, its, named, strict=True)
    )
    flag, mine, its, name = next((each for each in flags if each[1] != each[2]), ("", 0, 0, ""))
    if not flag:
        return (
            "differ in what forward reads of the model's Python, an attribute or a hook; change the model that was "
            "given to compile in the same way on every rank"
        )
    return (
        f"differ in the {flag} of {name or 'the model'!r}, {bool(mine)} and {bool(its)}; set it on every rank, "
        "in the model that was given to compile"
    )
