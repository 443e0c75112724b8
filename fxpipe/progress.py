"""Progress: shows on stderr how far work is that takes longer than ``PATIENCE`` seconds."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import TextIO

from fxpipe.errors import printable

PATIENCE, REWRITE, LINES = 5.0, 0.5, 30.0
"""Seconds: after which work is shown, between updates of a terminal's line, and between lines elsewhere."""
_lock, _open = threading.RLock(), list["progress"]()
_line: list[tuple[TextIO, int]] = []
"""The line that a terminal shows and that is rewritten, with its length; empty if there is none."""


class progress:  # a context, as in contextlib
    """Shows how far the work inside is, if it takes long: "capturing 35 of 80 layers", and at the end its seconds.

    A terminal shows a line from ``PATIENCE`` seconds on, and rewrites it. A notebook gets a line then, and each
    ``LINES`` seconds; a file only each ``LINES`` seconds. Among several processes, only rank 0 prints. Only the
    innermost work is shown. The context is a function that adds to what is done: it is cheap, for any thread.

    Args:
        what: the verb, and the noun if there is no ``unit``.
        total: how much is to be done; None: unknown.
        unit: what is counted, in the plural; "bytes" are shown as MB or GB.
    """

    def __init__(self, what: str, total: float | None = None, unit: str = "") -> None:
        self._what, self._total, self._unit, self._done = what, total, unit, 0.0
        self._stream = status_stream()  # now: the code inside may redirect it
        self._start, self._rewrites = time.perf_counter(), self._stream.isatty()
        is_file = not self._rewrites and self._stream is not sys.stdout
        self._first = self._next = self._start + (LINES if is_file else PATIENCE)
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Callable[[float], None]:
        with _lock:
            _open.append(self)
        if is_teller():
            self._thread.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if is_teller():
            self._thread.join()
        with _lock:
            _open.remove(self)
            _erase()
        if (now := time.perf_counter()) >= self._first:
            log(f"fxpipe: {self} took {now - self._start:.1f} s", self._stream)

    def __str__(self) -> str:
        if not self._done and (self._total is None or not self._unit):
            return self._what
        most, unit, size = self._total or self._done, self._unit, 1.0
        if unit == "bytes" and most >= 1e6:
            unit, size = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
        done, total = (f"{number / size:,.{int(size > 1)}f}" for number in (self._done, most))
        return f"{self._what} {done}{f' of {total}' * (self._total is not None)} {unit}"

    def _advance(self, count: float) -> None:
        with _lock:
            self._done += count

    def _show(self) -> None:
        seconds = PATIENCE
        while not self._ended.wait(seconds):
            self.tick()
            seconds = REWRITE

    def tick(self) -> None:
        """Prints, if it is time to, and no work inside of this is shown."""
        with _lock:
            now = time.perf_counter()
            if now < self._next or _open[-1] is not self:
                return
            self._next = now + (REWRITE if self._rewrites else LINES)
            text = printable(f"fxpipe: {self}, {now - self._start:.0f} s")
            if not self._rewrites:
                log(text, self._stream)
                return
            before, text = _line.pop()[1] if _line else 0, text[:79]  # a line that wraps cannot be rewritten
            print(f"\r{text:{before}}", end="", file=self._stream, flush=True)
            _line.append((self._stream, len(text)))


def _erase() -> None:
    """Erases the line that a terminal shows, so that another line can begin at its left."""
    if _line:
        stream, width = _line.pop()
        print(f"\r{' ' * width}\r", end="", file=stream, flush=True)


def is_teller() -> bool:
    """Whether this process logs for all processes: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def status_stream() -> TextIO:
    """The stream of status lines: stderr, or stdout in a notebook, which shows stderr in red, as an error."""
    return sys.stdout if type(sys.stderr).__module__.startswith("ipykernel.") else sys.stderr


def log(text: str, stream: TextIO | None = None) -> None:
    """Prints to ``status_stream()``, or to a stream; among several processes, only rank 0 prints."""
    if is_teller():
        with _lock:
            _erase()
            print(printable(text), file=stream or status_stream(), flush=True)


# --- Warnings that point to the user's own line, at any distance from the warning code ---


def warn(text: str, category: type[Warning]) -> None:
    """Warns with the source line of the user's call into fxpipe."""
    # Python shows a warning once per source line, so the warning points to a line of the user's code.
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    own = next((index for index, name in enumerate(names) if not name.startswith("fxpipe.")), len(names))
    warnings.warn(printable(text), category, stacklevel=1 + own)
