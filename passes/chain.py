"""The pass pipeline: a tuple of functions, the check after each, and what may look on between them."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence

from torch import fx

from fxpipe.errors import PartitionError, noted
from fxpipe.graph.program import Program, is_compute, made_by

Pass = Callable[[Program], Program]
Callback = Callable[[Pass, Program, Program, float], None]
"""``callback(pass, before, after, seconds)``, called after every pass."""


def chain(passes: Sequence[Pass], program: Program, callbacks: Sequence[Callback] | None = None) -> Program:
    """Runs the passes in order; checks the program after each. Callbacks default to what FXPIPE_DEBUG asks for."""
    looking_on = _from_environment() if callbacks is None else callbacks
    for step in passes:
        start = time.perf_counter()
        with noted(lambda: f"in the pass {_name(step)}"):  # noqa: B023  (called before the next)
            after = step(program)
        seconds = time.perf_counter() - start
        for callback in looking_on:
            callback(step, program, after, seconds)
        check(after, _name(step))
        program = after
    return program


def check(program: Program, after: str) -> None:
    """PartitionError, naming the pass, unless the graph is well formed and every fact about it can be true."""
    if not isinstance(program, Program):
        raise PartitionError(f"pass {after} returned {type(program).__name__}; a pass returns a Program")
    try:
        program.graph.lint()
    except Exception as error:
        raise PartitionError(f"pass {after} left a graph that is not well formed: {error}") from error
    names = {node.name for node in program.graph.nodes}
    facts = {*program.copied, *program.stage_of, *(name for group in program.written for name in group)}
    if facts - names:
        raise PartitionError(f"pass {after} left facts about nodes that are gone: {sorted(facts - names)[:5]}")
    for node in program.graph.nodes:
        _check_copied(program, node, after)
    if program.stage_of:
        _check_stages(program, after)


def _check_copied(program: Program, node: fx.Node, after: str) -> None:
    for operand in node.all_input_nodes if node.name in program.copied else ():
        source = made_by(operand)
        if is_compute(source) and source.name not in program.copied:
            raise PartitionError(f"pass {after} copies {node.name}, but not {source.name}, which it depends on")


def _check_stages(program: Program, after: str) -> None:
    stages = set(program.stage_of.values())
    if stages != set(range(len(stages))):
        raise PartitionError(f"pass {after} numbered the stages {sorted(stages)}; they must be 0, 1, 2, … without gaps")
    if program.stage_names and len(set(program.stage_names)) != len(stages):
        raise PartitionError(
            f"pass {after} named {len(stages)} stages {list(program.stage_names)}; each needs its own name"
        )
    for node in program.graph.nodes:
        placed = (node.name in program.stage_of) + (node.name in program.copied)
        if is_compute(node) and placed != 1:
            raise PartitionError(f"pass {after} put {node.name} into {placed} places; it must be in exactly one")
        _check_order(program, node, after)
    for group in program.written:
        _check_together(program, group, after)


def _check_order(program: Program, node: fx.Node, after: str) -> None:
    stage = program.stage_of.get(node.name)
    for operand in node.all_input_nodes if stage is not None else ():
        source = made_by(operand)
        if program.stage_of.get(source.name, -1) > (stage or 0):
            raise PartitionError(f"pass {after} put {source.name} behind {node.name}, which uses it")


def _check_together(program: Program, group: frozenset[str], after: str) -> None:
    stages = {program.stage_of[name] for name in group if name in program.stage_of}
    if len(stages) > 1:
        raise PartitionError(
            f"pass {after} put {sorted(group)}, which share written memory, into stages {sorted(stages)}"
        )


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
