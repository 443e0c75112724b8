"""Auto-opaque: makes submodules that no tracer can capture opaque, one after another, until the rest is captured.

Takes a request for a tracer, and functions that examine a program and observe regions. Gives the examined program, the
request with all its opaque regions, and a reason for each region that was added.

1. If strings are among the inputs, it first tries a program that is valid for any strings.
2. If the user has compiled submodules, it first tries with these opaque, so that they run compiled.
3. It tries the tracers. If all refuse, the part on which they failed first becomes opaque, and they try again.
4. If no part is left to try, it starts again without these parts, and forward may ask for numbers.

It does not choose the tracers' order, and does not check a program: ``examine`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import all_tensors, first_names
from fxpipe.options import Options
from fxpipe.passes.alias_groups import tensor_ids
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import is_compiled
from fxpipe.trace import Request, Uncaptured, accepted
from fxpipe.trace.cuts.cuts_by_name import resolve
from fxpipe.trace.opaque.regions import WHOLE

MOST_PARTS = 8
"""The most parts of a model that are made opaque, one after another."""
MOST_OF_COST = 0.5
"""The largest fraction of a step's FLOPs that these parts may have together."""


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
    """Returns the examined program, the request with all its opaque regions, and the added regions with a reason each.

    Args:
        request: the request for a tracer.
        options: the options of ``compile``, with the tracer's name.
        examine: returns the examined program; raises TraceError for a program that differs from the model.
        shares: each region's fraction of a step's FLOPs in an examined program.
        observe: adds to a request what its regions do in a run; None if the model cannot run on a batch.
        tries_any_words: whether to try a program that is valid for any strings in the inputs first.
        tries_compiled: whether to try with compiled submodules opaque first.

    Raises:
        TraceError: no attempt succeeded. The text has the first attempt's error, and then the later attempts.
        PartitionError: the program cannot be cut into stages.
        Unanswered: forward asks a question about its inputs that has no answer yet.
    """
    tracer = options.tracing.name if options.parallelize is None else "record"  # "record" keeps modules as they are
    again = partial(capture_in_part, options=options, examine=examine, shares=shares, observe=observe)
    # 1. Strings that change with every batch need a capture each, unless only opaque code reads them.
    if tries_any_words and _words_in(request):
        with contextlib.suppress(TraceError, PartitionError):
            return again(replace(request, any_words=True))
    # 2. A submodule that the user has compiled is one opaque call, so that it runs compiled, or else plain code.
    compiled = _with_compiled(request, options) if observe is not None else request
    if tries_compiled and not all(region.varies for region in compiled.whole):
        with contextlib.suppress(TraceError, PartitionError):
            seen = request if compiled is request or observe is None else observe(compiled)
            return again(seen, tries_compiled=False)
        request = replace(request, whole=tuple(region for region in request.whole if region.varies))
    original, failure, parts, added = request, "", 0, dict[str, str]()
    while True:
        try:
            request = observe(request) if added and observe is not None else request
            result = accepted(request, tracer, partial(examine, request))
            most = 1.0 if request.any_words else MOST_OF_COST
            return result, request, _with_shares(added, shares(result), most) if added else {}
        except PartitionError as error:
            if added:
                error.add_note(f"{', '.join(added)} is opaque by itself: no tracer could capture it")
            raise
        except TraceError as error:
            part, why = (error.part, error.in_a_line) if isinstance(error, Uncaptured) else ("", "")
            if not failure and not isinstance(error, Uncaptured):
                raise
            # 3. The part on which the tracers failed first becomes opaque, and the tracers try the rest.
            if options.tracing.opaque and observe and part and parts < MOST_PARTS:
                failure = failure or str(error)
                before, request = {region.name for region in request.whole}, _with_regions(request, part)
                names = [region.name for region in request.whole]
                added = {name: added.get(name, why) for name in names if name in added or name not in before}
                parts += 1
                continue
            if added:
                failure = f"{failure}\nwith {', '.join(added)} kept opaque by itself: {error}"
            failure = failure or str(error)
            # 4. Without added regions, forward may read numbers from tensors, and each number needs its own capture.
            if request.asks_numbers or request.any_words or not options.tracing.opaque:
                raise TraceError(failure) from error
            request, added = replace(original, asks_numbers=True), {}


def _words_in(request: Request) -> bool:
    """Whether containers among the inputs hold strings; a string that is an input is an option to branch on."""
    return any(isinstance(leaf, str) for leaf in pytree.tree_leaves(dict(request.example or {})))


def _with_compiled(request: Request, options: Options) -> Request:
    """The first capture's request in which the submodules that ``torch.compile`` has compiled are opaque."""
    if request.may_lack_cuts or options.stage_compiler is not None or options.parallelize is not None:
        return request
    for path, part in request.module.named_modules():
        inside = (cut for cut in request.cuts if cut.startswith(f"{path}."))
        outer = (region for region in request.whole if f"{path}.".startswith(f"{region.name}."))
        if path and is_compiled(part) and next(chain(inside, outer), None) is None:
            (*others, new) = _with_regions(request, path).whole
            # The inputs of code that torch can compile decide the sizes of its results.
            request = replace(request, whole=(*others, replace(new, varies=False)))
    return request


def _with_shares(added: Mapping[str, str], shares: Mapping[str, float], most: float) -> dict[str, str]:
    """Each region's description; TraceError if the regions have more than the fraction ``most`` of a step's FLOPs."""
    total = sum(shares.get(name, 0.0) for name in added)
    if total > most:
        raise TraceError(f"they take {total:.0%} of a step's FLOPs, and no more than {most:.0%} may be opaque so")
    return {
        name: f"{name} is opaque, {shares.get(name, 0.0):.0%} of a step's FLOPs: {why}" for name, why in added.items()
    }


def _with_regions(request: Request, part: str) -> Request:
    """The request with the regions that a rule for ``part`` names, which replace the regions inside of them."""
    new = resolve(request.module, {part: WHOLE}).whole
    inside = tuple(f"{region.path}." for region in new if region.method == "__call__")
    others = (region for region in request.whole if not f"{region.name}.".startswith(inside))
    return replace(request, whole=(*others, *new))


# --- methods: the rank that runs an opaque method also holds tensors that the method was not seen to use ---


def unused(program: Program) -> frozenset[str]:
    """The names of the parameters and buffers that no node uses."""
    used = frozenset[int]().union(*(tensor_ids(program, node) for node in program.nodes))
    return frozenset(name for name, tensor in all_tensors(program.module).items() if id(tensor) not in used)


def with_unused(program: Program, names: frozenset[str]) -> Program:
    """Assigns each unused tensor of ``names`` to the first opaque call of a method whose submodule holds the tensor: a
    branch that the example did not take may use it."""
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
