"""Tracers: capture a model as a ``Program``, and say in a few lines why a model cannot be captured.

Takes: a ``Request``, which has the model, the names of its inputs, its cuts, and, for most tracers, the shapes of a
micro-batch. Gives: a ``Program``, a ``torch.fx`` graph of the call with its boundaries.

Steps of ``accepted`` with the tracer "auto":

1. It calls the tracers in the order of ``TRACERS``. Each runs in plain modes: autocast and inference mode are off, and
   grad mode is on in training.
2. It gives the program to ``examine``, which may refuse it: fxpipe splits it into stages there, and compares them with
   the model.
3. It returns the first result that nobody refused by a TraceError.
4. If all programs were refused, it raises ``Uncaptured``. The error begins with the refusal that is most useful, and
   names the part of the model that could be opaque.

It does not decide when a model is captured again (see ``fxpipe.capture``), and keeps no state between captures.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import TypeVar

from torch import nn

from fxpipe.errors import TraceError, nearest
from fxpipe.graph.program import Program
from fxpipe.policies import TracerName
from fxpipe.trace.cuts.cuts_by_name import fnmatched
from fxpipe.trace.export.tracer import export
from fxpipe.trace.patching import plain_modes
from fxpipe.trace.record.tracer import record
from fxpipe.trace.request import Cut, Request
from fxpipe.trace.symbolic.tracer import symbolic
from fxpipe.user_line import LINE, code_of, place_in

Tracer = Callable[[Request], Program]
Result = TypeVar("Result")


def _traced(tracer: Tracer, request: Request) -> Program:
    """The program of one tracer, with the model's own random generators, captured in plain modes."""
    with plain_modes(grad=request.training):
        return tracer(request).replace(generators=request.generators)


NEED_SHAPES = frozenset({"export", "record"})
"""The tracers that need the shapes of a batch."""
_ASK_FOR_EXAMPLE = (
    "the tracers export and record need the shapes of a batch: pass example_args= or example_kwargs= to "
    "fxpipe.compile, one batch as it will be passed in calls"
)


def capture(request: Request, tracer: TracerName = "auto") -> Program:
    """The program of the tracer of that name; TraceError if no tracer has the name, or if the tracer refuses."""
    return accepted(request, tracer, lambda program: program)


TRACERS: Mapping[TracerName, Tracer] = MappingProxyType(
    {"symbolic": symbolic, "export": export, "record": record, "auto": capture}
)


def accepted(request: Request, tracer: TracerName, examine: Callable[[Program], Result]) -> Result:
    """Returns the result of ``examine`` for the program of the named tracer.

    For "auto": the result for the first program, in the order of ``TRACERS``, that neither its tracer nor ``examine``
    refuses. Its ``refusals`` name the tracers before it, and their reasons.

    Args:
        request: what to capture. The tracers in ``NEED_SHAPES`` are left out by "auto" if it has no example.
        tracer: a name out of ``TRACERS``.
        examine: may raise a TraceError, which counts as a refusal of this program. Any other error passes through.

    Raises:
        TraceError: there is no tracer of that name; or the named tracer needs an example, or refuses the model. If the
            refused part is known, the message ends with the rule for ``boundaries=`` that makes it opaque.
        Uncaptured: "auto" found no program.
    """
    if tracer not in TRACERS:
        raise TraceError(f"unknown tracer {tracer!r}{nearest(tracer, TRACERS)}")
    if tracer in NEED_SHAPES and request.example is None:
        raise TraceError(_ASK_FOR_EXAMPLE)
    if tracer != "auto":
        try:
            program = _traced(TRACERS[tracer], request)
        except TraceError as error:
            hint = _keep_whole(_refused_in(error, request), request)
            raise TraceError(f"{error}{hint}") from error if hint else error.__cause__
        return examine(program)
    refusals: list[Refusal] = []
    # 1. to 3.: each tracer in turn, until ``examine`` accepts a program
    for name in [name for name in TRACERS if name != "auto"]:
        if name in NEED_SHAPES and request.example is None:
            break
        try:
            program = _traced(TRACERS[name], request)
            return examine(program.replace(refusals=tuple((each.tracer, each.reason) for each in refusals)))
        except TraceError as error:
            refusals.append(Refusal(name, str(error), _refused_in(error, request)))
    # 4. no program
    raise _uncaptured(refusals, request, "" if request.example is not None else f"\n{_ASK_FOR_EXAMPLE}")


__all__ = ["NEED_SHAPES", "TRACERS", "Cut", "Request", "Tracer", "Uncaptured", "accepted", "capture"]

# --- why no tracer could capture a model, in a few lines ---


@dataclass(frozen=True)
class Refusal:
    """A tracer's refusal. ``inside``: the submodule or method that could be opaque instead, if known."""

    tracer: str
    reason: str
    inside: str = ""


class Uncaptured(TraceError):
    """No tracer captures the model. ``fxpipe.capture`` catches this error, makes ``part`` opaque, and tries again.

    ``part``: the submodule, the pattern of several, or the method that can be opaque instead; "" if unknown.
    ``in_a_line``: the reason and the line of the first refusal in the message.
    """

    def __init__(self, text: str, part: str, in_a_line: str = "") -> None:
        super().__init__(text)
        self.part, self.in_a_line = part, in_a_line


def _refused_in(error: BaseException, request: Request) -> str:
    """The innermost submodule or method that ran the line in the error's message; "" if a cut is inside of it, or if it
    is opaque already. A pattern names submodules of one class whose paths differ in numbers alone.

    1. Take the traceback, among the causes of the error, that contains the line of the message.
    2. Find its innermost frame that runs a method of a user's submodule.
    3. Leave out parts that cannot be opaque.
    4. Widen the path to a pattern, for example ``layers.3.gate`` to ``layers.*.gate``.
    """
    # 1. the traceback, among the error's causes, with the line that the message names
    paths = {id(vars(part)): path for path, part in request.module.named_modules()}
    traces = [list(traceback.walk_tb(link.__traceback__)) for link in _links(error)]
    line = LINE.search(str(error))
    if line is not None:
        location = line["file"], int(line["line"])
        traces = [trace for trace in traces if any((f.f_code.co_filename, number) == location for f, number in trace)]
    # 2. the innermost submodule or method
    refused = next((refused for trace in traces if (refused := _innermost([frame for frame, _ in trace], paths))), None)
    refused = refused or getattr(error, "method", None)  # the export tracer raises after forward has returned
    if refused is None:
        return ""
    # 3. parts that cannot be opaque
    path, method = refused
    name = f"{path}.{method}".lstrip(".") if method else path
    whole = any(f"{name}.".startswith(f"{region.name}.") for region in request.whole)
    if whole or _is_cut(path, request, method):
        return ""
    # 4. a pattern for all submodules of this kind
    return name if method else _alike(path, request)


def _links(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and the errors that caused it, the last first."""
    while error is not None:
        yield error
        error = error.__cause__


def _innermost(frames: Sequence[FrameType], paths: Mapping[int, str]) -> tuple[str, str] | None:
    """(path, name of the method; "" for forward) of the innermost frame that runs a method of a user's submodule.

    A frame runs a method if its first argument is a submodule of the model, and its code is the code of that method.
    Modules of torch.nn do not count. None if no frame fits, or if only the model's own forward does.
    """
    called: FrameType | None = None
    # from the inside out, without torch.nn's own modules, which tracers can capture
    for frame in reversed(frames):
        inner, called = called, frame
        first = frame.f_code.co_varnames[:1]  # a method's first argument, whatever its name
        owner, name = frame.f_locals.get(*first or ("",)), frame.f_code.co_name
        if not isinstance(owner, nn.Module) or type(owner).__module__.startswith("torch.nn."):
            continue
        path = paths.get(id(vars(owner)))
        if path is None:
            continue
        function = "" if inner is None else _property_of(owner, frame, inner)
        if function:
            return path, function
        if name == "forward":
            return (path, "") if path else None  # the model's own forward is in no submodule
        # a method of the class, and no other function with a method's name
        if not hasattr(nn.Module, name) and code_of(type(owner), name) is frame.f_code:
            return path, name
    return None


def _property_of(owner: nn.Module, frame: FrameType, inner: FrameType) -> str:
    """The module's property, such as transformers' ``loss_function``, whose value is the function that runs in
    ``inner``; "" if no property has this value."""
    names = (name for name in frame.f_code.co_names if isinstance(getattr(type(owner), name, None), property))
    return next((name for name in names if code_of(owner, name) is inner.f_code), "")


def _is_cut(path: str, request: Request, method: str = "") -> bool:
    """Whether a cut is inside of a submodule, or, for a method, in a part that the method's code names."""
    prefix = f"{path}." if path else ""
    parts = {cut.removeprefix(prefix).split(".")[0] for cut in request.cuts if cut.startswith(prefix)}
    code = code_of(type(request.module.get_submodule(path)), method) if method else None
    return bool(parts if not method else code is not None and parts & set(code.co_names))


def _alike(path: str, request: Request) -> str:
    """A pattern for the submodules whose paths differ in numbers alone, if one rule fits them all; else the path."""
    modules = dict(request.module.named_modules(remove_duplicate=False))
    parts = ["*" if part.isdecimal() else part for part in path.split(".")]
    others = [other for other in modules if fnmatched(other, parts)]
    same = all(type(modules[other]) is type(modules[path]) and not _is_cut(other, request) for other in others)
    return ".".join(parts) if same and len(others) > 1 else path


def _keep_whole(name: str, request: Request) -> str:
    """The advice to keep a part of a model opaque, for the end of a message; "" for no part."""
    cut = request.cuts.get(name)
    rule = f'["whole", "{cut}"]' if isinstance(cut, str) else '"whole"'
    return f'\nor keep it whole, so that its Python runs in every step: boundaries={{"{name}": {rule}}}' if name else ""


def _uncaptured(refusals: Sequence[Refusal], request: Request, hint: str) -> Uncaptured:
    """The error of several refusals, a line or two each: those with advice first, of these the last tried, which got
    furthest. The first refusal that names a part decides which part could be opaque; the rule follows this refusal."""
    # the last program tried got furthest, so its reason comes before the reasons of earlier tracers
    first, *others = every = sorted(refusals, key=lambda r: bool(r.inside or _in_words(r)[1]))[::-1]
    named = next((refusal for refusal in every if refusal.inside), first)
    lines = [f"{first.tracer}: {first.reason}", *("".join(_in_words(refusal)) for refusal in others)]
    lines[every.index(named)] += _keep_whole(named.inside, request)
    return Uncaptured("\n".join(lines) + hint, named.inside, _in_words(first)[0])


def _in_words(refusal: Refusal) -> tuple[str, str]:
    """(the tracer's reason and the user's line, the advice after the semicolon)."""
    text, *rest = refusal.reason.splitlines()
    fact, semicolon, advice = text.partition("; ")
    at = place_in("\n".join(rest))
    return f"{refusal.tracer}: {fact}" + (f" ({at})" if at else ""), semicolon + advice
