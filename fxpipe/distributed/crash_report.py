"""Crash report: what a rank still says as its program ends: a line, its last actions, and to whom it hands an error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from fxpipe.distributed.activity import here


def say(text: str) -> None:
    """One line to stderr, at once: what ends this process may leave no time later."""
    with contextlib.suppress(OSError, ValueError):  # there may be nobody to read it
        print(f"fxpipe: {' | '.join(text.splitlines())}", file=sys.stderr, flush=True)


def write_trail(rank: int, head: str) -> None:
    """The last actions of this rank, into the folder that FXPIPE_DEBUG_DIR names."""
    folder = os.environ.get("FXPIPE_DEBUG_DIR")
    if not folder:
        return
    now = time.monotonic()
    lines = [f"{now - at:10.3f} s ago  {what}" for at, what in list(here.trail)]
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank{rank}.txt").write_text("\n".join([head, *lines, ""]))
    except OSError as error:
        say(f"FXPIPE_DEBUG_DIR is {folder!r}, which cannot be written to: {error}")


def install(end_with: Callable[[BaseException], object]) -> None:
    """Calls it behind Python's own hook, which prints an exception that nobody handles."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        before(kind, error, trace)  # first, so that nobody's repeats it before it is there
        end_with(error)

    sys.excepthook = hook


@contextlib.contextmanager
def ends_later() -> Iterator[None]:
    """A SIGTERM, by which launchers end those that are left, does so once it has been said why."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)
