"""Last words: what ends a program between its calls is told to all ranks; who ends for another's sake ends later."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from fxpipe.distributed.post import ENDED, Ending
from fxpipe.distributed.watch import WorldWatch, current_watch
from fxpipe.distributed.whereabouts import here
from fxpipe.errors import FxpipeError, told

_installed_in: int | None = None


def install() -> None:
    """Puts itself in front of Python's own hooks, which print an exception that nobody handles. Once in a process."""
    global _installed_in
    if _installed_in == os.getpid():
        return
    _installed_in = os.getpid()
    before, before_of_threads = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        before(kind, error, trace)  # first, so that nobody's repeats it before it is there
        end_with(error)

    def hook_of_threads(args: Any) -> Any:
        thread = args.thread.name if args.thread is not None else "a thread"
        here.noted.append(f"the thread {thread!r} ended with {type(args.exc_value).__name__}: {args.exc_value!s:.200}")
        before_of_threads(args)

    sys.excepthook, threading.excepthook = hook, hook_of_threads


def end_with(error: BaseException) -> None:
    """Tells all ranks of the exception that ends this one's program; or, where another rank was the cause, waits some
    seconds until that one has ended: launchers take the first to end for the cause."""
    watch = current_watch()
    if watch is None:
        return
    _tell(watch, error)
    cause = watch.cause
    if cause is not None and watch.rank not in cause.culprits:
        watch.await_end_of(cause.culprits)


def _tell(watch: WorldWatch, error: BaseException) -> None:
    cause = watch.cause
    if cause is None and _is_of_a_connection(error):
        cause = watch.why(here.epoch, [], str(error), seconds=6.0)
        if cause.culprits:
            watch.say(watch.message(cause, "a call of torch.distributed"))
    if cause is None or watch.rank in cause.culprits or not cause.culprits:
        watch.tell(ENDED, Ending(watch.rank, True, f"{watch.named(watch.rank)}: {told(error)}", (watch.rank,)))


def _is_of_a_connection(error: BaseException) -> bool:
    """Whether torch.distributed itself has raised it: its errors say no more than that a connection broke."""
    text = str(error)
    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "closure")
    return isinstance(error, RuntimeError) and not isinstance(error, FxpipeError) and any(w in text for w in words)


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
