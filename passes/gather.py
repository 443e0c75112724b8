"""Gather: which stages run once for a group of micro-batches: those behind a boundary that gathers, and all after.

What enters one comes from each micro-batch, or from another such stage as the group's. A value of the first kind
crosses a boundary that gathers, or none: inputs, and what bypasses a boundary, are gathered as the stage's others are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import nn
from torch.fx import Node

from fxpipe.errors import PartitionError
from fxpipe.graph.boundary import Gather, Gathered, Mode
from fxpipe.graph.program import (
    Program,
    before_boundary,
    gather_of,
    is_boundary,
    is_boundary_value,
    made_by,
    where,
)
from fxpipe.passes.effects import is_number, operator_name, used_tensors, written


@dataclass(frozen=True)
class Entering:
    """A value that a stage is given, an input or one of another stage, as one of its nodes reads it.

    ``gather``: what the last boundary in front of the reader that gathers says; ``boundary``: the last one of any kind.
    """

    value: Node
    reader: Node
    gather: Gather | None
    boundary: Node | None


def gather(program: Program) -> Program:
    """Fills ``Program.gathered``; PartitionError where a value has no way into such a stage."""
    if not any(is_boundary(node) and gather_of(node) for node in program.nodes):
        return program
    found: dict[int, Gathered] = {}
    for stage, readers in sorted(readers_of(program).items()):
        arriving = list(entering(program, stage, readers))
        # what boundaries gather that stand behind copied values, such as masks, which the stage computes by itself
        operands = [o for node in readers for o in node.all_input_nodes if made_by(o).name in program.copied]
        of_copies = [said for said, _ in map(crossed, operands) if said is not None]
        said = [arrival.gather for arrival in arriving if arrival.gather is not None] + of_copies
        sources = [found.get(program.stage_of.get(arrival.value.name, -1)) for arrival in arriving]
        groups = {gathering.group for gathering in [*said, *sources] if gathering is not None}
        if not groups:
            continue
        if len(groups) > 1:
            _fail(program, stage, f"is given groups of several sizes, group={sorted(groups, key=str)}; write one")
        # whose rows enter: the group's alone, or every replica's, too
        modes = {gathering.mode for gathering in of_copies}
        for arrival, source in zip(arriving, sources, strict=True):
            if arrival.gather is not None and (source is None or arrival.gather.mode == "global"):
                modes.add(arrival.gather.mode)
            elif source is not None:
                modes |= source.modes
        found[stage] = Gathered(groups.pop(), frozenset(modes))
        program = program.replace(gathered=dict(found))
        for arrival in arriving:
            _check(program, stage, arrival, bool(said))
        for node in readers:
            name = None if node.op == "output" else _batch_norm(program, node)
            if name is not None:
                _fail(
                    program,
                    stage,
                    f"holds the batch norm {name!r}{where(node)}, whose running statistics would be of groups and not "
                    "of micro-batches; put it in front of the boundary, put it in eval(), or write a LayerNorm or "
                    "GroupNorm",
                )
    return program


def readers_of(program: Program) -> dict[int, list[Node]]:
    """Stage → its own nodes in program order, and what returns the result for the stage that has it."""
    found: dict[int, list[Node]] = {}
    for node in program.nodes:
        stage = program.output_stage if node.op == "output" else program.stage_of.get(node.name)
        if stage is not None:
            found.setdefault(stage, []).append(node)
    return found


def entering(program: Program, stage: int, readers: Sequence[Node]) -> Iterator[Entering]:
    """What a stage is given, in the order in which it is read; what is copied is looked through.

    ``readers``: the stage's, as ``readers_of`` has them.
    """
    seen: set[Node] = set()
    waiting = list(readers)
    for reader in waiting:
        for operand in reader.all_input_nodes:
            value = made_by(operand)
            # A copied node is computed in the stage itself, so its own operands are what enters.
            if value.name in program.copied:
                if value not in seen:
                    seen.add(value)
                    waiting.append(value)
            elif value.op != "get_attr" and program.stage_of.get(value.name) != stage:
                yield Entering(value, reader, *crossed(operand))


def way(program: Program, stage: int, arrival: Entering) -> Mode | None:
    """How a value comes into a stage: gathered, or None: as it is."""
    if stage not in program.gathered:
        return None
    if program.stage_of.get(arrival.value.name) in program.gathered:  # it is the group's already
        return "global" if arrival.gather is not None and arrival.gather.mode == "global" else None
    if arrival.gather is not None:
        return arrival.gather.mode
    (mode,) = program.gathered[stage].modes
    return mode


def crossed(operand: Node) -> tuple[Gather | None, Node | None]:
    """What the boundaries in front of a reader gather, and the last of them."""
    found: Gather | None = None
    last: Node | None = None
    while is_boundary_value(operand):
        marker = operand.all_input_nodes[0]
        # The walk goes backwards, so the first marker that it meets is the last in front of the reader.
        last, found = last or marker, found or gather_of(marker)
        operand = before_boundary(operand)
    return found, last


def _check(program: Program, stage: int, arrival: Entering, gathers: bool) -> None:
    """PartitionError for what cannot enter. ``gathers``: whether the stage is behind a boundary that gathers."""
    value, gathered = arrival.value, program.gathered
    text = f"is given {value.name}{where(value) or where(arrival.reader)}"
    source = gathered.get(program.stage_of.get(value.name, -1))
    if source is not None:
        if arrival.gather is not None and arrival.gather.mode == "global" and source.modes != {"batch"}:
            _fail(program, stage, f'{text} through gather="global", which is of every replica\'s rows already')
        return
    if is_number(value):
        _fail(
            program,
            stage,
            f"{text}, a number of each micro-batch; ask the gathered value for it: v = stage_boundary(v, gather=...), "
            "and then v.shape",
        )
    if arrival.gather is not None:
        return
    if value.op != "placeholder" and (arrival.boundary is not None or not gathers):
        mark = arrival.boundary if arrival.boundary is not None else arrival.reader
        _fail(program, stage, f"{text} through no boundary that gathers{where(mark)}; write gather= there, too")
    if len(gathered[stage].modes) > 1:
        _fail(
            program,
            stage,
            f'{text}, and other values as "batch" and as "global"; say which this is: stage_boundary({value.name}, '
            'gather="batch"), or "global"',
        )


def _batch_norm(program: Program, node: Node) -> str | None:
    """The name of a norm in training whose running statistics a node writes."""
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in used_tensors(program, node)):
        module = program.module.get_submodule(owner)
        if isinstance(module, _NORMS) and module.training and module.running_mean is not None:
            return owner
    return node.name if "batch_norm" in operator_name(node) and written(program, node) else None


_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_NORMS = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _fail(program: Program, stage: int, fact: str) -> NoReturn:
    names = program.stage_names
    name = names[stage] if names else stage
    raise PartitionError(f"stage {name!r}, which runs once for a group of micro-batches, {fact}")
