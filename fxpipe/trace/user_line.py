"""Where in the user's source something happens."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch

LINE = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in ', re.MULTILINE)
"""A line in traceback form."""
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def is_users(filename: str) -> bool:
    """Whether a file is the user's, and not torch's, fxpipe's or generated."""
    return not filename.startswith((*_LIBRARIES, "<"))


def is_torchs(filename: str) -> bool:
    """Whether a file is a part of torch."""
    return filename.startswith(_LIBRARIES[0])


def is_librarys(filename: str) -> bool:
    """Whether a file is a part of torch or fxpipe."""
    return filename.startswith(_LIBRARIES)


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


def place_in(text: str) -> str:
    """The first line that a text names in traceback form, as "model.py:12"; empty where it names none."""
    found = LINE.search(text)
    return f"{Path(found['file']).name}:{found['line']}" if found else ""


def definition(function: Callable[..., object]) -> str:
    """Where a function is defined, in traceback form; empty where it has no Python code."""
    plain = _plain(function)
    if plain is None:
        return ""
    code = plain.__code__
    source = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\n    {source}'


def mentions(function: Callable[..., object], wanted: Callable[..., object]) -> bool:
    """Whether a function's own code names ``wanted``: directly, not through other functions that it calls."""
    plain = _plain(function)
    if plain is None:
        return False
    names = _names(plain.__code__)
    known = [plain.__globals__.get(name) for name in names] + [cell.cell_contents for cell in plain.__closure__ or ()]
    return wanted.__name__ in names or any(value is wanted for value in known)


def only_tells(frame: FrameType) -> bool:
    """Whether text that a line makes is for its reader alone: an argument of a call whose result nobody takes, such as
    ``check(length > 0, f"no {length}")`` or ``print(x.shape)``; not a key, say, of a table that the call looks into."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    return frame.f_lineno in _telling_lines(source)


@functools.lru_cache(64)
def _telling_lines(source: str) -> frozenset[int]:
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # written anew since it was imported, say
        return frozenset()
    calls = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    passed = {id(argument) for call in calls for argument in (*call.args, *(each.value for each in call.keywords))}
    used = (node for node in nodes if _makes_text(node) and id(node) not in passed)
    return _lines(calls) - _lines(used)


def _makes_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in ("str", "repr", "format")
    if isinstance(node, ast.Attribute):
        return node.attr in ("format", "join")
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))


def _lines(nodes: Iterable[Any]) -> frozenset[int]:
    return frozenset(line for node in nodes for line in range(node.lineno, node.end_lineno + 1))


def _plain(function: Callable[..., object]) -> FunctionType | None:
    """The Python function in a method, a partial, or an object that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        function = type(function).__call__
    return function if isinstance(function, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    """The globals and attributes that code names, and the functions inside it."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)


def _format(frame: FrameType, number: int) -> str:
    code = frame.f_code
    source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return f'  File "{code.co_filename}", line {number}, in {code.co_name}\n    {source}'
