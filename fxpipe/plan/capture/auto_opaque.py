"""Auto-opaque: what no tracer captures is kept opaque, one part after another, until the rest is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import all_tensors, first_names
from fxpipe.options import Options
from fxpipe.passes.alias_groups import held
from fxpipe.torch_compat import is_compiled, pytree
from fxpipe.trace import Request, Uncaptured, accepted
from fxpipe.trace.cuts.cuts_by_name import resolve
from fxpipe.trace.opaque.regions import WHOLE

MOST_PARTS = 8
"""So many parts are tried, one after another."""
MOST_OF_COST = 0.5
"""The most of a step's FLOPs that they may have together."""


Accepted = TypeVar("Accepted")


def capture_in_part(
    request: Request,
    options: Options,
    examine: Callable[[Request, Program], Accepted],
    shares: Callable[[Accepted], Mapping[str, float]],
    observe: Callable[[Request], Request] | None,
    tries_any_words: bool = False,
    tries_compiled: bool = True,
) -> tuple[Accepted, Request, dict[str, str]]:
    """The examined program, the request with all that is opaque in it, and those regions that were added, with words
    for each.

    ``examine``: TraceError for a program that is not the model's. ``shares``: the part of a step's FLOPs that each
    region has in an examined program. ``observe``: gives a request what calls of its regions do; None where the model
    cannot run on a batch to show it. ``tries_any_words``: first for a program that holds for any strings in the inputs;
    ``tries_compiled``: first with compiled submodules opaque. TraceError as the first attempt raised it, with what was
    tried since.
    """
    tracer = options.tracer if options.parallelize is None else "record"  # which leaves modules whole
    again = partial(capture_in_part, options=options, examine=examine, shares=shares, observe=observe)
    # Strings that change with every batch, such as captions, would each take a capture, unless opaque code reads them.
    if tries_any_words and _words_in(request):
        with contextlib.suppress(TraceError, PartitionError):
            return again(replace(request, any_words=True))
    # A submodule that the user has compiled runs as it is compiled: one call, or else as plain code, in any capture.
    compiled = _with_compiled(request, options) if observe is not None else request
    if tries_compiled and not all(region.varies for region in compiled.whole):
        with contextlib.suppress(TraceError, PartitionError):
            seen = request if compiled is request or observe is None else observe(compiled)
            return again(seen, tries_compiled=False)
        request = replace(request, whole=tuple(region for region in request.whole if region.varies))
    given, failure, parts, added = request, "", 0, dict[str, str]()
    while True:
        try:
            request = observe(request) if added and observe is not None else request
            found = accepted(request, tracer, partial(examine, request))
            most = 1.0 if request.any_words else MOST_OF_COST
            return found, request, _with_shares(added, shares(found), most) if added else {}
        except PartitionError as error:
            if added:
                error.add_note(f"{', '.join(added)} is opaque by itself: no tracer could capture it")
            raise
        except TraceError as error:
            part, why = (error.part, error.in_a_line) if isinstance(error, Uncaptured) else ("", "")
            if not failure and not isinstance(error, Uncaptured):
                raise
            # 1. What the tracers met first becomes opaque, and they try the rest.
            if options.auto_opaque and observe and part and parts < MOST_PARTS:
                failure = failure or str(error)
                before, request = {region.name for region in request.whole}, _with_regions(request, part)
                names = [region.name for region in request.whole]
                added = {name: added.get(name, why) for name in names if name in added or name not in before}
                parts += 1
                continue
            if added:
                failure = f"{failure}\nwith {', '.join(added)} kept opaque by itself: {error}"
            failure = failure or str(error)
            # 2. Without any of that, forward may ask for numbers, each of which takes a capture of its own.
            if request.asks_numbers or request.any_words or not options.auto_opaque:
                raise TraceError(failure) from error
            request, added = replace(given, asks_numbers=True), {}


def _words_in(request: Request) -> bool:
    """Whether inputs have strings in containers; one that is an input itself is an option, which forward may ask."""
    return any(isinstance(leaf, str) for leaf in pytree.tree_leaves(dict(request.example or {})))


def _with_compiled(request: Request, options: Options) -> Request:
    """The first capture's request, with the submodules opaque that ``torch.compile`` has compiled."""
    if request.may_lack_cuts or options.stage_compiler is not None or options.parallelize is not None:
        return request
    for path, part in request.module.named_modules():
        inside = (cut for cut in request.cuts if cut.startswith(f"{path}."))
        outer = (region for region in request.whole if f"{path}.".startswith(f"{region.name}."))
        if path and is_compiled(part) and next(chain(inside, outer), None) is None:
            (*others, new) = _with_regions(request, path).whole
            # Code that torch can compile has results of sizes that its inputs decide.
            request = replace(request, whole=(*others, replace(new, varies=False)))
    return request


def _with_shares(added: Mapping[str, str], shares: Mapping[str, float], most: float) -> dict[str, str]:
    """Each region, in words; TraceError where they have more than ``most`` of a step together."""
    total = sum(shares.get(name, 0.0) for name in added)
    if total > most:
        raise TraceError(f"they take {total:.0%} of a step's FLOPs, and no more than {most:.0%} may be opaque so")
    return {
        name: f"{name} is opaque, {shares.get(name, 0.0):.0%} of a step's FLOPs: {why}" for name, why in added.items()
    }


def _with_regions(request: Request, part: str) -> Request:
    """With the regions that a rule for ``part`` names, in place of those inside of them."""
    new = resolve(request.module, {part: WHOLE}).whole
    inside = tuple(f"{region.path}." for region in new if region.method == "__call__")
    others = (region for region in request.whole if not f"{region.name}.".startswith(inside))
    return replace(request, whole=(*others, *new))


# --- methods: what an opaque one may use, beyond what it was seen to, is held where it runs ---


def unused(program: Program) -> frozenset[str]:
    """The parameters and buffers that no node uses, by name."""
    used = frozenset[int]().union(*(held(program, node) for node in program.nodes))
    return frozenset(name for name, tensor in all_tensors(program.module).items() if id(tensor) not in used)


def with_unused(program: Program, names: frozenset[str]) -> Program:
    """What no node uses of these ``names`` goes with the first call of a method of a submodule that holds it: a branch
    that the example did not take may use it."""
    first = first_names(program.module)
    left, effects = names & unused(program), dict(program.effects)
    for node in program.nodes:
        calls = [call for call in opaque_calls(program.opaque.get(str(node.target))) if call.is_method]
        mine = dict.fromkeys(first[id(tensor)] for call in calls for tensor in all_tensors(call.owner).values())
        more = tuple(name for name in mine if name in left)
        if more:
            effects[node.name] = replace(effects[node.name], reads=(*effects[node.name].reads, *more))
            left -= set(more)
    return program.replace(effects=effects)
