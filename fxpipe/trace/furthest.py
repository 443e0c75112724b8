"""Why no tracer could capture a model, told in a few lines: first by the one that got furthest."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fxpipe.trace.request import Request

_LINE = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in ')


@dataclass(frozen=True)
class Refusal:
    """What a tracer said. ``entered``: how many of the model's submodules it had called by then; ``inside``: what could
    be kept whole in place of being captured, a submodule or a method, where that is known."""

    tracer: str
    reason: str
    entered: int
    inside: str = ""


def refused_in(error: BaseException, request: Request) -> str:
    """The outermost submodule in which no cut lies that an error has come through, or else the innermost method; ""
    for none."""
    paths = {id(vars(part)): path for path, part in request.module.named_modules()}
    found, link = "", error
    while True:
        for frame, _ in traceback.walk_tb(link.__traceback__):
            owner = frame.f_locals.get("self")
            path: str | None = paths.get(id(vars(owner))) if isinstance(owner, nn.Module) else None
            name = frame.f_code.co_name
            if path and name == "forward" and not any(f"{cut}.".startswith(f"{path}.") for cut in request.cuts):
                return path
            if path is not None and not hasattr(nn.Module, name) and callable(getattr(type(owner), name, None)):
                found = f"{path}.{name}".lstrip(".")
        if link.__cause__ is None:
            return found
        link = link.__cause__


def keep_whole(name: str) -> str:
    """What to write for a part of a model that cannot be captured."""
    return (
        f'\nor keep it whole, so that its Python runs in every step: boundaries={{"{name}": "whole"}}' if name else ""
    )


@contextlib.contextmanager
def entering(module: nn.Module) -> Iterator[set[int]]:
    """Gathers, while it is open, the submodules that are called, which torch.nn's own need not be in a trace."""
    own = {id(vars(part)) for part in module.modules() if not type(part).__module__.startswith("torch.nn.")}
    entered: set[int] = set()

    def note(called: nn.Module, args: Any) -> None:
        entered.update(own & {id(vars(called))})  # torch.export calls stand-ins that share it

    handle = register_module_forward_pre_hook(note)
    try:
        yield entered
    finally:
        handle.remove()


def told(refusals: Sequence[Refusal]) -> str:
    """The refusals, a line or two each; of those that got equally far, the last that was tried comes first."""
    first, *others = sorted(refusals, key=lambda refusal: refusal.entered)[::-1]
    return "\n".join([f"{first.tracer}: {first.reason}{keep_whole(first.inside)}", *map(_in_a_line, others)])


def _in_a_line(refusal: Refusal) -> str:
    """What the tracer met, and where; not what to write instead, since another one got further."""
    text, *rest = refusal.reason.splitlines()
    fact, _, _ = text.partition("; ")
    found = next((match for match in map(_LINE.match, rest) if match), None)
    at = f" ({Path(found['file']).name}:{found['line']})" if found else ""
    return f"{refusal.tracer}: {fact}{at}"
