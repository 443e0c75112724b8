"""The pass pipeline: a tuple of functions, the check after each, and what may look on between them."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence

from fxpipe.errors import PartitionError
from fxpipe.ir import Program, is_compute

Pass = Callable[[Program], Program]
Callback = Callable[[Pass, Program, Program, float], None]
"""``callback(pass, before, after, seconds)``, called after every pass."""


def chain(passes: Sequence[Pass], program: Program, callbacks: Sequence[Callback] | None = None) -> Program:
    """Runs the passes in order; checks the program after each. Callbacks default to what FXPIPE_DEBUG asks for."""
    looking_on = _from_environment() if callbacks is None else callbacks
    for step in passes:
        start = time.perf_counter()
        after = step(program)
        seconds = time.perf_counter() - start
        for callback in looking_on:
            callback(step, program, after, seconds)
        check(after, _name(step))
        program = after
    return program


def check(program: Program, after: str) -> None:
    """PartitionError, naming the pass, unless the graph is well formed and every fact is about a node in it."""
    program.graph.lint()
    names = {node.name for node in program.graph.nodes}
    facts = {*program.copied, *program.stage_of, *(name for group in program.written for name in group)}
    if facts - names:
        raise PartitionError(f"pass {after} left facts about nodes that are gone: {sorted(facts - names)[:5]}")
    if not program.stage_of:
        return
    for node in program.graph.nodes:
        placed = (node.name in program.stage_of) + (node.name in program.copied)
        if is_compute(node) and placed != 1:
            raise PartitionError(f"pass {after} put {node.name} into {placed} places; it must be in exactly one")
        _check_order(program, node.name, [source.name for source in node.all_input_nodes], after)


def _check_order(program: Program, name: str, sources: list[str], after: str) -> None:
    stage = program.stage_of.get(name)
    for source in sources:
        if stage is not None and program.stage_of.get(source, -1) > stage:
            raise PartitionError(f"pass {after} put {source} behind {name}, which uses it")


def print_last(step: Pass, before: Program, after: Program, seconds: float) -> None:
    """FXPIPE_DEBUG=1: the program once its nodes have stages."""
    if after.stage_names and not before.stage_names:
        print(f"-- program after {_name(step)}\n{after}", file=sys.stderr)


def print_diff(step: Pass, before: Program, after: Program, seconds: float) -> None:
    """FXPIPE_DEBUG=2: what each pass changed, as a diff."""
    lines = difflib.unified_diff(
        str(before).splitlines(), str(after).splitlines(), "before", f"after {_name(step)}", lineterm="", n=1
    )
    print("\n".join(lines), file=sys.stderr)


def print_all(step: Pass, before: Program, after: Program, seconds: float) -> None:
    """FXPIPE_DEBUG=3: the whole program after each pass, and how long the pass took."""
    print(f"-- program after {_name(step)}, {seconds * 1e3:.1f} ms\n{after}", file=sys.stderr)


LEVELS: dict[str, tuple[Callback, ...]] = {
    "": (),
    "0": (),
    "1": (print_last,),
    "2": (print_diff,),
    "3": (print_all,),
}


def _from_environment() -> tuple[Callback, ...]:
    level = os.environ.get("FXPIPE_DEBUG", "")
    if level not in LEVELS:
        raise PartitionError(f"FXPIPE_DEBUG is {level!r}; it is one of 0, 1 (stages), 2 (diffs), 3 (everything)")
    return LEVELS[level]


def _name(step: Pass) -> str:
    return getattr(step, "__name__", repr(step))
