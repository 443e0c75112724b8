"""Partition: assigns each node to a stage.

Takes: a ``Program`` with ``written`` and ``copied``. Gives: ``Program.stage_of``, node's name → stage, by this rule:

1. Inputs, parameters, buffers, values behind a boundary, and copied nodes connect no other nodes.
2. An edge u→v without a boundary on it is also cut if it bypasses a boundary: u is before the boundary, v behind it.
3. Nodes that remain connected form a piece. If pieces wait for each other, their nodes are separated wherever their
   sets of downstream boundaries differ, so that code moves to the side of its consumers; repeat while a cycle remains.
4. The pieces are the stages, in topological order, ties in program order.

For example, a and b have boundaries behind them, and c uses both::

    x ── a ──┃── c          stage 0: a    stage 1: b    stage 2: c
    y ── b ──┃──┘

A skip connection from a to c that crosses no boundary is cut by 2, as it bypasses the boundary behind a.

An assertion, and a node that only assertions use, runs with the latest value that it reads, on that value's side of a
boundary, and never forms its own stage.

The iteration ends, since every edge between fully separated pieces strictly shrinks the set of downstream boundaries.
Each round costs about as much as the graph has edges. A later capture is not cut by this rule, but as the first one was
(``follow``). The pass does not balance stages: a search does that in its place, with ``blocks``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.fx import Node

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.program import (
    Program,
    called_in,
    gather_of,
    is_assertion,
    is_boundary,
    is_boundary_value,
    is_compute,
    made_by,
    passed,
    readers,
    where,
)
from fxpipe.graph.topological import topological_order
from fxpipe.passes.alias_groups import holders_of_written, tensor_ids
from fxpipe.passes.effects import is_number, named_arguments, nodes_in, writes_apart, written
from fxpipe.passes.follow import follow
from fxpipe.passes.union import Union
from fxpipe.stage.opaque_call import opaque_calls

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class _FlowEdge:
    """A value that ``source`` computes and ``target`` uses; ``marked``: through a boundary. Both are nodes to be
    placed."""

    source: Node
    target: Node
    marked: bool


def partition(program: Program) -> Program:
    """Fills ``Program.stage_of`` by the rule above, or as in ``Program.first``; PartitionError if no such cut preserves
    the program's meaning."""
    flow = _Flow(program)
    if program.first is not None:
        flow.join_readers_of_written(program)
        flow.join_cycles()
        after = flow.after(flow.units)
        order = topological_order({unit: index for index, unit in enumerate(after)}, after)
        return follow(program, program.first, flow.units, {unit: after[unit] for unit in order})
    # 1: only edges between the nodes to place count; _Flow omits inputs, parameters, boundaries and copied nodes
    find, upstream, downstream = flow.units.find, flow.boundaries(ahead=False), flow.boundaries(ahead=True)
    # 2: cut edges that bypass a boundary
    joined, cut = list[_FlowEdge](), list[_FlowEdge]()
    for edge in flow.edges:
        source, target = find(edge.source), find(edge.target)
        is_joined = not edge.marked and (source == target or not downstream[source] & upstream[target])
        (joined if is_joined else cut).append(edge)
    # 3: separate pieces until no pieces wait for each other
    separated: set[Node] = set()
    while True:
        pieces = Union(flow.nodes)
        for node in flow.nodes:
            pieces.join(find(node), node)
        for edge in joined:
            # Code moves to the side of its consumers: nodes with the same downstream boundaries stay together.
            apart = downstream[find(edge.source)] != downstream[find(edge.target)]
            if not (apart and edge.source in separated and edge.target in separated):
                pieces.join(edge.source, edge.target)
        # A piece waits for itself through other pieces, or directly, by an edge around a boundary.
        after = flow.after(pieces)
        cycles = {piece for component in components(after) if len(component) > 1 for piece in component}
        cycles |= {pieces.find(edge.source) for edge in cut if pieces.same(edge.source, edge.target)}
        waiting = [node for node in flow.nodes if pieces.find(node) in cycles]
        if not waiting:
            break
        # If all waiting nodes are separated already, a unit that no cut may separate holds them together.
        if separated.issuperset(waiting):
            raise _cycle(program, waiting)
        separated.update(waiting)
    # 4: topological order; among ties, the piece that begins first in the program comes first
    order = topological_order({piece: index for index, piece in enumerate(after)}, after)
    program = program.replace(stage_of={node.name: order[pieces.find(node)] for node in flow.nodes})
    _check_writes(program, flow.edges)
    return program


class _Flow:
    """The input of the rule: the nodes to place, the edges between them, and the boundaries on and before the edges.

    A shape query joins its tensor, also across a boundary that does not gather: then the number crosses the boundary.
    """

    def __init__(self, program: Program) -> None:
        self.nodes = [n for n in program.nodes if is_compute(n) and n.name not in program.copied]
        self.edges: list[_FlowEdge] = []
        self.units = Union(self.nodes)
        """Nodes that no cut may separate: nodes that share written memory, nodes that forward itself differentiates,
        and a shape query with its tensor."""
        self._arrows: list[tuple[Node, Node]] = []  # (earlier node, later node), including boundaries
        self._behind: dict[Node, frozenset[Node]] = {}  # copied node or number → the boundaries that it is behind
        self._markers = [node for node in program.nodes if is_boundary(node)]
        self._is_first = program.first is None  # later captures are not cut at their boundaries
        # Units first: the arrows below go from unit to unit, and later steps read the joined units.
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
        """Joins the nodes that share written memory, and the readers of written parameters, buffers and private
        copies."""
        by_name = {node.name: node for node in program.nodes}
        for group in program.written:
            members = [by_name[name] for name in sorted(group)]
            # The value behind a boundary is a copy of the value in front; only its own stage writes the copy.
            copies = [node for node in members if is_boundary_value(node)]  # readers of a copy must see the writes
            self._join([*members, *(reader for node in copies for reader in node.users)])
        for holders in holders_of_written(program):
            named = [node for node in holders if node.op == "get_attr"]
            self._join([*holders, *(reader for node in named for reader in readers(node))])

    def join_readers_of_written(self, program: Program) -> None:
        """Joins readers that must run in the same stage as a write.

        A value leaves its stage in its final state, and an input arrives as in the batch. So a node that reads the
        value from before a write, or the written input by an older name, stays with the write.
        """
        for edge, _ in reads_before_writes(program, self.edges):
            self.units.join(edge.source, edge.target)
        for _, write, reader in reads_of_written_inputs(program):
            self._join([write, reader])
        # A Python attribute that an opaque region changes exists on each rank separately.
        users: dict[tuple[str, str], Node] = {}
        for node in self.nodes:
            for call in opaque_calls(program.opaque.get(str(node.target))):
                for attribute in call.attributes:
                    self.units.join(users.setdefault(attribute, node), node)

    def join_cycles(self) -> None:
        """Joins units that wait for each other."""
        for component in components(self.after(self.units)):
            self.units.join(*component)

    def _join(self, nodes: list[Node]) -> None:
        """Joins the nodes among these that are to be placed."""
        placed = [node for node in nodes if node in self.units]
        if placed:
            self.units.join(*placed)

    def _resolve(self, value: Node) -> tuple[Node, frozenset[Node]]:
        """Returns the node that computes a value, and the boundaries between that node and the value's reader."""
        maker = made_by(value)
        return maker, self._behind.get(maker, frozenset()).union(passed(value))

    def _add_boundary(self, marker: Node) -> None:
        """Adds a boundary to the arrows. PartitionError for one that marks only values that each stage computes
        itself."""
        marked = [self._resolve(operand) for operand in marker.all_input_nodes]
        is_first = self._is_first and gather_of(marker) is None
        if is_first and not any(source in self.units for source, _ in marked):
            raise PartitionError(
                f"{marker.name}{where(marker)} marks only values that depend on inputs alone, or on parameters "
                "alone; each stage computes those for itself, so there is nothing to cut. Mark what is computed "
                "from them; the first stage needs no boundary"
            )
        self._add_arrows(marker, marked)

    def _add_node(self, node: Node, operands: list[tuple[Node, frozenset[Node]]]) -> None:
        """Adds a node's edges and arrows, or joins it: an assertion to its latest input, a shape query to its
        tensor."""
        sources = [source for source, _ in operands if source in self.units]
        behind = frozenset[Node]().union(*(crossed for _, crossed in operands))
        if node in self._checks and sources:
            latest = max(sources)  # holds the value before the value crosses any boundary
            self._join([latest, node])
            self.edges += [_FlowEdge(source, node, True) for source in sources if source is not latest]
            self._add_arrows(node, [(source, frozenset()) for source in sources])
        elif node not in self.units:
            self._behind[node] = behind
        # A gathering boundary changes the number of rows, so that a query behind it stays behind it.
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
        """Returns group, in the order of the groups' first nodes → the other groups that use its values."""
        users: dict[Node, set[Node]] = {groups.find(node): set() for node in self.nodes}
        for edge in self.edges:
            if not groups.same(edge.source, edge.target):
                users[groups.find(edge.source)].add(groups.find(edge.target))
        return users

    def boundaries(self, ahead: bool) -> dict[Node, int]:
        """Returns unit → the bits of the boundaries ``ahead`` of the unit, or of the boundaries that it is behind.

        A fixed point over the arrows, in program order. One round suffices unless a unit spans much of the program.
        """
        arrows = [(after, before) for before, after in reversed(self._arrows)] if ahead else self._arrows
        unit = {node: self.units.find(node) for node in self.nodes}
        bits = dict.fromkeys(unit.values(), 0)
        # A bit per boundary: the union of two sets is a single "or", for any number of boundaries.
        bits |= {marker: 1 << bit for bit, marker in enumerate(self._markers)}
        changed = True
        while changed:  # a single iteration suffices unless a unit spans much of the program
            changed = False
            for start, end in ((unit.get(start, start), unit.get(end, end)) for start, end in arrows):
                now = bits[end] | bits[start]
                changed, bits[end] = changed or now != bits[end], now
        return bits


def _checks(nodes: list[Node]) -> set[Node]:
    """Returns the assertions, and the nodes that only assertions use."""
    checks: set[Node] = set()
    # Backwards: all users of a node are known before it.
    for node in reversed(nodes):
        if is_assertion(node) or (node.users and checks.issuperset(node.users)):
            checks.add(node)
    return checks


def _check_writes(program: Program, edges: list[_FlowEdge]) -> None:
    """PartitionError if a node in another stage reads a value from before a write, or a written input: a value leaves
    its stage in its final state, and an input arrives as in the batch."""
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
    """Yields (edge, write): the edge's target reads the value from before the last write to its memory."""
    writes = _writes(program)
    for edge in edges:
        own = writes.get(edge.source.name)
        if own and edge.target < own[-1] and not writes_apart(program, edge.source):
            yield edge, own[-1]


def reads_of_written_inputs(program: Program) -> Iterator[tuple[Node, Node, Node]]:
    """Yields (input, write, reader): the reader comes after the first write to the input's memory, by an older name."""
    writes = _writes(program)
    for node in program.nodes:
        if node.op == "placeholder" and node.name in writes:
            first = writes[node.name][0]
            yield from ((node, first, reader) for reader in readers(node) if first < reader)


def _writes(program: Program) -> dict[str, list[Node]]:
    """Returns node name → the writes, in program order, to the memory of the node."""
    writes_of: dict[str, list[Node]] = {}
    for group in program.written:
        writes: list[Node] = []
        writes_of |= dict.fromkeys(group, writes)
    for node in program.nodes:
        if node.name in writes_of and written(program, node):
            writes_of[node.name].append(node)
    return writes_of


def components(after: dict[T, set[T]]) -> list[list[T]]:
    """Returns the strongly connected components, by the two walks of Kosaraju and Sharir (1981). Linear in nodes and
    edges.

    ``after``: node → the nodes behind it. A component of one node is no cycle.
    """
    before: dict[T, list[T]] = {node: [] for node in after}
    for node, targets in after.items():
        for target in targets:
            before[target].append(node)
    # The second walk follows reversed edges, from the node that the first walk left last.
    left = [node for walk in _walks(after, after) for node in walk]
    return _walks(before, reversed(left))


def _walks(after: Mapping[T, Iterable[T]], starts: Iterable[T]) -> list[list[T]]:
    """Returns the nodes that each start's walk reaches first, in the order in which a depth-first walk leaves them."""
    seen: set[T] = set()
    walks = []
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
        walks.append(walk)
    return walks


def _cycle(program: Program, waiting: list[Node]) -> PartitionError:
    """Returns the error for nodes that wait for themselves: only nodes that no cut may separate can remain."""
    shared = frozenset().union(*program.written)
    stuck = [node for node in waiting if node.name in shared] or waiting
    names = ", ".join(f"{node.name}{where(node)}" for node in stuck[:4])
    return PartitionError(
        f"{names} write or share memory that is written, so they must run in one stage, but a stage boundary lies "
        "between them; write out of place, or move the boundary"
    )


# --- Lone writes: writes without edges to or from other nodes, such as a batch norm's count of its calls ---


def hosts_of_lone_writes(program: Program, units: Union[Node]) -> list[tuple[Node, Node]]:
    """Returns (a node of the unit, the node to run it with) for each unit that only writes.

    The host is the next node of the same submodule, or of the nearest enclosing submodule; or else the last node.
    """
    connected = _connected(program, units)
    written = frozenset().union(*program.written)
    hosts: dict[Node, tuple[Node, Node | None]] = {}
    following: dict[str, Node] = {}  # submodule → the next node that was called in it
    last: Node | None = None
    # Backwards, so that at a lone write the next node of each submodule is known.
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
    pairs = ((node, host or last) for node, host in hosts.values())
    return [(node, host) for node, host in pairs if host is not None]


def _connected(program: Program, units: Union[Node]) -> set[Node]:
    """Returns the units with an edge to or from another unit, or to the output."""
    connected: set[Node] = set()
    for node in program.nodes:
        for source in map(made_by, node.all_input_nodes):
            if source not in units:
                continue
            if node.op == "output":
                connected.add(units.find(source))
            elif node in units and not units.same(source, node):
                connected |= {units.find(source), units.find(node)}
    return connected


# --- Inner gradients: nodes that forward itself differentiates (forces, gradient penalties) must be in one stage ---


def inner_gradients(program: Program) -> list[list[Node]]:
    """Returns, for each ``torch.autograd.grad`` in forward, the nodes that the gradient passes, and the call;
    TraceError if a boundary is among these nodes."""
    gradients = []
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
        gradients.append([*between, node])
    return gradients


def _between(program: Program, call: Node) -> list[Node]:
    """Returns the nodes between a gradient's ``inputs`` and its ``outputs``, in program order.

    A write is between them if its target is. A parameter among the inputs also starts at the modules that hold it.
    """
    arguments = named_arguments(call)
    sources = set(nodes_in(arguments["inputs"]))
    # The gradient with respect to a parameter also starts at every module that holds the parameter.
    tensors = {tensor for source in sources for tensor in tensor_ids(program, source)}
    entries = {n for n in program.nodes if n.op == "call_module" and tensor_ids(program, n) & tensors}
    before = [node for node in program.nodes if node < call]
    # Forwards from the gradient's inputs, then backwards from its outputs: nodes in both sets are between them.
    reached = sources | entries
    for node in before:
        if any(operand in reached for operand in node.all_input_nodes):
            reached |= {node, *written(program, node)}
    wanted = set(nodes_in(arguments["outputs"]))
    for node in reversed(before):
        if node in wanted or any(target in wanted for target in written(program, node)):
            wanted |= {node, *node.all_input_nodes}
    passed = (reached & wanted) - sources | (entries & wanted)
    passed |= {node for node in sources & wanted if any(operand in reached for operand in node.all_input_nodes)}
    return [node for node in before if node in passed]
