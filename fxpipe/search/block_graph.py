"""A graph of blocks with their costs: the only input of a balance.

A block is the smallest piece that can be placed: a few nodes of a program, or a stage that is already cut.
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
from fxpipe.search.node_costs import NodeCost, NodeCosts, total


@dataclass(frozen=True)
class Block:
    """A piece of the program with its costs for one micro-batch.

    ``copies``: the copied nodes that the block needs. They are not part of the block: each stage runs its own copy.
    """

    nodes: tuple[str, ...]
    cost: NodeCost
    copies: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        return self.cost.forward + self.cost.backward


@dataclass(frozen=True)
class BlockValue:
    """A value that a block makes and other blocks use."""

    source: int
    targets: tuple[int, ...]
    size: int
    """The bytes of the value."""
    returned: bool = False
    """Whether the model's result contains the value; the last stage that makes a part of the result assembles it."""


@dataclass(frozen=True)
class BlockGraph:
    """Blocks and the values between them; acyclic, numbered in any order."""

    blocks: tuple[Block, ...]
    values: tuple[BlockValue, ...]
    result: tuple[int, ...]
    """The blocks that make the model's result."""
    costs: NodeCosts
    """The costs of copied nodes, and the bytes of all memory and parameter keys."""
    gather: Mapping[int, int | None] = field(default_factory=dict)
    """Gathered block → the number of micro-batches in its group, None for all. Each gathered block is a stage."""
    blocks_are_stages: bool = False
    """Whether each block is already a stage, and only its rank is open."""
    alone: frozenset[int] = frozenset()
    """The blocks that must run on a single rank, because they may change the model's state."""

    def __len__(self) -> int:
        return len(self.blocks)

    def seconds(self, blocks: Iterable[int] | None = None) -> float:
        """The forward and backward seconds of these blocks; None: of all blocks."""
        return sum(self.blocks[block].seconds for block in (range(len(self)) if blocks is None else blocks))

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each block, the sorted numbers of the blocks whose values it uses."""
        sources_of: list[set[int]] = [set() for _ in self.blocks]
        for value in self.values:
            for target in value.targets:
                sources_of[target].add(value.source)
        return tuple(tuple(sorted(sources)) for sources in sources_of)

    @cached_property
    def shared(self) -> frozenset[int]:
        """The keys of the parameters that several blocks use."""
        # Tied parameters, and parameters that copied nodes read: ranks sum the gradient if the blocks are on several
        # ranks.
        count = Counter(key for block in self.blocks for key in self.stage([block]).parameters)
        return frozenset(key for key, users in count.items() if users > 1)

    def stage(self, blocks: Sequence[Block]) -> NodeCost:
        """The costs of a stage of these blocks, with the stage's own copies of copied nodes."""
        copies = frozenset[str]().union(*(block.copies for block in blocks))
        return total([*(block.cost for block in blocks), *(self.costs[name] for name in sorted(copies))])

    @cached_property
    def stage_of(self) -> Callable[[tuple[int, ...]], NodeCost]:
        """``stage`` by the numbers of the blocks, cached."""
        return cache(lambda numbers: self.stage([self.blocks[number] for number in numbers]))

    def after(self, group_of: Sequence[int]) -> dict[int, set[int]]:
        """Group → the other groups that use its values. ``group_of``: block → its group."""
        users_of: dict[int, set[int]] = {group: set() for group in group_of}
        for value in self.values:
            source = group_of[value.source]
            users_of[source] |= {group_of[target] for target in value.targets} - {source}
        return users_of

    def merged(self, group_of: Sequence[int]) -> BlockGraph:
        """The same graph with blocks merged. ``group_of``: block → the merged block."""
        # A value between two blocks of the same group is inside of the merged block, and no cut can cross it.
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
    """The finest block graph of a program: a cut may separate any two blocks. A stage that gathers is a block."""
    cut = blocks(program)
    values = tuple(
        BlockValue(source, targets, costs[name].bytes_out, name in cut.returned) for name, source, targets in cut.values
    )
    copies = _copies(program)
    pieces = [
        Block(names, costs.block(names), frozenset[str]().union(*map(copies.__getitem__, names))) for names in cut.nodes
    ]
    work = BlockGraph(tuple(pieces), values, cut.result, costs, alone=_alone(program, cut.nodes))
    stages = {name: stage for name, stage in program.stage_of.items() if stage in program.gathered}
    if not stages:
        return work
    number: dict[int, int] = {}  # a block, or ~ a stage that gathers → its number
    keys = [next((~stages[name] for name in names if name in stages), block) for block, names in enumerate(cut.nodes)]
    work = work.merged([number.setdefault(key, len(number)) for key in keys])
    pieces = list(work.blocks)
    for stage, group in costs.groups.items():  # copied nodes of a stage that gathers run once for its group
        piece = pieces[number[~stage]]
        own = [costs[name].part(group.size) for name in sorted(piece.copies)]
        pieces[number[~stage]] = Block(piece.nodes, total([piece.cost, *own]))
    gather = {number[~stage]: gathered.group for stage, gathered in program.gathered.items()}
    return replace(work, blocks=tuple(pieces), gather=gather)


def work_of_stages(program: Program, costs: NodeCosts) -> BlockGraph:
    """The block graph of a program that is cut: a block for each stage, with the stage's own copies of copied nodes."""
    copies, stage_of = _copies(program), program.stage_of
    names: list[set[str]] = [set() for _ in range(1 + max(stage_of.values()))]
    for name, stage in stage_of.items():
        names[stage] |= {name, *copies[name]}
    order = {node.name: position for position, node in enumerate(program.nodes) if is_compute(node)}
    # Each stage runs its own copies of copied nodes, so the copies count in each stage. Nodes are in program order, in
    # which the bytes kept for backward add up.
    members = [sorted(some & order.keys(), key=order.__getitem__) for some in names]
    # A value crosses a cut if a node of another stage uses it. The last stage assembles the model's result.
    last = program.output_stage or 0
    uses: dict[str, dict[int, None]] = {}
    for node in program.nodes:
        user_stage = last if node.op == "output" else stage_of.get(node.name)
        for name in (made_by(operand).name for operand in node.all_input_nodes):
            if user_stage is not None and stage_of.get(name, user_stage) != user_stage:
                uses.setdefault(name, {})[user_stage] = None
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
        blocks_are_stages=True,
        alone=_alone(program, members),
    )


def _alone(program: Program, members: Sequence[Sequence[str]]) -> frozenset[int]:
    """The blocks of these nodes that use tensors of the model that forward writes, or that may have side effects."""
    # A stage on several ranks would write on only one rank the tensors that its other ranks read.
    written = nodes_of_written(program)
    effectful = {name for group in program.written if group & written for name in group} | written
    effectful |= {node.name for node in program.nodes if node.op.startswith("call_") and acts(program, node)}
    return frozenset(number for number, names in enumerate(members) if effectful.intersection(names))


def _copies(program: Program) -> dict[str, frozenset[str]]:
    """Node → the copied nodes from which it is computed."""
    copies: dict[str, frozenset[str]] = {}
    for node in program.nodes:
        used = {made_by(operand).name for operand in node.all_input_nodes} & program.copied
        copies[node.name] = frozenset(used).union(*map(copies.__getitem__, used))
    return copies
