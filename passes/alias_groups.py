"""Alias groups: which nodes share memory that some node writes. They must end up in one stage."""

from __future__ import annotations

from torch import fx

from fxpipe.errors import PartitionError
from fxpipe.ir import Program, before_boundary, is_boundary_value, where
from fxpipe.passes.effects import aliased, updates_own_buffers, written
from fxpipe.passes.union import Union


def alias_groups(program: Program) -> Program:
    """Fills ``Program.written``; PartitionError where a private copy would hide a write from a later reader."""
    shared = Union(program.graph.nodes)
    for node in program.graph.nodes:
        for source in aliased(program, node):
            shared.join(node, source)
    for calls in _calls_of_writing_modules(program).values():
        for call in calls[1:]:
            shared.join(calls[0], call)
    writes = {w: written(program, w) for w in program.graph.nodes if w.op.startswith("call_")}
    roots = {shared.find(target) for targets in writes.values() for target in targets}
    roots |= {shared.find(calls[0]) for calls in _calls_of_writing_modules(program).values()}
    for write, targets in writes.items():
        for target in targets:
            _check_private_copy(shared, write, target)
    groups = [group for group in shared.groups() if shared.find(group[0]) in roots]
    return program.replace(written=tuple(frozenset(node.name for node in group) for group in groups))


def _calls_of_writing_modules(program: Program) -> dict[int, list[fx.Node]]:
    """The calls of each module that updates its own buffers, by the module's identity."""
    calls: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_module":
            module = program.attribute(str(node.target))
            if updates_own_buffers(module):
                calls.setdefault(id(module), []).append(node)
    return calls


def _check_private_copy(shared: Union[fx.Node], write: fx.Node, target: fx.Node) -> None:
    """A write behind a boundary acts on a private copy, so nobody may read the original after it."""
    for member in shared.members(target):
        if not is_boundary_value(member):
            continue
        original = before_boundary(member)
        for reader in _readers(shared, original):
            if write < reader and not shared.same(reader, target):
                raise PartitionError(
                    f"{write.name}{where(write)} writes a value that crossed a stage boundary, and "
                    f"{reader.name}{where(reader)} reads the old value afterwards; the write acts on the later "
                    "stage's own copy, so write out of place, or read what was written"
                )


def _readers(shared: Union[fx.Node], original: fx.Node) -> list[fx.Node]:
    """Who uses a value or what shares its memory, through other boundaries too."""
    found: list[fx.Node] = []
    for alias in shared.members(original):
        for user in alias.users:
            found.extend(_behind(user) if user.op == "call_function" and _is_marker(user, alias) else [user])
    return found


def _is_marker(user: fx.Node, value: fx.Node) -> bool:
    return bool(user.users) and all(is_boundary_value(out) for out in user.users) and value in user.all_input_nodes


def _behind(marker: fx.Node) -> list[fx.Node]:
    return [reader for out in marker.users for reader in out.users]
