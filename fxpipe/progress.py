"""Progress: prints a line to stderr for work that takes longer than ``PATIENCE`` seconds."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import TextIO

from fxpipe.errors import printable

PATIENCE = 2.0
"""Seconds after which work is logged as under way."""


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Logs that ``what`` is under way after ``PATIENCE`` seconds, and at the end the seconds that ``what`` took."""
    start = time.perf_counter()
    stream = status_stream()  # the code inside may redirect it
    timer = threading.Timer(PATIENCE, log, [f"fxpipe: {what} …", stream])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        seconds = time.perf_counter() - start
        if seconds >= PATIENCE:
            log(f"fxpipe: {what} took {seconds:.1f} s", stream)


def is_teller() -> bool:
    """Whether this process logs for all processes: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def status_stream() -> TextIO:
    """The stream of status lines: stderr, or stdout in a notebook, which shows stderr in red, as an error."""
    return sys.stdout if type(sys.stderr).__module__.startswith("ipykernel.") else sys.stderr


def log(text: str, stream: TextIO | None = None) -> None:
    """Prints to ``status_stream()``, or to a stream; among several processes, only rank 0 prints."""
    if is_teller():
        print(printable(text), file=stream or status_stream(), flush=True)


# --- Warnings that point to the user's own line, at any distance from the warning code ---


def warn(text: str, category: type[Warning]) -> None:
    """Warns with the source line of the user's call into fxpipe."""
    # Python shows a warning once per source line, so the warning points to a line of the user's code.
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    own = next((index for index, name in enumerate(names) if not name.startswith("fxpipe.")), len(names))
    warnings.warn(printable(text), category, stacklevel=1 + own)
