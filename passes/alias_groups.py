"""Alias groups: finds the nodes that share memory which a node writes. Such nodes must be in the same stage.

Takes: a ``Program`` whose writes are ordered (``order_writes``). Gives: the same graph, with ``Program.written``, a set
of node names for each written memory.

1. Nodes that may share memory are joined, by the schemas of their operators (``effects.aliased``).
2. A write joins the node that writes with the memory that it writes.
3. A value behind a boundary is a copy. If a node reads the original after a write to the copy, the model would behave
   differently in stages: PartitionError.
4. The groups with a write are the result; all other groups are dropped.

For example, of ``y = x.view(-1); y.add_(1); z = x * 2`` the group has the nodes x, view and add_. The node mul reads
the written memory, and is not in the group.
"""

from __future__ import annotations

from torch.fx import Node

from fxpipe.errors import PartitionError
from fxpipe.graph.program import Effects, Program, before_boundary, is_boundary, is_boundary_value, where
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.passes.effects import aliased, is_number, is_random, own_writes, writes_apart, written
from fxpipe.passes.union import Union


def alias_groups(program: Program) -> Program:
    """Fills ``Program.written``; PartitionError if a private copy would hide a write from a later reader. The graph
    stays."""
    # 1. and 2. memory without and with the nodes that write
    memory, together = shared_memory(program), shared_memory(program, with_writers=True)
    first_write: dict[Node, Node] = {}  # representative of a memory → the first node that writes it
    for node in program.nodes:
        for target in written(program, node):
            first_write.setdefault(memory.find(target), node)
    _check_private_copies(program, memory, first_write)  # 3. copies behind boundaries
    # 4. groups with a write
    roots = {together.find(target) for target in first_write}
    groups = [group for group in together.groups() if together.find(group[0]) in roots]
    return program.replace(written=tuple(frozenset(node.name for node in group) for group in groups))


def shared_memory(program: Program, with_writers: bool = False) -> Union[Node]:
    """Groups the nodes by the memory that they may share; ``with_writers`` adds all nodes that write the memory."""
    memory = Union(program.nodes)
    for node in program.nodes:
        # A batch norm writes its running mean and returns a new tensor: it must run with all nodes that use the mean,
        # but its result does not share the mean's memory.
        for source in aliased(program, node) if with_writers or not writes_apart(program, node) else ():
            memory.join(node, source)
    return memory


def holders_of_written(program: Program) -> list[list[Node]]:
    """Returns, for each written parameter or buffer, its ``get_attr`` nodes and the calls of modules that hold it."""
    holders: dict[int, list[Node]] = {}
    for node in program.nodes:
        for tensor in tensor_ids(program, node):
            holders.setdefault(tensor, []).append(node)
    changed = _changed(program)
    return [nodes for tensor, nodes in holders.items() if tensor in changed]


def names_of_written(program: Program) -> frozenset[str]:
    """Returns the names of the parameters and buffers that forward writes, for this or an earlier kind of batch."""
    tensors, changed = all_tensors(program.module), _changed(program)
    return frozenset(name for name, tensor in tensors.items() if id(tensor) in changed)


def names_written_by_batch(program: Program) -> frozenset[str]:
    """Returns the names of the parameters that operators write by the batch's values, or by random numbers."""
    memory, by_batch, roots = shared_memory(program), set[Node](), set[Node]()
    for node in program.nodes:
        reads = any(source in by_batch for source in node.all_input_nodes)
        if node.op == "placeholder" or (reads and not is_number(node)) or is_random(program, node):
            by_batch.add(node)
            roots |= {memory.find(target) for target in written(program, node)}
    attributes = [node for node in program.nodes if node.op == "get_attr" and memory.find(node) in roots]
    ids = {id(program.attribute(node)) for node in attributes}
    return frozenset(name for name, tensor in all_tensors(program.module).items() if id(tensor) in ids)


def nodes_of_written(program: Program) -> frozenset[str]:
    """Returns the nodes that name a parameter or buffer that forward writes, or call a module that holds it."""
    changed = _changed(program)
    return frozenset(node.name for node in program.nodes if tensor_ids(program, node) & changed)


def _changed(program: Program) -> set[int]:
    """Returns the ids of the parameters and buffers that forward writes."""
    in_groups = frozenset().union(*program.written)
    changed = set[int]() if program.first is None else _changed(program.first)
    for node in program.nodes:
        if node.op == "call_module":
            effects = program.effects.get(node.name, Effects())
            seen = [program.attribute(name) for name in effects.writes]
            changed |= {id(tensor) for tensor in (*own_writes(program.attribute(node)), *seen)}
        elif node.op == "get_attr" and node.name in in_groups:
            changed |= tensor_ids(program, node)
    return changed


def tensor_ids(program: Program, node: Node) -> set[int]:
    """Returns the ids of the parameters and buffers that a node names, or that the module it calls holds or uses."""
    if node.op == "get_attr":
        return {id(program.attribute(node))}
    if node.op != "call_module":
        return set()
    module, effects = program.attribute(node), program.effects.get(node.name, Effects())
    used = [program.attribute(name) for name in (*effects.reads, *effects.writes)]
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *used)}


def _check_private_copies(program: Program, memory: Union[Node], first_write: dict[Node, Node]) -> None:
    """PartitionError if a node reads the original value after a write behind a boundary, which acts on a copy."""
    originals = Union(program.nodes)  # nodes that share memory in the model itself, where a boundary copies nothing
    for node in program.nodes:
        originals.join(memory.find(node), node)
        if is_boundary_value(node):
            originals.join(before_boundary(node), node)
    # Only writes to memory that holds a copy matter: of other memory, readers see the written value.
    copies = {memory.find(node) for node in program.nodes if is_boundary_value(node)}
    members = {originals.find(group[0]): group for group in originals.groups()}
    for target, write in first_write.items():
        if memory.find(target) not in copies:
            continue
        for member in members[originals.find(target)]:
            if memory.same(member, target):
                continue
            if member.op == "get_attr":
                raise PartitionError(
                    f"{write.name}{where(write)} writes {member.target} behind a stage boundary, on the later stage's "
                    "own copy, so the model would keep the old value; write it in front of the boundary"
                )
            reads = (user for user in member.users if write < user and not is_boundary(user) and not is_number(user))
            reader = next(reads, None)
            if reader is not None:
                raise PartitionError(
                    f"{write.name}{where(write)} writes a value that crossed a stage boundary, and "
                    f"{reader.name}{where(reader)} reads the old value afterwards; the write acts on the later "
                    "stage's own copy, so write out of place, or read what was written"
                )
