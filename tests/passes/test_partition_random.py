"""Random programs: the rule, written down a second time in the contract's own words, gives the same stages."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpipe import PartitionError, passes
from fxpipe.graph.boundary import boundary
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.passes.chain import chain
from tests.capturing import run_stages
from tests.thinned import ALL

BLOCKS = range(8)
PROGRAMS_A_BLOCK = 100 if ALL else 15
COMPUTING = ("op", "view", "random", "write", "shape", "size", "product")
NUMBERS = ("shape", "size", "product")


@dataclass(frozen=True)
class Item:
    """One item of a random program, known by its place in the list. ``of``: the places of what it uses."""

    kind: str
    """input, parameter, marker, value (of a marker), or one of COMPUTING."""
    of: tuple[int, ...] = ()
    which: int = 0
    """Of a value: which of the marker's."""


@dataclass
class Draft:
    """A program in the making: four sources, then what is drawn."""

    draw: random.Random
    items: list[Item] = field(default_factory=lambda: [Item(k) for k in ("input", "input", "parameter", "parameter")])
    tensors: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    sizes: list[int] = field(default_factory=list)

    def add(self, kind: str, *of: int, which: int = 0) -> int:
        self.items.append(Item(kind, of, which))
        return len(self.items) - 1

    def grow(self, kind: str) -> None:
        recent = self.tensors[-8:]
        if kind == "marker":
            marked = self.draw.sample(recent, self.draw.randint(1, 3))
            marker = self.add("marker", *marked)
            self.tensors += [self.add("value", marker, which=i) for i in range(len(marked))]
        elif kind == "size":
            self.sizes.append(self.add("size", self.add("shape", self.draw.choice(recent))))
        elif kind == "product":
            if self.sizes:
                self.sizes.append(self.add("product", self.draw.choice(self.sizes), self.draw.choice(self.sizes)))
        elif kind == "op" and self.sizes and self.draw.random() < 0.3:
            self.tensors.append(self.add("op", self.draw.choice(recent), self.draw.choice(self.sizes)))
        else:
            one, other = self.draw.choice(recent), self.draw.choice([*recent, *self.tensors[:4]])
            self.tensors.append(self.add(kind, one, *[other] * (kind in ("op", "write"))))


def random_items(seed: int, writes: bool) -> list[Item]:
    """A DAG of 6 to 24 operations, about one in six of them a boundary."""
    draft = Draft(random.Random(seed))
    kinds = "op op op op op op view random size product marker marker".split() + ["write"] * 2 * writes
    for _ in range(draft.draw.randint(6, 24)):
        draft.grow(draft.draw.choice(kinds))
    return draft.items


def program_of(items: list[Item]) -> Program:
    """The program, as a tracer would have made it: node ``n7`` is item 7. It returns all that has no other user."""
    module = nn.Module()
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for place, item in enumerate(items):
        if item.kind == "parameter":
            setattr(module, f"p{place}", nn.Parameter(torch.tensor([0.1, 0.2, 0.3]) * place))
        nodes.append(_node(graph, place, item, [nodes[source] for source in item.of]))
    used = {source for item in items for source in item.of}
    graph.output(
        tuple(
            node for place, node in enumerate(nodes) if place not in used and items[place].kind in (*COMPUTING, "value")
        )
    )
    return Program(module, graph)


def _node(graph: fx.Graph, place: int, item: Item, of: list[fx.Node]) -> fx.Node:
    kinds: dict[str, tuple[str, Any, Callable[[], tuple[Any, ...]]]] = {
        "input": ("placeholder", f"n{place}", lambda: ()),
        "parameter": ("get_attr", f"p{place}", lambda: ()),
        "op": ("call_function", operator.add, lambda: (of[0], of[1])),
        "view": ("call_method", "view", lambda: (of[0], -1)),
        "random": ("call_function", torch.dropout, lambda: (of[0], 1e-30, True)),  # random, and drops nothing
        "write": ("call_method", "add_", lambda: (of[0], of[1])),
        "shape": ("call_function", getattr, lambda: (of[0], "shape")),
        "size": ("call_function", operator.getitem, lambda: (of[0], 0)),
        "product": ("call_function", operator.mul, lambda: (of[0], of[1])),
        "marker": ("call_function", boundary, lambda: (of, None)),
        "value": ("call_function", operator.getitem, lambda: (of[0], item.which)),
    }
    op, target, arguments = kinds[item.kind]
    return graph.create_node(op, target, arguments(), name=f"n{place}")


# The rule, step by step as the contract has it. Places instead of nodes, sets instead of bits, no cleverness.


@dataclass(frozen=True)
class Arrow:
    """A value made at ``source`` and used at ``target``, and the markers that it has crossed on the way."""

    source: int
    target: int
    crossed: frozenset[int]


class Rule:
    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.places = range(len(items))

    def origin(self, place: int) -> int:
        """What is in front of all markers that a value is behind."""
        item = self.items[place]
        return self.origin(self.items[item.of[0]].of[item.which]) if item.kind == "value" else place

    def markers_on(self, place: int) -> frozenset[int]:
        item = self.items[place]
        if item.kind != "value":
            return frozenset()
        return self.markers_on(self.items[item.of[0]].of[item.which]) | {item.of[0]}

    @cached_property
    def copied(self) -> set[int]:
        """Deterministic, without writes, on no parameter or on parameters alone."""
        depends: dict[int, set[str]] = {}
        for place in self.places:
            item = self.items[place]
            origins = [self.origin(source) for source in item.of]
            if item.kind in ("input", "parameter"):
                depends[place] = {item.kind}
            elif item.kind in COMPUTING and item.kind != "random" and all(o in depends for o in origins):
                on = set().union(*(depends[o] for o in origins))
                if len(on) == 1:
                    depends[place] = on
        return {place for place in depends if self.items[place].kind in COMPUTING}

    @cached_property
    def placed(self) -> list[int]:
        return [p for p in self.places if self.items[p].kind in COMPUTING and p not in self.copied]

    def asked(self, place: int) -> int:
        """What a shape query stays with: what it asks, and arithmetic on sizes of one tensor with that tensor."""
        if self.items[place].kind not in NUMBERS:
            return place
        of = {self.asked(self.origin(o)) for o in self.items[place].of if self.origin(o) in self.placed}
        return of.pop() if len(of) == 1 else place

    def crossed(self, place: int) -> frozenset[int]:
        """The markers between ``place`` and what makes it, where a number or a copied node crosses as itself."""
        origin = self.origin(place)
        found = self.markers_on(place)
        if origin in self.copied or (origin in self.placed and self.asked(origin) != origin):
            found = found.union(*(self.crossed(source) for source in self.items[origin].of))
        return found

    @cached_property
    def arrows(self) -> list[Arrow]:
        return [
            Arrow(self.asked(self.origin(source)), place, self.crossed(source))
            for place in self.placed
            if self.asked(place) == place
            for source in self.items[place].of
            if self.origin(source) in self.placed
        ]

    @cached_property
    def reachable(self) -> dict[int, set[int]]:
        """Place → everything behind it, markers included."""
        after: dict[int, set[int]] = {place: set() for place in self.places}
        for place in [*self.placed, *(p for p in self.places if self.items[p].kind == "marker")]:
            if self.asked(place) == place or place not in self.placed:
                for source in self.items[place].of:
                    after[self.asked(self.origin(source))].add(place)
                    for marker in self.crossed(source):
                        after[marker].add(place)
        return {place: closure(after, place) for place in self.places}

    def downstream(self, place: int) -> set[int]:
        return {p for p in self.reachable[place] if self.items[p].kind == "marker"}

    def bypasses(self, arrow: Arrow) -> bool:
        return any(arrow.target in self.reachable[marker] for marker in self.downstream(arrow.source))

    def pieces(self, separated: set[int]) -> list[set[int]]:
        """What is connected by uncut arrows."""
        beside: dict[int, set[int]] = {place: set() for place in self.placed}
        for arrow in self.arrows:
            apart = {arrow.source, arrow.target} <= separated
            if arrow in self.uncut and not (apart and self.downstream(arrow.source) != self.downstream(arrow.target)):
                beside[arrow.source].add(arrow.target)
                beside[arrow.target].add(arrow.source)
        for place in self.placed:
            beside[place].add(self.asked(place))
            beside[self.asked(place)].add(place)
        return [set(piece) for piece in {frozenset(closure(beside, p) | {p}) for p in self.placed}]

    @cached_property
    def uncut(self) -> set[Arrow]:
        return {arrow for arrow in self.arrows if not arrow.crossed and not self.bypasses(arrow)}

    def waiting(self, pieces: list[set[int]]) -> set[int]:
        """The nodes of pieces that wait for each other, or for themselves."""
        piece_of = {place: number for number, piece in enumerate(pieces) for place in piece}
        after: dict[int, set[int]] = {number: set() for number in range(len(pieces))}
        for arrow in self.arrows:
            source, target = piece_of[arrow.source], piece_of[arrow.target]
            if source != target or arrow not in self.uncut:
                after[source].add(target)
        return set().union(*(piece for number, piece in enumerate(pieces) if number in closure(after, number)))

    def stages(self) -> set[frozenset[int]]:
        separated: set[int] = set()
        while True:
            pieces = self.pieces(separated)
            waiting = self.waiting(pieces)
            if not waiting:
                return {frozenset(piece) for piece in pieces}
            assert waiting - separated, "the contract says that it ends"
            separated |= waiting

    @property
    def marks_copies_alone(self) -> bool:
        """Whether some marker has nothing to cut."""
        return any(
            not any(self.origin(source) in self.placed for source in item.of)
            for item in self.items
            if item.kind == "marker"
        )

    @property
    def returns_copies_alone(self) -> bool:
        used = {source for item in self.items for source in item.of}
        ends = {p for p in self.places if p not in used and self.items[p].kind in (*COMPUTING, "value")}
        return not any(self.origin(p) in self.placed for p in ends)


def closure(after: dict[int, set[int]], start: int) -> set[int]:
    """Everything that is reached from ``start``, which is in it only if it lies on a cycle."""
    found: set[int] = set()
    waiting = list(after[start])
    while waiting:
        place = waiting.pop()
        if place not in found:
            found.add(place)
            waiting.extend(after[place])
    return found


# The properties.


def partitioned(items: list[Item]) -> Program:
    return chain(passes.default(), program_of(items))


def places_by_stage(program: Program) -> set[frozenset[int]]:
    found: dict[int, set[int]] = {}
    for name, stage in program.stage_of.items():
        found.setdefault(stage, set()).add(int(name[1:]))
    return {frozenset(places) for places in found.values()}


def assert_acyclic_and_convex(rule: Rule, program: Program) -> None:
    """Every path of the program, markers erased, goes through the stages in order, so none comes back to one."""
    for place in rule.placed:
        for source in rule.items[place].of:
            origin = f"n{rule.origin(source)}"
            assert program.stage_of.get(origin, 0) <= program.stage_of[f"n{place}"]


def assert_complete(rule: Rule, program: Program, graph: StageGraph) -> None:
    """Every node is in one stage, copies aside, and those are only where they are needed."""
    everywhere = [node.name for stage in graph for node in stage.module.graph.nodes]
    for place in rule.placed:
        computed = [stage for stage in graph if f"n{place}" in names_computed(stage.module)]
        assert [stage.index for stage in computed] == [program.stage_of[f"n{place}"]]
    assert everywhere
    for stage in graph:
        for node in stage.module.graph.nodes:
            assert node.users or node.op == "output" or node.name in program.stage_of, "a copy that nothing uses"


def names_computed(module: fx.GraphModule) -> set[str]:
    return {node.name for node in module.graph.nodes if node.op.startswith("call_")}


def run_whole(program: Program, inputs: dict[str, Tensor]) -> Any:
    return fx.Interpreter(fx.GraphModule(program.module, program.graph)).run(*inputs.values())


def fresh_inputs() -> dict[str, Tensor]:
    return {"n0": torch.tensor([1.0, 2.0, 3.0]), "n1": torch.tensor([-1.0, 0.5, 0.25])}


@pytest.mark.parametrize("block", BLOCKS)
def test_random_programs_are_cut_as_the_rule_says(block: int) -> None:
    cut = 0
    for seed in range(block * 10_000, (block + 1) * 10_000):
        items = random_items(seed, writes=False)
        rule = Rule(items)
        if rule.marks_copies_alone:
            with pytest.raises(PartitionError, match="inputs alone"):
                partitioned(items)
            continue
        program = partitioned(items)
        assert program.copied == {f"n{place}" for place in rule.copied}, seed
        assert places_by_stage(program) == rule.stages(), seed
        if not rule.returns_copies_alone and len(set(program.stage_of.values())) > 1:
            check_split(rule, program)
            cut += 1
        if cut == PROGRAMS_A_BLOCK:
            return
    pytest.fail("too few of the random programs can be cut")


def check_split(rule: Rule, program: Program) -> None:
    graph = passes.split(program)
    assert all(edge.source < edge.target for edge in graph.edges)
    assert_acyclic_and_convex(rule, program)
    assert_complete(rule, program, graph)
    with torch.no_grad():
        torch.testing.assert_close(
            run_stages(graph, fresh_inputs()), run_whole(program, fresh_inputs()), rtol=0, atol=0
        )


@pytest.mark.parametrize("block", BLOCKS)
def test_a_random_program_with_writes_is_refused_or_right(block: int) -> None:
    """Right: what the whole program computes, in which a boundary copies nothing."""
    cut = 0
    for seed in range(block * 10_000, (block + 1) * 10_000):
        items = random_items(seed, writes=True)
        try:
            program = partitioned(items)
            graph = passes.split(program)
        except PartitionError:
            continue
        if len(graph) < 2 or not program.written:
            continue
        with torch.no_grad():
            whole = program_of(items)
            wanted = run_whole(whole, fresh_inputs())
            torch.testing.assert_close(
                run_stages(graph, fresh_inputs()), wanted, rtol=0, atol=0, msg=lambda m, s=seed: f"seed {s}: {m}"
            )
            for name, parameter in program.module.named_parameters():
                assert torch.equal(parameter, whole.module.get_parameter(name)), seed
        cut += 1
        if cut == PROGRAMS_A_BLOCK // 2:
            return
    pytest.fail("too few of the random programs with writes can be cut")


def test_the_random_programs_hold_what_the_rule_is_about() -> None:
    """Enough of them have several boundaries, copies, numbers, and a cycle to separate."""
    rules = [Rule(random_items(seed, writes=False)) for seed in range(400)]
    rules = [rule for rule in rules if not rule.marks_copies_alone]
    assert sum(bool(rule.waiting(rule.pieces(set()))) for rule in rules) > 10
    assert sum(bool(rule.copied) for rule in rules) > 100
    assert sum(any(rule.asked(p) != p for p in rule.placed) for rule in rules) > 50
    assert sum(sum(item.kind == "marker" for item in rule.items) > 1 for rule in rules) > 50
