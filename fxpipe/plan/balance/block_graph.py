"""A graph of blocks with what each takes, which is all that a balance looks at.

A block is the smallest piece that may be placed: a few nodes of a program, or a stage whose cut is given already.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.graph.program import Program, is_compute, made_by
from fxpipe.hardware import REFERENCE, Hardware
from fxpipe.passes.alias_groups import nodes_of_written
from fxpipe.passes.analysis.blocks import blocks
from fxpipe.passes.analysis.effects import acts
from fxpipe.plan.balance.memory import Account
from fxpipe.plan.balance.node_costs import HeldParameter, NodeCost, NodeCosts


@dataclass(frozen=True)
class Block:
    """What a piece of the program takes for one micro-batch, in seconds, and what it keeps and holds, by key."""

    nodes: tuple[str, ...]
    forward: float
    backward: float
    weight: float
    saved: frozenset[int]
    parameters: frozenset[int]
    trains: bool
    deferred: frozenset[int] = frozenset()
    """What it keeps between I and W."""
    again: int = 0
    """The most bytes that one of its own checkpoints computes again."""
    copies: frozenset[str] = frozenset()
    """The copied nodes that it needs, which are not in it: each stage has its own, once."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


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
    memory: Mapping[int, int]
    """Bytes of what blocks keep, by key."""
    held: Mapping[int, HeldParameter]
    """The parameters, by key."""
    hardware: Hardware = REFERENCE
    account: Account = field(default_factory=Account)
    """How parameters are counted."""
    copied: Mapping[str, NodeCost] = field(default_factory=dict)
    """What copied nodes take, by name."""
    halves: bool = True
    """Whether its costs give what W keeps."""
    gather: Mapping[int, int | None] = field(default_factory=dict)
    """Blocks that run for several micro-batches at once → for how many, None for all; each is a stage then."""

    alone: frozenset[int] = frozenset()
    """Blocks that must run on one rank: those that may change what the model holds."""

    def __len__(self) -> int:
        return len(self.blocks)

    @cached_property
    def seconds(self) -> float:
        return sum(block.seconds for block in self.blocks)

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
        count = Counter(key for block in self.blocks for key in self.as_one([block]).parameters)
        return frozenset(key for key, users in count.items() if users > 1)

    @cached_property
    def static(self) -> Mapping[int, float]:
        """What each parameter takes where it lives, with gradient and optimizer state if it is trained."""
        return {key: held.on(self.account).sum for key, held in self.held.items()}

    def static_bytes(self, parameters: Iterable[int]) -> float:
        """What parameters take together."""
        return sum(map(self.static.__getitem__, parameters))

    def saved_bytes(self, saved: Iterable[int]) -> int:
        return sum(map(self.memory.__getitem__, saved))

    def as_one(self, blocks: Sequence[Block]) -> Block:
        """What a stage of these blocks takes, with its own copies of copied nodes."""
        copies = frozenset[str]().union(*(block.copies for block in blocks))
        return _of((), [*blocks, *(self.copied[name] for name in sorted(copies))]) if copies else _together(blocks)

    def merged(self, group_of: Sequence[int]) -> BlockGraph:
        """The same work with blocks put together: ``group_of`` says which new block each becomes a part of."""
        groups: list[list[int]] = [[] for _ in range(1 + max(group_of))]
        for block, group in enumerate(group_of):
            groups[group].append(block)
        values = []
        for value in self.values:
            source = group_of[value.source]
            targets = tuple(sorted({group_of[target] for target in value.targets} - {source}))
            if targets or value.returned:
                values.append(BlockValue(source, targets, value.size, value.returned))
        merged = tuple(_together([self.blocks[number] for number in group]) for group in groups)
        result = tuple(sorted({group_of[block] for block in self.result}))
        alone = frozenset(group_of[block] for block in self.alone)
        return dataclasses.replace(self, blocks=merged, values=tuple(values), result=result, alone=alone)


def work_of_program(program: Program, costs: NodeCosts) -> BlockGraph:
    """The finest work: what a cut may separate. The program has no boundaries."""
    cut = blocks(program)
    values = tuple(
        BlockValue(source, targets, costs[name].bytes_out, name in cut.returned) for name, source, targets in cut.values
    )
    copies = _copies(program)
    made = [
        dataclasses.replace(_block(names, costs), copies=frozenset[str]().union(*map(copies.__getitem__, names)))
        for names in cut.nodes
    ]
    whole = _graph(made, values, cut.result, costs, {name: costs[name] for name in program.copied})
    return dataclasses.replace(whole, alone=_alone(program, cut.nodes))


def work_of_stages(program: Program, costs: NodeCosts) -> BlockGraph:
    """A block for each stage of a program that is cut, by number, with its own copies of copied nodes."""
    stages = 1 + max(program.stage_of.values())
    members = _members(program, stages)
    uses: dict[str, dict[int, None]] = {}
    result = program.graph.output_node()
    for node in program.graph.nodes:
        place = program.output_stage if node is result else program.stage_of.get(node.name)
        for operand in node.all_input_nodes if place is not None else ():
            source = program.stage_of.get(made_by(operand).name)
            if source is not None and source != place:
                uses.setdefault(made_by(operand).name, {})[place or 0] = None
    values = tuple(
        BlockValue(program.stage_of[name], tuple(targets), costs[name].bytes_out) for name, targets in uses.items()
    )
    made = [_block(names, costs) for names in members]
    whole = _graph(made, values, (program.output_stage or 0,), costs, {})
    return dataclasses.replace(whole, alone=_alone(program, members))


def _graph(
    blocks: Sequence[Block],
    values: tuple[BlockValue, ...],
    result: tuple[int, ...],
    costs: NodeCosts,
    copied: Mapping[str, NodeCost],
) -> BlockGraph:
    held, hardware, account, halves = costs.parameters, costs.hardware, costs.account, costs.halves
    return BlockGraph(tuple(blocks), values, result, costs.memory, held, hardware, account, copied, halves)


def _alone(program: Program, members: Sequence[Sequence[str]]) -> frozenset[int]:
    """The blocks of these nodes that use what forward writes of what the model holds, or may do more than compute."""
    written = nodes_of_written(program)
    found = {name for group in program.written if group & written for name in group} | written
    found |= {node.name for node in program.graph.nodes if node.op.startswith("call_") and acts(program, node)}
    return frozenset(number for number, names in enumerate(members) if found.intersection(names))


def _members(program: Program, stages: int) -> list[list[str]]:
    """The nodes that each stage computes, its own copies of copied ones included, in program order."""
    copies = _copies(program)
    found: list[set[str]] = [set() for _ in range(stages)]
    for name, stage in program.stage_of.items():
        found[stage] |= {name, *copies[name]}
    computed = {node.name: place for place, node in enumerate(program.graph.nodes) if is_compute(node)}
    return [sorted(names & computed.keys(), key=computed.__getitem__) for names in found]


def _copies(program: Program) -> dict[str, frozenset[str]]:
    """Node → the copied nodes that it is computed from."""
    found: dict[str, frozenset[str]] = {}
    for node in program.graph.nodes:
        used = {made_by(operand).name for operand in node.all_input_nodes} & program.copied
        found[node.name] = frozenset(used).union(*map(found.__getitem__, used))
    return found


def _block(names: Sequence[str], costs: NodeCosts) -> Block:
    whole = _of(tuple(names), [costs[name] for name in names])
    return dataclasses.replace(whole, again=costs.again_bytes(names))


def _together(parts: Sequence[Block]) -> Block:
    """Several blocks as one."""
    copies = frozenset[str]().union(*(part.copies for part in parts))
    return dataclasses.replace(_of(tuple(name for part in parts for name in part.nodes), parts), copies=copies)


def _of(names: tuple[str, ...], parts: Sequence[NodeCost | Block]) -> Block:
    return Block(
        names,
        sum(part.forward for part in parts),
        sum(part.backward for part in parts),
        sum(part.weight for part in parts),
        frozenset[int]().union(*(part.saved for part in parts)),
        frozenset[int]().union(*(part.parameters for part in parts)),
        any(part.trains for part in parts),
        frozenset[int]().union(*(part.deferred for part in parts)),
        max((part.again for part in parts), default=0),
    )
