"""Warnings that point to the user's own line, however far it is from what warns."""

from __future__ import annotations

import inspect
import traceback
import warnings


def warn(text: str, category: type[Warning]) -> None:
    """Warns of the call by which the user's code has entered fxpipe."""
    warnings.warn(text, category, stacklevel=1 + _frames_of_fxpipe())


def _frames_of_fxpipe() -> int:
    """How many calls lie between the user's code and the caller."""
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())][1:]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    return next((place for place, name in enumerate(names) if not name.startswith("fxpipe.")), len(names))
