"""Alias groups: which nodes share memory that some node writes. They must end up in one stage."""

from __future__ import annotations

from torch import fx

from fxpipe.errors import PartitionError
from fxpipe.ir import Program, before_boundary, is_boundary, is_boundary_value, where
from fxpipe.passes.effects import aliased, is_number, own_writes, written
from fxpipe.passes.union import Union


def alias_groups(program: Program) -> Program:
    """Fills ``Program.written``; PartitionError where a private copy would hide a write from a later reader."""
    shared = Union(program.graph.nodes)
    for node in program.graph.nodes:
        for source in aliased(program, node):
            shared.join(node, source)
    groups = {shared.find(group[0]): group for group in shared.groups()}
    first_write: dict[fx.Node, fx.Node] = {}  # the first of each group that is written
    for node in program.graph.nodes:
        for target in written(program, node):
            first_write.setdefault(shared.find(target), node)
    written_groups = {write: groups[root] for root, write in first_write.items()}
    _check_private_copies(program, shared, written_groups)
    return program.replace(written=tuple(frozenset(n.name for n in group) for group in written_groups.values()))


def holders_of_written(program: Program) -> list[list[fx.Node]]:
    """For each parameter or buffer that is written, the nodes that name it and the calls of modules that hold it."""
    in_groups = frozenset().union(*program.written)
    holders: dict[int, list[fx.Node]] = {}
    changed: set[int] = set()
    for node in program.graph.nodes:
        for tensor in _held(program, node):
            holders.setdefault(tensor, []).append(node)
        if node.op == "call_module":
            changed |= {id(tensor) for tensor in own_writes(program.attribute(str(node.target)))}
        elif node.op == "get_attr" and node.name in in_groups:
            changed |= _held(program, node)
    return [nodes for tensor, nodes in holders.items() if tensor in changed]


def _held(program: Program, node: fx.Node) -> set[int]:
    """The parameters and buffers that a node names, or that the module it calls holds, by identity."""
    if node.op == "get_attr":
        return {id(program.attribute(str(node.target)))}
    if node.op == "call_module":
        module = program.attribute(str(node.target))
        return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return set()


def _check_private_copies(
    program: Program, shared: Union[fx.Node], written_groups: dict[fx.Node, list[fx.Node]]
) -> None:
    """A write behind a boundary acts on a private copy, so nobody may read what is still the original after it."""
    originals = Union(program.graph.nodes)  # what shares memory in the model itself, where a boundary copies nothing
    for node in program.graph.nodes:
        originals.join(shared.find(node), node)
        if is_boundary_value(node):
            originals.join(before_boundary(node), node)
    memory = {originals.find(group[0]): group for group in originals.groups()}
    for write, group in written_groups.items():
        if not any(is_boundary_value(member) for member in group):
            continue
        for member in memory[originals.find(write)]:
            if member.op == "get_attr" and not shared.same(member, write):
                raise PartitionError(
                    f"{write.name}{where(write)} writes {member.target} behind a stage boundary, on the later stage's "
                    "own copy, so the model would keep the old value; write it in front of the boundary"
                )
            reader = next((user for user in member.users if _reads_after(write, user)), None)
            if reader is not None and not shared.same(member, write):
                raise PartitionError(
                    f"{write.name}{where(write)} writes a value that crossed a stage boundary, and "
                    f"{reader.name}{where(reader)} reads the old value afterwards; the write acts on the later "
                    "stage's own copy, so write out of place, or read what was written"
                )


def _reads_after(write: fx.Node, user: fx.Node) -> bool:
    return write < user and not is_boundary(user) and not is_number(user)
