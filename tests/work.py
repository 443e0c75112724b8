"""Work that no other load on the machine changes: how much Python a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def steps(function: Callable[..., object], *args: Any) -> int:
    """How many lines and calls of Python ``function(*args)`` runs on this thread; each turn of a loop counts anew.

    For growth: what is linear has ``steps(function, many) <= 4.5 * steps(function, few)`` where many is four times
    few. What C does within a line, as in ``x in xs``, counts as that line.
    """
    count = 0

    def step(*_: Any) -> Any:
        nonlocal count
        count += 1
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count
