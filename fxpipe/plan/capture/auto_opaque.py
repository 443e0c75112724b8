"""Auto-opaque: what no tracer captures is kept opaque, one part after another, until the rest is captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.program import Program
from fxpipe.options import Options
from fxpipe.trace import Request, Uncaptured, capture
from fxpipe.trace.cuts.cuts_by_name import regions
from fxpipe.trace.opaque.regions import WHOLE

if TYPE_CHECKING:
    from fxpipe.plan.balance import NodeCosts

MOST_PARTS = 8
"""So many parts are tried, one after another."""
MOST_OF_COST = 0.5
"""The most of a step's FLOPs that they may have together."""


def capture_in_part(
    request: Request,
    options: Options,
    observe: Callable[[Request], Request] | None,
    shares: Callable[[], Mapping[str, float]],
) -> tuple[Program, Request, dict[str, str]]:
    """The program, the request with all that is opaque in it, and (region → why, in a line) of those that were added.

    ``observe``: gives a request what calls of its regions do; None where the model cannot run on a batch to show it.
    ``shares``: the part of a step's FLOPs that each region has in the program accepted last. TraceError as the first
    attempt raised it, with what was tried since.
    """
    tracer = options.tracer if options.parallelize is None else "record"  # which leaves modules whole
    given = request
    first: Uncaptured | None = None
    parts = 0
    added: dict[str, str] = {}
    while True:
        try:
            request = observe(request) if added and observe is not None else request
            program = capture(request, tracer)
            if added:
                _check_shares(shares(), added)
            return program, request, added
        except TraceError as error:
            against = _against(error, options, parts) if options.auto_opaque and observe else str(error)
            if not against and isinstance(error, Uncaptured):
                first = first or error
                before, request = request.whole, _with_regions(request, error.part)
                added |= {region.name: error.in_a_line for region in request.whole if region not in before}
                added = {region.name: added[region.name] for region in request.whole if region.name in added}
                parts += 1
                continue
            first = first or (error if isinstance(error, Uncaptured) else None)
            if first is None or request.asks_numbers or not options.auto_opaque:
                raise TraceError(str(first or error)) from error
            if against != str(first):
                tried = f"with {', '.join(added)} kept opaque by itself: " if added else ""
                first = Uncaptured(f"{first}\n{tried}{against}", first.part)
            request, added = dataclasses.replace(given, asks_numbers=True), {}  # the last that is left
        except PartitionError as error:
            if added:
                error.add_note(f"{', '.join(added)} is opaque by itself: no tracer could capture it")
            raise


def _against(error: TraceError, options: Options, parts: int) -> str:
    """Why no other part is kept opaque in answer to an error, beside so many; "" where one is."""
    if not isinstance(error, Uncaptured) or not error.part:
        return str(error)
    if parts == MOST_PARTS:
        return f"{error.part} would be one more than {MOST_PARTS}: {error.in_a_line}"
    placed = next((name for name in options.placement or () if name.startswith(f"{error.part}.")), None)
    return f"{error.part} holds {placed}, which placement= names: {error.in_a_line}" if placed is not None else ""


def _with_regions(request: Request, part: str) -> Request:
    """With the regions that a rule for ``part`` names, in place of those inside of them."""
    new = regions(request.module, {part: WHOLE})
    inside = tuple(f"{region.path}." for region in new if region.method == "__call__")
    others = (region for region in request.whole if not f"{region.name}.".startswith(inside))
    return dataclasses.replace(request, whole=(*others, *new))


def _check_shares(shares: Mapping[str, float], added: Mapping[str, str]) -> None:
    total = sum(shares.get(name, 0.0) for name in added)
    if total > MOST_OF_COST:
        raise TraceError(
            f"they take {total:.0%} of a step's FLOPs, and no more than {MOST_OF_COST:.0%} may be opaque so"
        )


def shares_of(program: Program, costs: NodeCosts) -> dict[str, float]:
    """Region → the part of a step's FLOPs that its calls have, forward and backward. Seconds would say less: of what
    cannot run without numbers the number of kernels is not known."""
    total = sum(cost.flops + cost.backward_flops for cost in costs.nodes.values()) or 1.0
    shares: dict[str, float] = {}
    for node in program.graph.nodes:
        cost = costs[node.name]
        for name in {call.name for call in opaque_calls(program.opaque.get(str(node.target)))}:
            shares[name] = shares.get(name, 0.0) + (cost.flops + cost.backward_flops) / total
    return shares
