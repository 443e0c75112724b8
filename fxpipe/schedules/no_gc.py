"""Collector: Python's cyclic garbage collector, kept away from where many small objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections inside. Actions, messages and spans form no cycles, a graph's nodes last, and there are hundreds
    of thousands of them: the collector would walk them all each time that their number has grown by a quarter."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
