"""Told: what a pipe group was told of one call: each rank's offer, and what all of them make together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from fxpipe.errors import RunError
from fxpipe.graph.modes import Ambient
from fxpipe.graph.plain_data import admitted
from fxpipe.packed import BatchDim
from fxpipe.plan.batch import Description, merge, sendable, with_own
from fxpipe.plan.counts import Counts, merge_counts
from fxpipe.plan.cuts import split_description
from fxpipe.plan.pattern import Flags, Pattern, pattern_of
from fxpipe.plan.planner import Planner
from fxpipe.plan.rows import row_count, split_rows


@admitted
@dataclass(frozen=True)
class Offer:
    """One rank's side of a call: what it was given, described; or what is wrong with it."""

    training: bool
    split_evenly: bool
    flags: Flags
    ambient: Ambient
    given: tuple[Description, ...]
    counts: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = ()
    """Of each, what is cut by a count, as far as this rank can count it."""
    error: str = ""

    def sent(self) -> Offer:
        """As other ranks may be told it."""
        return dataclasses.replace(self, given=tuple(map(sendable, self.given)))


class ToldCall(NamedTuple):
    """What a pipe group was told of a call: all offers, the micro-batches put together, or the batch, and its rows."""

    offers: tuple[Offer, ...]
    merged: list[Description]
    counts: list[Counts]
    sizes: tuple[int, ...]
    has_rows: bool
    """Whether any input tells how many rows there are."""

    @staticmethod
    def of(offers: Sequence[Offer], mine: Offer, planner: Planner, named: Callable[[int], str]) -> ToldCall:
        """``offers``: what all ranks told, this one too; ``mine``: what it had to tell. ``named``: a rank in words.

        RunError, alike on all ranks, where they make different calls, or one has told what is wrong with its own.
        """
        _check_same_call(offers, named, planner.module)
        batch_dim = planner.options.batch_dim
        told = list(map(merge, zip(*(offer.given for offer in offers), strict=True)))
        counts = [merge_counts(list(map(dict, each))) for each in zip(*(offer.counts for offer in offers), strict=True)]
        each = zip(told, counts, strict=True)
        rows = [row_count(description, batch_dim, counted) for description, counted in each]
        has_rows = any(count is not None for count in rows)
        merged = [with_own(description, own) for description, own in zip(told, mine.given, strict=True)]
        return ToldCall(tuple(offers), merged, counts, _sizes(rows, offers[0], planner.microbatches), has_rows)

    def pattern(self, planner: Planner, everyone: tuple[int, ...]) -> Pattern:
        """What the plan of such a call depends on. ``everyone``: the rows of each micro-batch on all replicas together,
        where stages see them."""
        first, items, merged = self.offers[0], planner.items, self.merged
        if first.split_evenly:
            merged = split_description(merged[0], planner.options.batch_dim, self.sizes, self.counts[0])
        if items is not None:
            merged = [items.described(description) for description in merged]
        pattern = pattern_of(merged, first.training, planner.options.loss_fn, first.flags, first.ambient)
        return dataclasses.replace(pattern, everyone=everyone)

    def inputs(self, batch_dim: BatchDim) -> list[tuple[Any, ...]]:
        """For each micro-batch what each rank was given of it."""
        told = list(dict.fromkeys(offer.given for offer in self.offers))  # most ranks were given the same
        who = tuple(told.index(offer.given) for offer in self.offers)
        if self.offers[0].split_evenly:
            parts = [split_description(given[0], batch_dim, self.sizes, self.counts[0]) for given in told]
            return [(who, *part) for part in zip(*parts, strict=True)]
        return [(who, *(given[place] for given in told)) for place in range(len(self.sizes))]


def _sizes(rows: Sequence[int | None], call: Offer, wanted: int) -> tuple[int, ...]:
    if not call.split_evenly:
        return tuple(1 if count is None else count for count in rows)
    return split_rows(rows[0], wanted if call.training else min(wanted, rows[0] or wanted))


def _check_same_call(offers: Sequence[Offer], named: Callable[[int], str], model: nn.Module) -> None:
    first = offers[0]
    for rank, offer in enumerate(offers):
        if offer.error:
            raise RunError(offer.error if len(offers) == 1 else f"{named(rank)}: {offer.error}")
    for rank, offer in enumerate(offers):
        alike = offer.training == first.training and offer.split_evenly == first.split_evenly
        if offer.ambient != first.ambient:
            raise RunError(
                f"{named(0)} and {named(rank)} call under different {first.ambient.difference(offer.ambient)}; set or "
                "enter the same on every rank"
            )
        if not alike or len(offer.given) != len(first.given):
            raise RunError(
                f"{named(0)} and {named(rank)} make different calls, with {len(first.given)} and {len(offer.given)} "
                "batches; all ranks of a pipe group make the same ones: none under `if rank == 0`"
            )
        if offer.flags != first.flags:
            raise RunError(f"{named(0)} and {named(rank)} {_difference(first.flags, offer.flags, model)}")


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
            "given to compile alike on every rank"
        )
    return (
        f"differ in the {flag} of {name or 'the model'!r}, {bool(mine)} and {bool(its)}; set it on every rank alike, "
        "in the model that was given to compile"
    )
