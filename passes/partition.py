"""Partition: which stage each node runs in. The rule, in the words of the contract:

1. Inputs, parameters, buffers, what is behind a boundary, and copied nodes connect nothing.
2. An edge u→v without a boundary on it is cut all the same if it bypasses one: u is before it and v behind it.
3. What remains connected is a piece. Where pieces wait for each other, their nodes are separated wherever their sets
   of boundaries downstream differ, so that code moves to the side of its consumers; repeat while a cycle remains.
4. The pieces are the stages, in topological order, ties in program order.

It ends: every edge between fully separated pieces strictly shrinks the set of boundaries downstream.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxpipe.errors import PartitionError
from fxpipe.ir import Program, before_boundary, is_boundary, is_boundary_value, is_compute, where
from fxpipe.passes.effects import is_number, written
from fxpipe.passes.union import Union


@dataclass(frozen=True)
class _Edge:
    """A value made by ``source`` and used by ``target``, through ``boundaries`` (a bit each; 0 for none)."""

    source: fx.Node
    target: fx.Node
    boundaries: int


def partition(program: Program) -> Program:
    """Fills ``Program.stage_of`` by the rule above; PartitionError where no such cut keeps the program's meaning."""
    nodes = [n for n in program.graph.nodes if is_compute(n) and n.name not in program.copied]
    edges, boundaries = _edges(program, nodes)
    for marker, sources in boundaries:
        if not sources:
            raise PartitionError(
                f"{marker.name}{where(marker)} marks only values that depend on inputs alone, or on parameters "
                "alone; each stage computes those for itself, so there is nothing to cut. Mark what is computed "
                "from them"
            )
    units = _units(program, nodes, edges)
    downstream, upstream = _reach(nodes, edges, boundaries, units)

    # 2: what bypasses a boundary is cut
    joined = [
        edge
        for edge in edges
        if units.same(edge.source, edge.target)
        or (not edge.boundaries and not downstream[units.find(edge.source)] & upstream[units.find(edge.target)])
    ]
    # 3: pieces, separated until none waits for another that waits for it
    separated: set[fx.Node] = set()
    while True:
        pieces = _pieces(nodes, joined, units, downstream, separated)
        waiting = _cyclic(pieces, nodes, edges, joined)
        if not waiting:
            break
        more = {node for node in nodes if pieces.find(node) in waiting} - separated
        if not more:
            _refuse_cycle(program, nodes, pieces, waiting)
        separated |= more
    # 4: topological order
    order = _topological(pieces, nodes, edges)
    stage_of = {node.name: order[pieces.find(node)] for node in nodes}
    _check_versions(program, edges, stage_of)
    return program.replace(stage_of=stage_of)


def _check_versions(program: Program, edges: list[_Edge], stage_of: dict[str, int]) -> None:
    """A value leaves its stage as it is at the end: nobody elsewhere may want it as it was before a write."""
    writes = [node for node in program.graph.nodes if written(program, node)]
    for edge in edges:
        if stage_of[edge.source.name] == stage_of[edge.target.name]:
            continue
        group = next((group for group in program.written if edge.source.name in group), frozenset())
        for write in writes:
            if write.name in group and edge.target < write:
                raise PartitionError(
                    f"{edge.target.name}{where(edge.target)} runs in another stage and reads "
                    f"{edge.source.name}{where(edge.source)} as it was before {write.name}{where(write)} writes it; "
                    "write out of place"
                )


def _edges(program: Program, nodes: list[fx.Node]) -> tuple[list[_Edge], list[tuple[fx.Node, list[_Edge]]]]:
    """The edges between ``nodes``; and for each boundary the edges (to themselves) of what it marks."""
    markers = [node for node in program.graph.nodes if is_boundary(node)]
    bit = {marker: 1 << place for place, marker in enumerate(markers)}
    kept = set(nodes)

    def resolve(value: fx.Node) -> tuple[fx.Node, int]:
        crossed = 0
        while is_boundary_value(value):
            crossed |= bit[value.args[0]]
            value = before_boundary(value)
        return value, crossed

    edges = []
    for node in nodes:
        for operand in node.all_input_nodes:
            source, crossed = resolve(operand)
            if source in kept:
                edges.append(_Edge(source, node, crossed))
    marked = []
    for marker in markers:
        sources = [resolve(operand) for operand in marker.all_input_nodes]
        marked.append((marker, [_Edge(s, s, crossed | bit[marker]) for s, crossed in sources if s in kept]))
    return edges, marked


def _units(program: Program, nodes: list[fx.Node], edges: list[_Edge]) -> Union[fx.Node]:
    """Nodes that no cut may separate: what shares written memory, and a shape query with what it asks."""
    units = Union(nodes)
    by_name = {node.name: node for node in nodes}
    for group in program.written:
        members = [by_name[name] for name in sorted(group) if name in by_name]
        buffers = [n for n in program.graph.nodes if n.name in group and n.op == "get_attr"]
        members += [user for buffer in buffers for user in buffer.users if user in by_name.values()]
        for member in members[1:]:
            units.join(members[0], member)
    for edge in edges:
        if is_number(edge.target) and not edge.boundaries and len(edge.target.all_input_nodes) == 1:
            units.join(edge.source, edge.target)
    return units


def _reach(
    nodes: list[fx.Node],
    edges: list[_Edge],
    boundaries: list[tuple[fx.Node, list[_Edge]]],
    units: Union[fx.Node],
) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """For each unit the boundaries downstream of it, and those upstream, a bit each."""
    downstream = dict.fromkeys((units.find(node) for node in nodes), 0)
    upstream = dict(downstream)
    for _, marked in boundaries:
        for edge in marked:
            downstream[units.find(edge.source)] |= edge.boundaries
    changed = True
    while changed:  # once around is enough unless a unit spans much of the program
        changed = False
        for edge in reversed(edges):
            source, target = units.find(edge.source), units.find(edge.target)
            new = downstream[source] | downstream[target] | edge.boundaries
            changed, downstream[source] = changed or new != downstream[source], new
        for edge in edges:
            source, target = units.find(edge.source), units.find(edge.target)
            new = upstream[target] | upstream[source] | edge.boundaries
            changed, upstream[target] = changed or new != upstream[target], new
    return downstream, upstream


def _pieces(
    nodes: list[fx.Node],
    joined: list[_Edge],
    units: Union[fx.Node],
    downstream: dict[fx.Node, int],
    separated: set[fx.Node],
) -> Union[fx.Node]:
    pieces = Union(nodes)
    for node in nodes:
        pieces.join(units.find(node), node)
    for edge in joined:
        apart = (
            edge.source in separated
            and edge.target in separated
            and downstream[units.find(edge.source)] != downstream[units.find(edge.target)]
        )
        if not apart:
            pieces.join(edge.source, edge.target)
    return pieces


def _cyclic(pieces: Union[fx.Node], nodes: list[fx.Node], edges: list[_Edge], joined: list[_Edge]) -> set[fx.Node]:
    """The pieces that wait for themselves, directly (around a boundary) or through others."""
    uncut = set(joined)
    after: dict[fx.Node, set[fx.Node]] = {pieces.find(node): set() for node in nodes}
    for edge in edges:
        source, target = pieces.find(edge.source), pieces.find(edge.target)
        if source != target or edge not in uncut:
            after[source].add(target)
    return {piece for component in _components(after) for piece in component if _waits(after, component, piece)}


def _waits(after: dict[fx.Node, set[fx.Node]], component: list[fx.Node], piece: fx.Node) -> bool:
    return len(component) > 1 or piece in after[piece]


def _components(after: dict[fx.Node, set[fx.Node]]) -> list[list[fx.Node]]:
    """Strongly connected components: Tarjan (1972), without recursion."""
    index: dict[fx.Node, int] = {}
    low: dict[fx.Node, int] = {}
    stack: list[fx.Node] = []
    on_stack: set[fx.Node] = set()
    found: list[list[fx.Node]] = []
    for root in after:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(after[root]))]
        while work:
            node, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    place = stack.index(node)
                    found.append(stack[place:])
                    on_stack.difference_update(stack[place:])
                    del stack[place:]
            elif target not in index:
                index[target] = low[target] = len(index)
                stack.append(target)
                on_stack.add(target)
                work.append((target, iter(after[target])))
            elif target in on_stack:
                low[node] = min(low[node], index[target])
    return found


def _topological(pieces: Union[fx.Node], nodes: list[fx.Node], edges: list[_Edge]) -> dict[fx.Node, int]:
    """Piece → stage number: Kahn's order, the piece that begins first in the program first."""
    first: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        first.setdefault(pieces.find(node), place)
    arrows = {
        (pieces.find(edge.source), pieces.find(edge.target))
        for edge in edges
        if not pieces.same(edge.source, edge.target)
    }
    missing = dict.fromkeys(first, 0)
    for _, target in arrows:
        missing[target] += 1
    ready = [(place, piece) for piece, place in first.items() if not missing[piece]]
    heapq.heapify(ready)
    order: dict[fx.Node, int] = {}
    while ready:
        _, piece = heapq.heappop(ready)
        order[piece] = len(order)
        for target in sorted({t for s, t in arrows if s == piece}, key=first.__getitem__):
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, (first[target], target))
    return order


def _refuse_cycle(program: Program, nodes: list[fx.Node], pieces: Union[fx.Node], waiting: Iterable[fx.Node]) -> None:
    groups = [group for group in program.written for node in nodes if node.name in group]
    stuck = [n for n in nodes if pieces.find(n) in set(waiting) and any(n.name in group for group in groups)]
    names = ", ".join(f"{node.name}{where(node)}" for node in stuck[:4])
    raise PartitionError(
        f"{names} write or share memory that is written, so they must run in one stage, but a stage boundary lies "
        "between them; write out of place, or move the boundary"
    )
