"""Finds the lines of user code that run now, or that an error or a message names.

Takes: the stack of this thread, an error's traceback, or a text. Gives: a line in the form of a traceback, ``  File
"model.py", line 12, in forward`` and the source below it, for the end of a message.

A file is the user's if it belongs neither to torch nor to fxpipe and is not generated: libraries such as transformers
count as users'. The innermost such line is the line of the user's own model, or of the library function that it calls.

Reading frames costs microseconds, so a tracer can ask for each node. Nothing here changes a frame.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

LINE = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in ', re.MULTILINE)
"""The pattern of a line in traceback form."""
_LINE_AND_CODE = re.compile(LINE.pattern + r".*(\n(?!\s*File ).*)?", re.MULTILINE)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__)


def is_users(filename: str) -> bool:
    """Whether a file belongs to the user: not to torch, fxpipe or Python's contextlib, and not generated."""
    return not filename.startswith((*_LIBRARIES, "<"))


def is_torchs(filename: str) -> bool:
    """Whether a file belongs to torch."""
    return filename.startswith(_LIBRARIES[0])


def calls_isinstance() -> bool:
    """Whether the caller was called by user code that calls ``isinstance``.

    It looks at the frame that asked, above frames of a metaclass: its code must name ``isinstance``, and its file must
    be the user's, and no module of Python's library. This may be true for a frame that reads a class in another way; a
    proxy then refuses, which is safe.
    """
    # Python does not tell an object who reads its class. torch.fx reads it, too, and needs an answer; but torchvision's
    # GeneralizedRCNN, which calls isinstance(features, torch.Tensor), must not get False.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__instancecheck__":  # of a metaclass
        frame = frame.f_back
    # torch's C code reads classes, too, in the frame of its caller
    if frame is None or "isinstance" not in frame.f_code.co_names or not is_users(frame.f_code.co_filename):
        return False
    return frame.f_globals.get("__name__", "").partition(".")[0] not in sys.stdlib_module_names


def current_line() -> str:
    """The innermost line of user code that runs now, in traceback form; empty if no user code runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return _format(frame, frame.f_lineno) if frame is not None else ""


def line_of(error: BaseException) -> str:
    """The innermost line of user code in an error's traceback."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            line = _format(frame, number)
    return line


def place_in(text: str) -> str:
    """The first line that a text names in traceback form, as "model.py:12"; empty if the text names no line."""
    match = LINE.search(text)
    return f"{Path(match['file']).name}:{match['line']}" if match else ""


def users_line_in(text: str) -> str:
    """The innermost line of user code in a text in traceback form; empty if the text has no such line."""
    lines = [line for line in _LINE_AND_CODE.finditer(text) if is_users(line["file"])]
    return lines[-1][0].strip("\n") if lines else ""


def definition(function: Callable[..., object]) -> str:
    """The line of a function's definition, in traceback form; empty if the function has no Python code."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    source = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\n    {source}'


def code_of(owner: Any, method: str) -> Any:
    """The code object of a method of a module or class; None if the method has no Python code."""
    function = getattr(owner, method, None)
    return function and getattr(inspect.unwrap(function), "__code__", None)


def _format(frame: FrameType, number: int) -> str:
    """One line in traceback form: the file, the number, the function, and the source."""
    code = frame.f_code
    source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return f'  File "{code.co_filename}", line {number}, in {code.co_name}\n    {source}'
