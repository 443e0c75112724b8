"""Name stages: names a stage after the earliest named boundary that opens it, or else its largest submodule.

Takes: a ``Program`` with ``stage_of``. Gives: ``Program.stage_names``, a different name for each stage.

1. A later capture has the names of the first.
2. The name is of the earliest named boundary in front of the stage's values; or of the submodule with most parameters
   among those that run in this stage only; or "stage3".
3. Equal names are numbered: tower, tower_2, tower_3.
"""

from __future__ import annotations

import itertools

from torch import nn
from torch.fx import Node

from fxpipe.graph.program import Program, called_in, is_boundary, is_boundary_value, made_by, passed
from fxpipe.passes.follow import stages_inside
from fxpipe.passes.gather import readers_of


def name_stages(program: Program) -> Program:
    """Fills ``Program.stage_names``; equal names are numbered: tower, tower_2, tower_3."""
    # 1. the first capture's names
    if program.first is not None:
        return program.replace(stage_names=program.first.stage_names)
    members, stages_in, opened = readers_of(program), stages_inside(program), _opened(program)
    # 2. a boundary's, a submodule's or a number's name
    names = [
        opened.get(stage) or _greatest_submodule(program, members[stage], stages_in) or f"stage{stage}"
        for stage in range(len(members))
    ]
    # 3. numbered where equal
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}_{count}" for count in itertools.count(2))
        free = (choice for choice in numbered if choice not in unique and choice not in names)
        unique.append(next(free) if name in unique else name)
    return program.replace(stage_names=tuple(unique))


def _opened(program: Program) -> dict[int, str]:
    """Returns stage → the name of the earliest named boundary that opens it.

    A boundary opens a stage that uses a value from behind the boundary, unless it precedes another such boundary: a
    skip connection from behind an earlier boundary opens nothing.
    """
    crossed: dict[int, list[list[Node]]] = {}  # stage → the boundaries in front of each value that it uses
    before: dict[Node, set[Node]] = {}  # node → the boundaries before it
    for node in program.nodes:
        before[node] = set().union(*(before[o] | ({o} if is_boundary(o) else set()) for o in node.all_input_nodes))
        if is_boundary_value(node):
            users = {program.stage_of[user.name] for user in node.users if user.name in program.stage_of}
            for stage in users - {program.stage_of.get(made_by(node).name, -1)}:
                crossed.setdefault(stage, []).append(passed(node))
    name_of: dict[int, str] = {}
    for stage, paths in crossed.items():
        # A boundary before another boundary of this stage opened an earlier stage.
        earlier = set().union(*(before[path[0]] for path in paths))
        openers = {boundary for path in paths if path[0] not in earlier for boundary in path}
        names = [boundary.args[1] for boundary in sorted(openers)]
        name_of[stage] = next((name for name in names if isinstance(name, str)), "")
    return name_of


def _greatest_submodule(program: Program, members: list[Node], stages_in: dict[str, set[int]]) -> str | None:
    """Returns the submodule with most parameters among the outermost that run in this stage only; the first if equal.

    A submodule that also runs in another stage does not distinguish this stage.
    """
    sizes_by_path: dict[str, dict[int, int]] = {}  # submodule → id of a parameter → its number of elements
    for node in members:
        path = next((path for path in called_in(node) if len(stages_in[path]) == 1), None)
        if path is None:
            continue
        values = [program.attribute(o) for o in map(made_by, node.all_input_nodes) if o.op == "get_attr"]
        if node.op == "call_module":
            values += program.attribute(node).parameters()
        sizes = {id(value): value.numel() for value in values if isinstance(value, nn.Parameter)}
        sizes_by_path.setdefault(path, {}).update(sizes)
    return max(sizes_by_path, key=lambda path: sum(sizes_by_path[path].values()), default=None)
