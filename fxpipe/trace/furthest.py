"""Why no tracer could capture a model, told in a few lines: first by the one that got furthest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

_LINE = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in ')


@dataclass(frozen=True)
class Refusal:
    """What a tracer said. ``entered``: how many of the model's submodules it had called by then."""

    tracer: str
    reason: str
    entered: int


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
    return "\n".join([f"{first.tracer}: {first.reason}", *map(_in_a_line, others)])


def _in_a_line(refusal: Refusal) -> str:
    """What the tracer met, and where; not what to write instead, since another one got further."""
    text, *rest = refusal.reason.splitlines()
    fact, _, _ = text.partition("; ")
    found = next((match for match in map(_LINE.match, rest) if match), None)
    at = f" ({Path(found['file']).name}:{found['line']})" if found else ""
    return f"{refusal.tracer}: {fact}{at}"
