"""Partition: which stage each node runs in. The rule, in the words of the contract:

1. Inputs, parameters, buffers, what is behind a boundary, and copied nodes connect nothing.
2. An edge u→v without a boundary on it is cut all the same if it bypasses one: u is before it and v behind it.
3. What remains connected is a piece. Where pieces wait for each other, their nodes are separated wherever their sets
   of boundaries downstream differ, so that code moves to the side of its consumers; repeat while a cycle remains.
4. The pieces are the stages, in topological order, ties in program order.

An assertion, and what is computed for assertions alone, runs with the latest value that it looks at, on that value's
side of a boundary, and is never a stage of its own.

It ends: every edge between fully separated pieces strictly shrinks the set of boundaries downstream.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.fx import Node

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.program import (
    Program,
    before_boundary,
    called_in,
    gather_of,
    is_assertion,
    is_boundary,
    is_boundary_value,
    is_compute,
    made_by,
    readers,
    where,
)
from fxpipe.graph.topological import topological_order
from fxpipe.passes.alias_groups import held, holders_of_written
from fxpipe.passes.effects import is_number, named_arguments, nodes_in, writes_apart, written
from fxpipe.passes.follow import follow
from fxpipe.passes.union import Union

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class _FlowEdge:
    """A value made by ``source`` and used by ``target``; ``marked``: through a boundary."""

    source: Node
    target: Node
    marked: bool


def partition(program: Program) -> Program:
    """Fills ``Program.stage_of`` by the rule above, or as in ``Program.first``; PartitionError where no such cut keeps
    the program's meaning."""
    flow = _Flow(program)
    if program.first is not None:
        flow.join_readers_of_written(program)
        flow.join_cycles()
        after = flow.after(flow.units)
        order = topological_order({unit: place for place, unit in enumerate(after)}, after)
        return follow(
            program, program.first, flow.units, {unit: after[unit] for unit in sorted(after, key=order.__getitem__)}
        )
    # 1: only edges between the nodes to place count; _Flow leaves inputs, parameters, boundaries and copies out
    find, upstream = flow.units.find, flow.upstream()
    downstream = flow.downstream()
    # 2: what bypasses a boundary is cut
    joined, cut = list[_FlowEdge](), list[_FlowEdge]()
    for edge in flow.edges:
        source, target = find(edge.source), find(edge.target)
        is_joined = not edge.marked and (source == target or not downstream[source] & upstream[target])
        (joined if is_joined else cut).append(edge)
    # 3: pieces, separated until none waits for another that waits for it
    separated: set[Node] = set()
    while True:
        pieces = Union(flow.nodes)
        for node in flow.nodes:
            pieces.join(find(node), node)
        for edge in joined:
            # Code moves to the side of its consumers: nodes that the same boundaries follow stay together.
            apart = downstream[find(edge.source)] != downstream[find(edge.target)]
            if not (apart and edge.source in separated and edge.target in separated):
                pieces.join(edge.source, edge.target)
        # a piece waits for itself through others, or directly, around a boundary
        after = flow.after(pieces)
        cycles = {piece for component in components(after) if len(component) > 1 for piece in component}
        cycles |= {pieces.find(edge.source) for edge in cut if pieces.same(edge.source, edge.target)}
        waiting = [node for node in flow.nodes if pieces.find(node) in cycles]
        if not waiting:
            break
        # What still waits although all of it is separated is held together by a unit, which nothing may cut.
        if separated.issuperset(waiting):
            raise _cycle(program, waiting)
        separated.update(waiting)
    # 4: topological order, the piece that begins first in the program first
    order = topological_order({piece: place for place, piece in enumerate(after)}, after)
    program = program.replace(stage_of={node.name: order[pieces.find(node)] for node in flow.nodes})
    _check_writes(program, flow.edges)
    return program


class _Flow:
    """What the rule looks at: the nodes to place, the edges between them, the boundaries on and before those.

    A shape query belongs to what it asks, also behind a boundary, unless that gathers: it is the number that crosses.
    """

    def __init__(self, program: Program) -> None:
        self.nodes = [n for n in program.nodes if is_compute(n) and n.name not in program.copied]
        self.edges: list[_FlowEdge] = []
        self.units = Union(self.nodes)
        """Nodes that no cut may separate: what shares written memory, what forward itself differentiates, and a shape
        query with what it asks."""
        self._arrows: list[tuple[Node, Node]] = []  # who is before whom, boundaries included
        self._behind: dict[Node, frozenset[Node]] = {}  # the boundaries that a copied node or a number is behind
        self._markers = [node for node in program.nodes if is_boundary(node)]
        self._is_first = program.first is None  # capture: later ones are not cut at their boundaries
        # Units first: the arrows below go from unit to unit, and the checks look at what is joined already.
        self._join_written(program)
        for path in inner_gradients(program):
            self._join(path)
        self._checks = _checks(self.nodes)
        for write, host in hosts_of_lone_writes(program, self.units):
            self.units.join(write, host)
        for node in program.nodes:
            if is_boundary(node):
                self._add_boundary(node)
            elif is_compute(node):
                self._add_node(node, [self._resolve(operand) for operand in node.all_input_nodes])

    def _join_written(self, program: Program) -> None:
        by_name = {node.name: node for node in program.nodes}
        for group in program.written:
            members = [by_name[name] for name in sorted(group)]
            # The value behind a boundary is a copy of the one in front of it; only its own stage writes it.
            copies = [node for node in members if is_boundary_value(node)]  # whoever reads one must see what is written
            self._join([*members, *(reader for node in copies for reader in node.users)])
        for holders in holders_of_written(program):
            named = [node for node in holders if node.op == "get_attr"]
            self._join([*holders, *(reader for node in named for reader in readers(node))])

    def join_readers_of_written(self, program: Program) -> None:
        """Joins what could not run in another stage than a write.

        A value leaves its stage as it is at the end, and an input comes as the batch has it: who reads one as it was
        before a write, or by another name than was written, stays with the write.
        """
        for edge, _ in reads_before_writes(program, self.edges):
            self.units.join(edge.source, edge.target)
        for _, write, reader in reads_of_written_inputs(program):
            self._join([write, reader])
        # an attribute of Python's that a region changes is one rank's own
        users: dict[tuple[str, str], Node] = {}
        for node in self.nodes:
            for call in opaque_calls(program.opaque.get(str(node.target))):
                for attribute in call.attributes:
                    self.units.join(users.setdefault(attribute, node), node)

    def join_cycles(self) -> None:
        """Units that wait for each other become one."""
        for component in components(self.after(self.units)):
            self.units.join(*component)

    def _join(self, nodes: list[Node]) -> None:
        placed = [node for node in nodes if node in self.units]
        if placed:
            self.units.join(*placed)

    def _resolve(self, value: Node) -> tuple[Node, frozenset[Node]]:
        """The node that makes a value, and the boundaries that the value has crossed on its way from there."""
        crossed: set[Node] = set()
        # A value may cross several boundaries on its way; each of them separates its maker from its reader.
        while is_boundary_value(value):
            crossed.add(value.all_input_nodes[0])
            value = before_boundary(value)
        return value, self._behind.get(value, frozenset()) | crossed

    def _add_boundary(self, marker: Node) -> None:
        marked = [self._resolve(operand) for operand in marker.all_input_nodes]
        is_first = self._is_first and gather_of(marker) is None
        if is_first and not any(source in self.units for source, _ in marked):
            raise PartitionError(
                f"{marker.name}{where(marker)} marks only values that depend on inputs alone, or on parameters "
                "alone; each stage computes those for itself, so there is nothing to cut. Mark what is computed "
                "from them"
            )
        self._add_arrows(marker, marked)

    def _add_node(self, node: Node, operands: list[tuple[Node, frozenset[Node]]]) -> None:
        sources = [source for source, _ in operands if source in self.units]
        behind = frozenset[Node]().union(*(crossed for _, crossed in operands))
        if node in self._checks and sources:
            latest = max(sources)  # which has the value before it crosses any boundary
            self._join([latest, node])
            self.edges += [_FlowEdge(source, node, True) for source in sources if source is not latest]
            self._add_arrows(node, [(source, frozenset()) for source in sources])
        elif node not in self.units:
            self._behind[node] = behind
        # behind a boundary that gathers, that boundary alone decides how many rows there are
        elif is_number(node) and len({self.units.find(s) for s in sources}) == 1 and not any(map(gather_of, behind)):
            self._join([node, *sources])
            self._behind[node] = behind
        else:
            self.edges += [_FlowEdge(s, node, bool(crossed)) for s, crossed in operands if s in self.units]
            self._add_arrows(node, operands)

    def _add_arrows(self, node: Node, operands: list[tuple[Node, frozenset[Node]]]) -> None:
        for source, crossed in operands:
            before = [source, *crossed] if source in self.units else crossed
            self._arrows += [(earlier, node) for earlier in before]

    def after(self, groups: Union[Node]) -> dict[Node, set[Node]]:
        """Each group, in the order in which they begin → the others that use values of it."""
        found: dict[Node, set[Node]] = {groups.find(node): set() for node in self.nodes}
        for edge in self.edges:
            if not groups.same(edge.source, edge.target):
                found[groups.find(edge.source)].add(groups.find(edge.target))
        return found

    def downstream(self) -> dict[Node, int]:
        """For each unit the boundaries that it is before, a bit each."""
        return self._spread([(after, before) for before, after in reversed(self._arrows)])

    def upstream(self) -> dict[Node, int]:
        """For each unit the boundaries that it is behind, a bit each."""
        return self._spread(self._arrows)

    def _spread(self, arrows: list[tuple[Node, Node]]) -> dict[Node, int]:
        """What reaches each unit along the arrows, from the boundaries on."""
        unit = {node: self.units.find(node) for node in self.nodes}
        found = dict.fromkeys(unit.values(), 0)
        # One bit for each boundary: the union of two sets is a single "or", however many boundaries there are.
        found |= {marker: 1 << place for place, marker in enumerate(self._markers)}
        changed = True
        while changed:  # once around is enough unless a unit spans much of the program
            changed = False
            for start, end in ((unit.get(start, start), unit.get(end, end)) for start, end in arrows):
                now = found[end] | found[start]
                changed, found[end] = changed or now != found[end], now
        return found


def _checks(nodes: list[Node]) -> set[Node]:
    """The nodes that only assertions need, and these."""
    found: set[Node] = set()
    # Backwards: all users of a node are known before it.
    for node in reversed(nodes):
        if is_assertion(node) or (node.users and found.issuperset(node.users)):
            found.add(node)
    return found


def _check_writes(program: Program, edges: list[_FlowEdge]) -> None:
    """PartitionError where another stage wants a value, or an input, as a write leaves it nowhere: a value leaves its
    stage as it is at the end, and an input comes as the batch has it."""
    for edge, write in reads_before_writes(program, edges):
        if program.stage_of[edge.source.name] != program.stage_of[edge.target.name]:
            raise PartitionError(
                f"{edge.target.name}{where(edge.target)} runs in another stage and reads "
                f"{edge.source.name}{where(edge.source)} as it was before {write.name}{where(write)} writes it; "
                "write out of place"
            )
    for node, write, reader in reads_of_written_inputs(program):
        stage = program.output_stage if reader.op == "output" else program.stage_of.get(reader.name)
        if stage != program.stage_of[write.name]:
            raise PartitionError(
                f"{reader.name}{where(reader)} reads the input {node.name} in another stage than "
                f"{write.name}{where(write)}, which writes it; write out of place, or read what was written"
            )


def reads_before_writes(program: Program, edges: list[_FlowEdge]) -> Iterator[tuple[_FlowEdge, Node]]:
    """(edge, write): the edge's value is read as it was before the last write to its memory."""
    writes = _writes(program)
    for edge in edges:
        own = writes.get(edge.source.name)
        if own and edge.target < own[-1] and not writes_apart(program, edge.source):
            yield edge, own[-1]


def reads_of_written_inputs(program: Program) -> Iterator[tuple[Node, Node, Node]]:
    """(input, write, reader): the input is read after the first write to its memory, by a name of it that is older."""
    writes = _writes(program)
    for node in program.nodes:
        if node.op == "placeholder" and node.name in writes:
            first = writes[node.name][0]
            yield from ((node, first, reader) for reader in readers(node) if first < reader)


def _writes(program: Program) -> dict[str, list[Node]]:
    """Node name → the writes, in program order, to the memory that it is a part of."""
    found: dict[str, list[Node]] = {}
    for group in program.written:
        writes: list[Node] = []
        found |= dict.fromkeys(group, writes)
    for node in program.nodes:
        if node.name in found and written(program, node):
            found[node.name].append(node)
    return found


def components(after: dict[T, set[T]]) -> list[list[T]]:
    """Strongly connected components: the two walks of Kosaraju and Sharir (1981)."""
    before: dict[T, list[T]] = {node: [] for node in after}
    for node, targets in after.items():
        for target in targets:
            before[target].append(node)
    # The second walk goes against the arrows, from the node that the first walk left last.
    left = [node for walk in _walks(after, after) for node in walk]
    return _walks(before, reversed(left))


def _walks(after: Mapping[T, Iterable[T]], starts: Iterable[T]) -> list[list[T]]:
    """From each start what no earlier one has reached, depth first, in the order in which the nodes are left."""
    seen: set[T] = set()
    found = []
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        walk: list[T] = []
        path = [(start, iter(after[start]))]
        while path:  # without recursion
            node, targets = path[-1]
            target = next((target for target in targets if target not in seen), None)
            if target is None:
                walk.append(node)
                path.pop()
            else:
                seen.add(target)
                path.append((target, iter(after[target])))
        found.append(walk)
    return found


def _cycle(program: Program, waiting: list[Node]) -> PartitionError:
    """Only what must not be separated can still wait for itself."""
    shared = frozenset().union(*program.written)
    stuck = [node for node in waiting if node.name in shared] or waiting
    names = ", ".join(f"{node.name}{where(node)}" for node in stuck[:4])
    return PartitionError(
        f"{names} write or share memory that is written, so they must run in one stage, but a stage boundary lies "
        "between them; write out of place, or move the boundary"
    )


# --- Lone writes: those that no value leads to or from, such as a batch norm's count of its calls ---


def hosts_of_lone_writes(program: Program, units: Union[Node]) -> list[tuple[Node, Node]]:
    """(a node of each unit that only writes, the node to run it with), for units of the nodes to place.

    It is the next node of the same submodule, or of the nearest around it; or else the last of all.
    """
    connected = _connected(program, units)
    written = frozenset().union(*program.written)
    hosts: dict[Node, tuple[Node, Node | None]] = {}
    following: dict[str, Node] = {}  # submodule → the next node that was called in it
    last: Node | None = None
    # Backwards, so that the next node of each submodule is known where a lone write is met.
    for node in reversed(program.nodes):
        if node not in units:
            continue
        paths = ["", *called_in(node)]
        if units.find(node) in connected:
            if not is_number(node):
                last = last or node
                following.update(dict.fromkeys(paths, node))
        elif node.name in written:
            host = next((following[path] for path in reversed(paths) if path in following), None)
            hosts[units.find(node)] = node, host
    found = ((node, host or last) for node, host in hosts.values())
    return [(node, host) for node, host in found if host is not None]


def _connected(program: Program, units: Union[Node]) -> set[Node]:
    """The units that a value leads to or from."""
    found: set[Node] = set()
    for node in program.nodes:
        for source in map(made_by, node.all_input_nodes):
            if source not in units:
                continue
            if node.op == "output":
                found.add(units.find(source))
            elif node in units and not units.same(source, node):
                found |= {units.find(source), units.find(node)}
    return found


# --- Inner gradients: what forward itself differentiates (forces, gradient penalties) must lie in one stage ---


def inner_gradients(program: Program) -> list[list[Node]]:
    """For each ``torch.autograd.grad`` in forward, the call and the nodes that it goes through; TraceError where a
    boundary is one of them."""
    found = []
    for node in program.nodes:
        if node.target is not torch.autograd.grad:
            continue
        between = _between(program, node)
        marker = next((other for other in between if is_boundary(other)), None)
        if marker is not None:
            raise TraceError(
                f"forward computes a gradient{where(node)} through the stage boundary {marker.name}{where(marker)},"
                " and autograd knows only what its own stage has computed; move the boundary behind the gradient, "
                "or in front of what it is taken by (requires_grad_ and all that follows)"
            )
        found.append([*between, node])
    return found


def _between(program: Program, call: Node) -> list[Node]:
    """The nodes on the way from what a gradient is taken by to what it is taken of, in program order.

    A write is on the way where what it writes is. A parameter enters with the modules that hold it, too.
    """
    given = named_arguments(call)
    sources = set(nodes_in(given["inputs"]))
    # A gradient by a parameter starts at every module that holds the parameter, too.
    tensors = {tensor for source in sources for tensor in held(program, source)}
    entries = {n for n in program.nodes if n.op == "call_module" and held(program, n) & tensors}
    before = [node for node in program.nodes if node < call]
    # Forwards from the inputs of the gradient, then backwards from its outputs: what is in both is on the way.
    reached = sources | entries
    for node in before:
        if any(operand in reached for operand in node.all_input_nodes):
            reached |= {node, *written(program, node)}
    wanted = set(nodes_in(given["outputs"]))
    for node in reversed(before):
        if node in wanted or any(target in wanted for target in written(program, node)):
            wanted |= {node, *node.all_input_nodes}
    passed = (reached & wanted) - sources | (entries & wanted)
    passed |= {node for node in sources & wanted if any(operand in reached for operand in node.all_input_nodes)}
    return [node for node in before if node in passed]
