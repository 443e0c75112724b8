"""A graph of blocks with what each takes, which is all that a balance looks at.

A block is the smallest piece that may be placed: a few nodes of a program, or a stage whose cut is given already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from fxpipe.graph.program import Program, is_compute, made_by
from fxpipe.passes.alias_groups import nodes_of_written
from fxpipe.passes.blocks import blocks
from fxpipe.passes.effects import acts
from fxpipe.plan.balance.node_costs import NodeCost, NodeCosts, total


@dataclass(frozen=True)
class Block:
    """A piece of the program with what it takes for one micro-batch.

    ``copies``: the copied nodes that it needs, which are not in it: each stage has its own, once.
    """

    nodes: tuple[str, ...]
    cost: NodeCost
    copies: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        return self.cost.forward + self.cost.backward


@dataclass(frozen=True)
class BlockValue:
    """A value that one block makes and others use."""

    source: int
    targets: tuple[int, ...]
    size: int
    """Its bytes."""
    returned: bool = False
    """Whether the model's result has it, too, which is put together in the last stage that makes some of it."""


@dataclass(frozen=True)
class BlockGraph:
    """Blocks and the values between them; acyclic, numbered in any order."""

    blocks: tuple[Block, ...]
    values: tuple[BlockValue, ...]
    result: tuple[int, ...]
    """The blocks that make the model's result."""
    costs: NodeCosts
    """What copied nodes take, and the bytes behind all keys."""
    gather: Mapping[int, int | None] = field(default_factory=dict)
    """Blocks that run for several micro-batches at once → for how many, None for all; each is a stage then."""
    given: bool = False
    """Whether each block is a stage already, and only its rank is open."""
    alone: frozenset[int] = frozenset()
    """Blocks that must run on one rank: those that may change what the model holds."""

    def __len__(self) -> int:
        return len(self.blocks)

    def seconds(self, blocks: Iterable[int] | None = None) -> float:
        """What these blocks take, or all."""
        return sum(self.blocks[block].seconds for block in (range(len(self)) if blocks is None else blocks))

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The blocks whose values a block uses, each once, by number."""
        found: list[set[int]] = [set() for _ in self.blocks]
        for value in self.values:
            for target in value.targets:
                found[target].add(value.source)
        return tuple(tuple(sorted(sources)) for sources in found)

    @cached_property
    def shared(self) -> frozenset[int]:
        """The parameters that several blocks use."""
        # A tied parameter, or one that a copied node reads: its gradient is summed where its blocks are on several
        # ranks.
        count = Counter(key for block in self.blocks for key in self.stage([block]).parameters)
        return frozenset(key for key, users in count.items() if users > 1)

    def stage(self, blocks: Sequence[Block]) -> NodeCost:
        """What a stage of these blocks takes, with its own copies of copied nodes."""
        copies = frozenset[str]().union(*(block.copies for block in blocks))
        return total([*(block.cost for block in blocks), *(self.costs[name] for name in sorted(copies))])

    @cached_property
    def stage_of(self) -> Callable[[tuple[int, ...]], NodeCost]:
        """The same by their numbers, computed once."""
        return cache(lambda numbers: self.stage([self.blocks[number] for number in numbers]))

    def after(self, group_of: Sequence[int]) -> dict[int, set[int]]:
        """Group → the other groups that use its values. ``group_of``: block → its group."""
        found: dict[int, set[int]] = {group: set() for group in group_of}
        for value in self.values:
            source = group_of[value.source]
            found[source] |= {group_of[target] for target in value.targets} - {source}
        return found

    def merged(self, group_of: Sequence[int]) -> BlockGraph:
        """The same work with blocks put together: ``group_of`` says which new block each becomes a part of."""
        # A value between two blocks of one group is inside of it, and no longer one that a cut sees.
        groups: dict[int, list[Block]] = {}
        for block, group in zip(self.blocks, group_of, strict=True):
            groups.setdefault(group, []).append(block)
        values = []
        for value in self.values:
            source = group_of[value.source]
            targets = tuple(sorted({group_of[target] for target in value.targets} - {source}))
            if targets or value.returned:
                values.append(BlockValue(source, targets, value.size, value.returned))
        return replace(
            self,
            blocks=tuple(_together(groups[number]) for number in range(len(groups))),
            values=tuple(values),
            result=tuple(sorted({group_of[block] for block in self.result})),
            gather={group_of[block]: size for block, size in self.gather.items()},
            alone=frozenset(group_of[block] for block in self.alone),
        )


def _together(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    nodes = tuple(name for block in blocks for name in block.nodes)
    copies = frozenset[str]().union(*(block.copies for block in blocks))
    return Block(nodes, total(block.cost for block in blocks), copies)


def work_of_program(program: Program, costs: NodeCosts) -> BlockGraph:
    """The finest work: what a cut may separate. The program has no boundaries."""
    cut = blocks(program)
    values = tuple(
        BlockValue(source, targets, costs[name].bytes_out, name in cut.returned) for name, source, targets in cut.values
    )
    copies = _copies(program)
    made = [
        Block(names, costs.block(names), frozenset[str]().union(*map(copies.__getitem__, names))) for names in cut.nodes
    ]
    return BlockGraph(tuple(made), values, cut.result, costs, alone=_alone(program, cut.nodes))


def work_of_stages(program: Program, costs: NodeCosts) -> BlockGraph:
    """A block for each stage of a program that is cut, by number, with its own copies of copied nodes."""
    copies, stage_of = _copies(program), program.stage_of
    names: list[set[str]] = [set() for _ in range(1 + max(stage_of.values()))]
    for name, stage in stage_of.items():
        names[stage] |= {name, *copies[name]}
    order = {node.name: place for place, node in enumerate(program.nodes) if is_compute(node)}
    # Each stage runs the copied nodes that it needs itself, so they count in each; in program order, since what is kept
    # for backward adds up in that order.
    members = [sorted(some & order.keys(), key=order.__getitem__) for some in names]
    # A value crosses a cut where a node of another stage uses it. The model's result is put together in its last stage.
    last = program.output_stage or 0
    uses: dict[str, dict[int, None]] = {}
    for node in program.nodes:
        place = last if node.op == "output" else stage_of.get(node.name)
        for name in (made_by(operand).name for operand in node.all_input_nodes):
            if place is not None and stage_of.get(name, place) != place:
                uses.setdefault(name, {})[place] = None
    own = {  # a gathered stage's copies run once for its group
        stage: {name: costs[name].part(group.size) for name in program.copied.intersection(members[stage])}
        for stage, group in costs.groups.items()
    }
    return BlockGraph(
        tuple(Block(tuple(some), costs.block(some, own.get(stage, {}))) for stage, some in enumerate(members)),
        tuple(BlockValue(stage_of[name], tuple(targets), costs[name].bytes_out) for name, targets in uses.items()),
        (last,),
        costs,
        {stage: gather.group for stage, gather in program.gathered.items()},
        given=True,
        alone=_alone(program, members),
    )


def _alone(program: Program, members: Sequence[Sequence[str]]) -> frozenset[int]:
    """The blocks of these nodes that use what forward writes of what the model holds, or may do more than compute."""
    # A stage on several ranks would write on one of them what the others read.
    written = nodes_of_written(program)
    found = {name for group in program.written if group & written for name in group} | written
    found |= {node.name for node in program.nodes if node.op.startswith("call_") and acts(program, node)}
    return frozenset(number for number, names in enumerate(members) if found.intersection(names))


def _copies(program: Program) -> dict[str, frozenset[str]]:
    """Node → the copied nodes that it is computed from."""
    found: dict[str, frozenset[str]] = {}
    for node in program.nodes:
        used = {made_by(operand).name for operand in node.all_input_nodes} & program.copied
        found[node.name] = frozenset(used).union(*map(found.__getitem__, used))
    return found
