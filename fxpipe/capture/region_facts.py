"""Region facts: what captures know of opaque regions, and the real runs of the model that show their effects.

Takes a request with opaque regions. Gives the calls of these regions: what each returns, reads, writes and sets.

1. At compile the model runs once in the mode of the request (``observed_in_run``).
2. For training it also runs once in evaluation, since a rank later holds only its part of the model.
3. After compile the calls are guessed, from the most similar micro-batch and this micro-batch's sizes.

It does not check the guess: each step compares what a region returns with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpipe.batch.description import Description
from fxpipe.errors import TraceError
from fxpipe.graph.boundary import ignored
from fxpipe.graph.program import Program
from fxpipe.progress import progress
from fxpipe.stage.modes import evaluating
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.trace import Request
from fxpipe.trace.checks.sizes import entries_between, sizes_between, unlike
from fxpipe.trace.opaque.observed import SeenCalls, check_called, declared, observe
from fxpipe.trace.opaque.regions import Region
from fxpipe.trace.replay import Batch

OBSERVED = 16
"""The most micro-batches for which the results of opaque regions are remembered."""

Observed = tuple[bool, Description, SeenCalls]
"""(in training, micro-batch, calls): the observed calls of opaque regions in a run of the model."""


@dataclass(frozen=True)
class RegionFacts:
    """The opaque regions, which a step calls as Python code, and their effects in earlier runs."""

    whole: tuple[Region, ...] = ()
    by_itself: Mapping[str, str] = field(default_factory=dict)
    """Each opaque region that no tracer could capture → its fraction of a step's FLOPs and the reason, in words."""
    observed: tuple[Observed, ...] = ()
    unpacked: frozenset[str] = frozenset()
    """The regions whose results forward unpacks."""

    def with_capture(
        self, program: Program, request: Request, added: Mapping[str, str], observed: list[Observed]
    ) -> RegionFacts:
        """The facts, with the facts of one more capture.

        Args:
            program: the captured program.
            request: its request, with its opaque regions.
            added: the regions that no tracer could capture, as ``by_itself``.
            observed: the effects of its regions in real runs.
        """
        dropped = (region for region in self.whole if not region.varies and region not in request.whole)
        by_itself = {**self.by_itself, **added}
        # A region that only other regions call belongs to those regions.
        inside = by_itself.keys() - {name for name, _ in request.seen} if added else set()
        calls = (call for part in program.opaque.values() for call in opaque_calls(part))
        unpacked = {call.name for call in calls if any(listing.unpacked for listing in call.opened)}
        return RegionFacts(
            tuple(region for region in (*request.whole, *dropped) if region.name not in inside),
            {name: words for name, words in by_itself.items() if name not in inside},
            (*self.observed, *observed)[-2 * OBSERVED :],
            self.unpacked | unpacked,
        )

    def guessed(self, names: set[str], shape: Description, training: bool) -> SeenCalls:
        """The calls of these regions, guessed from the observed micro-batch that is most like this micro-batch."""

        # 3. The best observation called these regions, in this mode, and each of its sizes maps to one of this shape.
        def unlikeness(observed: Observed) -> tuple[int, bool, tuple[int, int]]:
            trained, then, calls = observed
            return len(names - {name for name, _ in calls}), trained != training, unlike(then, shape)

        if not self.observed:
            return {}
        _, then, calls = min(self.observed, key=unlikeness)
        sizes, entries = sizes_between(then, shape), entries_between(then, shape)
        lengths = sizes_between(then, shape, or_same=True)
        # A result that forward unpacks, as in (a, b) = region(x), always has the same number of entries.
        return {
            key: seen.guessed(sizes, {} if key[0] in self.unpacked else lengths, entries) for key, seen in calls.items()
        }


def observed_in_run(request: Request, batch: Batch, shape: Description, ignores_boundaries: bool) -> list[Observed]:
    """Runs the model on a micro-batch of this shape, and returns the effects of its opaque regions: first in the mode
    of the request; for training, also in an evaluation.

    TraceError if the model cannot run, or if it never calls a region.
    """
    training, called = request.training, set[str]()
    with progress("running an opaque region"), ignored(ignores_boundaries):
        # 1. The mode of the request.
        runs: list[Observed] = [(training, shape, {**declared(request), **observe(request, batch, called)})]
        evaluates = not training
        if training:
            # 2. Evaluation is also observed now, because later this rank holds only its own part of the model. A model
            # may fail to evaluate a batch for training.
            with evaluating(request.module), contextlib.suppress(TraceError):
                runs.append((False, shape, {**declared(request), **observe(request, batch, called)}))
                evaluates = True
        if evaluates and not request.may_lack_cuts:
            check_called(request, called)
    return runs
