"""The error types. A message states the fact with its values and its location, and the code to write instead."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator

MOST_TOLD = 20_000
"""The most characters of a message; the middle of a longer message is left out."""


def shortened(text: str) -> str:
    """The text, without its middle if it has more than ``MOST_TOLD`` characters: the start and the end stay."""
    if len(text) <= MOST_TOLD:
        return text
    half = MOST_TOLD // 2 - 30  # the note in the middle has at most 60 characters
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters left out ...] {text[-half:]}"


def printable(text: str) -> str:
    """The text with control characters escaped, as by ``repr``: a terminal would obey them in a user's name."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


class FxpipeError(Exception):
    """The base class of fxpipe's errors. The message is ``shortened`` and ``printable``."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(shortened(arg)) if isinstance(arg, str) else arg for arg in args))


class TraceError(FxpipeError):
    """The model could not be captured, or a capture would have been wrong."""


class PartitionError(FxpipeError):
    """The captured program cannot be cut into stages at its boundaries."""


class ScheduleError(FxpipeError):
    """A schedule is unknown, malformed, deadlocks, or breaks a dependency."""


class DoesNotFit(PartitionError, ScheduleError):
    """No plan that was tried fits the memory of a rank. ``least_bytes``: what the nearest plan takes on its fullest
    rank."""

    def __init__(self, text: str, least_bytes: float = 0.0) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


class TopologyError(FxpipeError):
    """The grid of ranks does not add up, or does not fit the processes that run."""


class RunError(FxpipeError):
    """A step, or a process that was to run one, failed."""


class CheckpointError(FxpipeError):
    """A state dict or checkpoint does not fit the model or the optimizer."""


@contextlib.contextmanager
def noted(note: Callable[[], str]) -> Iterator[None]:
    """Adds a note to an exception from inside the context, also to Ctrl-C; the note says where it was raised."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # some errors take no notes; the error itself matters more
            error.add_note(printable(note()))
        raise


def describe_error(error: BaseException) -> str:
    """Formats an error with its notes, for the other ranks."""
    lines = [f"{type(error).__name__}: {error}", *map(str, getattr(error, "__notes__", ()))]
    return printable(shortened("\n".join(lines)))


def nearest(name: object, choices: Iterable[object]) -> str:
    """The end of a message about an unknown ``name``: the most similar of the ``choices``, or the first names.

    >>> nearest("1F1b", ["gpipe", "1f1b"])
    '; did you mean "1f1b"?'
    >>> nearest("zigzag", ["gpipe", "1f1b"])
    '; known: "gpipe", "1f1b"'

    Case is ignored, and a name that is no text is compared by its text. Without known names the result is empty.
    """
    names = list(dict.fromkeys(map(str, choices)))
    # "1F1B" is "1f1b" to a user, and difflib compares letter by letter.
    by_folded = {other.casefold(): other for other in names[:_MOST_COMPARED]}
    close = difflib.get_close_matches(f"{name!s:.100}".casefold(), list(by_folded), n=1)
    if close:
        return f'; did you mean "{by_folded[close[0]]}"?'
    more = f" and {len(names) - _MOST_KNOWN:,} more" if len(names) > _MOST_KNOWN else ""
    return "; known: " + ", ".join(f'"{other}"' for other in names[:_MOST_KNOWN]) + more if names else ""


_MOST_KNOWN = 50  # names that are listed
_MOST_COMPARED = 10_000  # names that are compared, in about a second
