"""Name stages: after the earliest named boundary that opens them, or else after their first submodule."""

from __future__ import annotations

from torch import fx

from fxpipe.ir import Program, is_boundary_value


def name_stages(program: Program) -> Program:
    """Fills ``Program.stage_names``; equal names are numbered."""
    members: dict[int, list[fx.Node]] = {}
    stages_in: dict[str, set[int]] = {}
    for node in program.graph.nodes:
        if node.name in program.stage_of:
            stage = program.stage_of[node.name]
            members.setdefault(stage, []).append(node)
            for path in _paths(node):
                stages_in.setdefault(path, set()).add(stage)
    names = [
        _opened_by(program, set(members[stage])) or _first_submodule(members[stage], stages_in) or f"stage{stage}"
        for stage in range(len(members))
    ]
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return program.replace(stage_names=tuple(numbered))


def _opened_by(program: Program, members: set[fx.Node]) -> str | None:
    """The name of the earliest named boundary with a value that this stage uses."""
    for value in program.graph.nodes:
        if is_boundary_value(value) and members & set(value.users):
            name = value.args[0].args[1]
            if isinstance(name, str):
                return name
    return None


def _first_submodule(members: list[fx.Node], stages_in: dict[str, set[int]]) -> str | None:
    """The highest submodule that runs wholly inside this stage, of the first node that has one."""
    for node in members:
        for path in _paths(node):
            if len(stages_in[path]) == 1:
                return path
    return None


def _paths(node: fx.Node) -> list[str]:
    """The submodules that a node was called in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values() if path]
