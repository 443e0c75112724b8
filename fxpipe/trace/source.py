"""Where in the user's source something happens."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def is_users(filename: str) -> bool:
    """Whether a file is the user's, and not torch's, fxpipe's or generated."""
    return not filename.startswith((*_LIBRARIES, "<"))


def current_line() -> str:
    """The innermost line of user code that runs now, in traceback form; empty where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return _format(frame, frame.f_lineno) if frame is not None else ""


def line_of(error: BaseException) -> str:
    """The innermost line of user code in an error's traceback."""
    found = ""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            found = _format(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _format(frame: FrameType, number: int) -> str:
    code = frame.f_code
    source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return f'  File "{code.co_filename}", line {number}, in {code.co_name}\n    {source}'
