"""Capture list: what ``forward_backward.captures`` prints.

Takes ``Captures``. Gives an entry for each capture that is remembered, in words. It keeps no reference to the captures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.capture.captures import Captures
from fxpipe.capture.guard import Captured
from fxpipe.errors import printable
from fxpipe.notebook import Tabular


class CaptureEntry(NamedTuple):
    """A capture, in words."""

    kind: str
    """The kind of batch: training or evaluation, the tracer, and the inputs of the captured micro-batch."""
    guard: str
    """The micro-batches of this kind for which the capture is valid."""
    why: str
    """Why the model was captured: how the micro-batch differed from the most similar earlier capture."""

    def __str__(self) -> str:
        return f"{self.kind}\n  valid for: {self.guard}\n  captured because {self.why}"


@dataclass(frozen=True, repr=False)
class CaptureList(Tabular):
    """The captures of a model; ``print`` shows for each its kind of batch, its guard, and why it was made."""

    entries: tuple[CaptureEntry, ...]

    @staticmethod
    def of(captures: Captures) -> CaptureList:
        """The list of these captures, in the order of their kinds."""
        return CaptureList(tuple(_entry(captures, captured) for captured in captures))

    def __str__(self) -> str:
        return printable("\n".join(map(str, self.entries)) or "no captures: the stages are the user's own")

    __repr__ = __str__


def _entry(captures: Captures, captured: Captured) -> CaptureEntry:
    guard = captured.guard
    kind = f"{'training' if guard.values.training else 'evaluation'}, by {captured.tracer}: {guard.inputs}"
    return CaptureEntry(kind, guard.described(captures.questions), captured.why)
