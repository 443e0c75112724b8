"""Captures: from a pattern of inputs to the stages of a model, traced, cut and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpipe import passes as default_passes
from fxpipe.errors import RunError, TraceError
from fxpipe.graph.boundary import ignored
from fxpipe.graph.modes import Autocast
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.passes.chain import Pass, chain
from fxpipe.plan.batch import Description, untold
from fxpipe.plan.capture_check import Sample, check
from fxpipe.progress import progress, tell
from fxpipe.schedules import Family
from fxpipe.trace import NEED_SHAPES, Cut, Request, capture

if TYPE_CHECKING:
    from fxpipe.plan.balance import Balanced


@dataclass(frozen=True)
class Flags:
    """The state of a model that a capture depends on: each module's training flag, each parameter's requires_grad."""

    training: bytes
    trainable: bytes


@dataclass(frozen=True)
class Pattern:
    """What a capture depends on: which inputs there are, the values fixed in it, the flags of the model."""

    inputs: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...]
    microbatches: int
    with_loss: bool
    flags: Flags
    training: bool = True
    """Whether it is for a step; else for a forward-only run, where the user's own table need not fit."""
    shapes: tuple[Description, ...] = ()
    """Each micro-batch, described, for tracers that need it; () where no batch has been seen yet."""
    autocast: tuple[Autocast, ...] = ()
    """What is on around the call."""

    def for_any_shape(self) -> Pattern:
        """The pattern without what only tracers that need shapes depend on."""
        return dataclasses.replace(self, shapes=(), autocast=())


@dataclass(frozen=True)
class Captured:
    """The stages of one capture, and its program in words. ``tracer``: the name of the one that made it."""

    graph: StageGraph
    text: str
    tracer: str = ""
    placement: tuple[int, ...] | None = None
    """The rank of each stage, where it was searched for."""

    @property
    def of_one_shape(self) -> bool:
        """Whether the stages hold for micro-batches of no other shape."""
        return self.tracer in NEED_SHAPES


@dataclass(frozen=True)
class Search:
    """How the cut (``cuts``) or the placement of stages is searched for; see ``fxpipe.plan.balance``."""

    ranks: int
    schedule: str | Family
    memory_per_rank: float | None
    cuts: bool


@dataclass
class Captures:
    """Captures a model as it is asked to, each pattern once."""

    model: nn.Module
    tracer: str = "auto"
    loss_fn: Callable[..., Any] | None = None
    passes: Sequence[Pass] | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Boundaries named from outside: submodule path → where it is cut."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (it is immutable)
    """Where a model that is on no device yet will run."""
    compute: torch.dtype | None = None
    """The type in which floating-point parameters and inputs will be, where ``precision`` changes it."""
    search: Search | None = None
    """None: stages are cut where they are marked, and placed by who asks."""
    sample: Sample | str = "nothing is run"
    """The micro-batches on which stages are checked against the model; or why they are not."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Tracers whose capture was found wrong, and what of it: they are not tried again."""

    def __post_init__(self) -> None:
        self._kept: dict[Pattern, Captured] = {}
        self._first: Program | None = None
        if self.search is not None and self.search.cuts and self.passes is not None:
            raise RunError('boundaries="auto" cuts in place of the pass partition; leave passes= out')

    def of(self, pattern: Pattern) -> list[Captured]:
        """The stages for each micro-batch of a pattern; one object where nothing depends on their shapes."""
        shapes = pattern.shapes or (None,) * pattern.microbatches
        found = [self._of_one(pattern, shape) for shape in shapes]
        if any(captured.tracer in self.wrong for captured in found):  # only a later shape has shown it
            self.forget()
            return self.of(pattern)
        return found

    def _of_one(self, pattern: Pattern, shape: Description | None) -> Captured:
        this = dataclasses.replace(pattern, microbatches=1, shapes=() if shape is None else (shape,))
        known = self._kept.get(this) or self._kept.get(this.for_any_shape())
        if known is not None:
            return known
        accepted: list[Captured] = []
        program = self._traced(pattern, shape, accepted)
        (made,) = accepted
        of_one_shape = made.of_one_shape
        for name, leaf in untold(shape) if of_one_shape and shape is not None else ():
            raise TraceError(
                f"input {name!r} holds {leaf!r:.60}, which is no tensor, and what {program.tracer} captures would hold "
                'for this one alone; pass a tensor, or, for a plain value, compile with tracer="export" or "record"'
            )
        self._kept[this if of_one_shape else this.for_any_shape()] = made
        return made

    def _traced(self, pattern: Pattern, shape: Description | None, accepted: list[Captured]) -> Program:
        """The program of the first tracer whose stages are right, which are put into ``accepted``."""

        def accept(program: Program) -> None:
            if program.tracer in self.wrong:
                raise TraceError(self.wrong[program.tracer])
            cut, made = self._cut(program, pattern, shape)
            accepted.append(self._checked(made, request, pattern, shape))
            self._first = self._first or cut

        request = Request(
            self.model,
            pattern.inputs,
            dict(pattern.fixed),
            self.loss_fn if pattern.with_loss else None,
            example=None if shape is None else _example(pattern, shape),
            cuts=self.cuts,
            may_lack_cuts=self._first is not None,  # which has called them all
            training=pattern.training,
            autocast=pattern.autocast,
            device=self.device,
            compute=self.compute,
            accept=accept,
        )
        finds_cuts = self.search is not None and self.search.cuts
        with progress(f"capturing {type(self.model).__name__}"), ignored(finds_cuts):
            return capture(request, self.tracer)

    def _checked(self, made: Captured, request: Request, pattern: Pattern, shape: Description | None) -> Captured:
        """The stages, once they have been run against the model, with a word about it."""
        if isinstance(self.sample, str):
            told = f"not checked: {self.sample}"
        else:
            places = [i for i, other in enumerate(pattern.shapes) if not made.of_one_shape or other == shape]
            try:
                with progress("checking the stages against the model"):
                    told = check(made.graph, request, self.sample, places)
            except TraceError as error:
                self.wrong[made.tracer] = str(error)
                raise
        head, *rest = made.graph.origin.splitlines()
        graph = dataclasses.replace(made.graph, origin="\n".join([f"{head}, {told}", *rest]))
        return dataclasses.replace(made, graph=graph)

    def forget(self) -> None:
        """Captures all anew; but not with tracers that are known to be wrong."""
        self._kept.clear()
        self._first = None

    def _cut(self, program: Program, pattern: Pattern, shape: Description | None) -> tuple[Program, Captured]:
        """The program with its stages, and they themselves."""
        search, first, placement = self.search, self._first, None
        if search is not None and search.cuts:
            program = chain(default_passes.before_balance(), program)
            if first is None:
                found = self._searched(program, pattern, shape, search)
                program, placement = found.program, found.placement
            else:
                program = default_passes.follow(program, first)
            program = chain((default_passes.name_stages,), program)
        else:
            program = chain(default_passes.default() if self.passes is None else self.passes, program)
            more = search is not None and len(program.stage_names) > search.ranks > 1
            if search is not None and more and first is None and shape is not None:
                placement = self._placed(program, pattern, shape, search)
        return program, Captured(default_passes.split(program), _told(self.model, program), program.tracer, placement)

    def _placed(self, program: Program, pattern: Pattern, shape: Description, search: Search) -> tuple[int, ...] | None:
        """The best placement found; None where what the stages cost is not known, so that parameters count."""
        from fxpipe.plan.balance import CostUnknown

        try:
            return self._searched(program, pattern, shape, search).placement
        except CostUnknown as error:
            if search.memory_per_rank is not None:
                raise
            tell(f"stages are placed by the number of their parameters: {error}")
            return None

    def _searched(self, program: Program, pattern: Pattern, shape: Description | None, search: Search) -> Balanced:
        """The best cut or placement found, which is told."""
        from fxpipe.plan.balance import balance, costs_from_shapes, place_stages  # it simulates a lot, which few need

        if shape is None:
            raise RunError(
                'boundaries="auto" needs the shapes of a batch: pass example_args= or example_kwargs=, one batch as it '
                "will be passed in calls"
            )
        with progress("balancing the stages"):
            example = _example(pattern, shape)
            costs = costs_from_shapes(program, example, self.device, pattern.autocast, compute=self.compute)
            search_for = balance if search.cuts else place_stages
            found = search_for(
                program, search.ranks, pattern.microbatches, costs, search.schedule, search.memory_per_rank
            )
        if found.others:
            tell(str(found))
        return found

    def let_go(self) -> None:
        """Makes the stages hold what the model now holds, and nothing that it has let go of."""
        self._kept = {
            key: dataclasses.replace(captured, graph=captured.graph.with_tensors_of_module())
            for key, captured in self._kept.items()
        }


def _example(pattern: Pattern, shape: Description) -> dict[str, Any]:
    return {name: given.like for name, given in shape if name in pattern.inputs}


def _told(model: nn.Module, program: Program) -> str:
    constants = [f"{name}: {_fingerprint(tensor)}" for name, tensor in program.constants.items()]
    return "\n".join([type(model).__name__, str(program), *constants])


def _fingerprint(tensor: Tensor) -> str:
    """A hash of a constant: ranks that have made it with different seeds must not go on."""
    if tensor.is_meta:
        return "on the meta device"
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), buffer)
    return f"constant {list(tensor.shape)} {hashlib.blake2b(buffer.getbuffer(), digest_size=8).hexdigest()}"
