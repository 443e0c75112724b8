"""Gather: finds the stages that run once for a group of micro-batches: all stages behind a boundary that gathers.

Such a stage takes values of each micro-batch, or a whole group's values from another such stage. A value of each
micro-batch crosses a gathering boundary, or none: inputs, and values that bypass a boundary, are gathered like the
stage's other values.

Takes: a ``Program`` with stages. Gives: ``Program.gathered``, stage → group size and modes ("batch", "global").

1. In topological order, find the values that enter each stage, through copied nodes.
2. The stage gathers if a gathering boundary is in front of a value, or if a value is of a stage that gathers.
3. Groups of several sizes are refused. So are single numbers, and batch norms in training, whose statistics would be of
   groups.

It changes no graph: ``split`` adds the inputs for each mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch.fx import Node

from fxpipe.errors import PartitionError
from fxpipe.graph.boundary import Gather, Gathered, Mode
from fxpipe.graph.program import Program, gather_of, is_boundary, made_by, passed, where
from fxpipe.passes.effects import is_number, operator_name, used_tensors, written
from fxpipe.torch_compat.modules import BATCH_STATISTICS


@dataclass(frozen=True)
class Entering:
    """A value that enters a stage, a batch input or another stage's value, and a node of the stage that reads it.

    ``gather``: the ``Gather`` of the last gathering boundary before the reader; ``boundary``: the last boundary.
    """

    value: Node
    reader: Node
    gather: Gather | None
    boundary: Node | None


def gather(program: Program) -> Program:
    """Fills ``Program.gathered``; PartitionError if a value cannot enter such a stage."""
    if not any(is_boundary(node) and gather_of(node) for node in program.nodes):
        return program
    gathered: dict[int, Gathered] = {}
    for stage, readers in sorted(readers_of(program).items()):
        # 1. the values that enter
        arriving = list(entering(program, stage, readers))
        # The Gathers of boundaries behind copied values, such as masks, which the stage computes itself.
        operands = [o for node in readers for o in node.all_input_nodes if made_by(o).name in program.copied]
        of_copies = [said for said, _ in map(crossed, operands) if said is not None]
        said = [arrival.gather for arrival in arriving if arrival.gather is not None] + of_copies
        sources = [gathered.get(program.stage_of.get(arrival.value.name, -1)) for arrival in arriving]
        # 2. and 3. does it gather, and in which groups
        groups = {gathering.group for gathering in [*said, *sources] if gathering is not None}
        if not groups:
            continue
        if len(groups) > 1:
            _fail(program, stage, f"is given groups of several sizes, group={sorted(groups, key=str)}; write one")
        # Whether the rows of only this replica's group enter, or those of every replica.
        modes = {gathering.mode for gathering in of_copies}
        for arrival, source in zip(arriving, sources, strict=True):
            if arrival.gather is not None and (source is None or arrival.gather.mode == "global"):
                modes.add(arrival.gather.mode)
            elif source is not None:
                modes |= source.modes
        gathered[stage] = Gathered(groups.pop(), frozenset(modes))
        program = program.replace(gathered=dict(gathered))
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
    """Returns stage → its own nodes in program order; the output node belongs to the stage that has the result."""
    readers: dict[int, list[Node]] = {}
    for node in program.nodes:
        stage = program.output_stage if node.op == "output" else program.stage_of.get(node.name)
        if stage is not None:
            readers.setdefault(stage, []).append(node)
    return readers


def entering(program: Program, stage: int, readers: Sequence[Node]) -> Iterator[Entering]:
    """Yields the values that enter a stage, in the order in which they are read, through copied nodes.

    ``readers``: the stage's nodes, from ``readers_of``.
    """
    seen: set[Node] = set()
    waiting = list(readers)
    for reader in waiting:
        for operand in reader.all_input_nodes:
            value = made_by(operand)
            # The stage itself computes a copied node, so the copied node's operands enter the stage.
            if value.name in program.copied:
                if value not in seen:
                    seen.add(value)
                    waiting.append(value)
            elif value.op != "get_attr" and program.stage_of.get(value.name) != stage:
                yield Entering(value, reader, *crossed(operand))


def gather_mode(program: Program, stage: int, arrival: Entering) -> Mode | None:
    """Returns the mode in which a value is gathered when it enters a stage; None if it is not gathered."""
    if stage not in program.gathered:
        return None
    if program.stage_of.get(arrival.value.name) in program.gathered:  # the value is the whole group's already
        return "global" if arrival.gather is not None and arrival.gather.mode == "global" else None
    if arrival.gather is not None:
        return arrival.gather.mode
    (mode,) = program.gathered[stage].modes
    return mode


def crossed(operand: Node) -> tuple[Gather | None, Node | None]:
    """Returns the last ``Gather`` of the boundaries in front of a reader, and the last of these boundaries."""
    markers = passed(operand)
    gathers = [gather_of(marker) for marker in markers if gather_of(marker)]
    return gathers[-1] if gathers else None, markers[-1] if markers else None


def _check(program: Program, stage: int, arrival: Entering, gathers: bool) -> None:
    """PartitionError for a value that cannot enter. ``gathers``: whether the stage is behind a gathering boundary."""
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
    """Returns the name of a norm in training mode whose running statistics a node writes; else None."""
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in used_tensors(program, node)):
        module = program.module.get_submodule(owner)
        if isinstance(module, BATCH_STATISTICS) and module.training and module.running_mean is not None:
            return owner
    return node.name if "batch_norm" in operator_name(node) and written(program, node) else None


def _fail(program: Program, stage: int, fact: str) -> NoReturn:
    """Raises the PartitionError with the stage's name and the fact."""
    names = program.stage_names
    name = names[stage] if names else stage
    raise PartitionError(f"stage {name!r}, which runs once for a group of micro-batches, {fact}")
