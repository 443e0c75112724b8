"""The pass pipeline: runs a tuple of functions, checks the program after each, and prints it for FXPIPE_DEBUG.

Takes: passes, and a ``Program``. Gives: the program after the last pass, or a PartitionError that names the pass.

For each pass: 1. run it; 2. print the program (level 3) or its difference (level 2); 3. check it; 4. print the stages
when the first names appear (level 1).
"""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence

from fxpipe.errors import PartitionError, noted
from fxpipe.graph.program import Program, is_compute, made_by

Pass = Callable[[Program], Program]
LEVELS = ("", "0", "1", "2", "3")


def chain(passes: Sequence[Pass], program: Program) -> Program:
    """Runs the passes in order; checks the program after each, and prints programs as FXPIPE_DEBUG says."""
    level = os.environ.get("FXPIPE_DEBUG", "")
    if level not in LEVELS:
        raise PartitionError(f"FXPIPE_DEBUG is {level!r}; it is one of 0, 1 (stages), 2 (diffs), 3 (everything)")
    for step in passes:
        name = getattr(step, "__name__", repr(step))
        # 1. run the pass
        start = time.perf_counter()
        with noted(lambda: f"in the pass {name}"):  # noqa: B023  (called before the next)
            after = step(program)
        seconds = time.perf_counter() - start
        # 2. to 4. print and check
        if level == "3":
            print(f"-- program after {name}, {seconds * 1e3:.1f} ms\n{after}", file=sys.stderr)
        if level == "2":
            texts = str(program).splitlines(), str(after).splitlines()
            diff = difflib.unified_diff(*texts, "before", f"after {name}", lineterm="", n=1)
            print("\n".join(diff), file=sys.stderr)
        check(after, name)
        if level == "1" and after.stage_names and not program.stage_names:
            print(f"-- program after {name}\n{after}", file=sys.stderr)
        program = after
    return program


def check(program: Program, after: str) -> None:
    """PartitionError, naming the pass, unless the graph is well formed and the program's facts fit the graph.

    These are the facts:

    - Each compute node is in one stage, or is copied; a copied node depends on inputs, tensors of the model and copied
      nodes only.
    - No value goes to an earlier stage.
    - Stages are numbered without gaps, and have different names.
    - Nodes that share written memory are in one stage.
    """
    if not isinstance(program, Program):
        raise PartitionError(f"pass {after} returned {type(program).__name__}; a pass returns a Program")
    try:
        program.graph.lint()
    except Exception as error:
        raise PartitionError(f"pass {after} left a graph that is not well formed: {error}") from error
    copied, stage_of = program.copied, program.stage_of
    last = max(stage_of.values(), default=0)
    facts = {*copied, *stage_of, *(name for group in program.written for name in group)}
    gone = facts - {node.name for node in program.nodes}
    if gone:
        raise PartitionError(f"pass {after} left facts about nodes that are gone: {sorted(gone)[:5]}")
    for node in program.nodes:
        for source in map(made_by, node.all_input_nodes):
            if node.name in copied and is_compute(source) and source.name not in copied:
                raise PartitionError(f"pass {after} copies {node.name}, but not {source.name}, which it depends on")
            if stage_of.get(source.name, -1) > stage_of.get(node.name, last):
                raise PartitionError(f"pass {after} put {source.name} behind {node.name}, which uses it")
        places = (node.name in stage_of) + (node.name in copied)
        if stage_of and is_compute(node) and places != 1:
            raise PartitionError(f"pass {after} put {node.name} into {places} places; it must be in exactly one")
    stages, names = sorted(set(stage_of.values())), program.stage_names
    if program.first is not None:  # some stages of the first program may be idle in this program
        stages = list(range(max(len(program.first.stage_names), last + 1)))
    if stages != list(range(len(stages))):
        raise PartitionError(f"pass {after} numbered the stages {stages}; they must be 0, 1, 2, … without gaps")
    if stages and names and len(set(names)) != len(stages):
        raise PartitionError(f"pass {after} named {len(stages)} stages {list(names)}; each needs its own name")
    for group in program.written:
        together = sorted({stage_of[name] for name in group if name in stage_of})
        if len(together) > 1:
            raise PartitionError(
                f"pass {after} put {sorted(group)}, which share written memory, into stages {together}"
            )
