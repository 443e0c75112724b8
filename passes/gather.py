"""Gather: which stages run once for a group of micro-batches: those behind a boundary that gathers, and all after.

What enters one comes from each micro-batch, or from another such stage as the group's. A value of the first kind
crosses a boundary that gathers, or none: inputs, and what bypasses a boundary, are gathered as the stage's others are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import fx, nn

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
from fxpipe.passes.analysis.effects import is_number, operator_name, written


@dataclass(frozen=True)
class Entering:
    """A value that a stage is given, an input or one of another stage, as one of its nodes reads it.

    ``gather``: what the last boundary in front of the reader that gathers says; ``boundary``: the last one of any kind.
    """

    value: fx.Node
    reader: fx.Node
    gather: Gather | None
    boundary: fx.Node | None


def gather(program: Program) -> Program:
    """Fills ``Program.gathered``; PartitionError where a value has no way into such a stage."""
    found: dict[int, Gathered] = {}
    if not any(is_boundary(node) and gather_of(node) for node in program.graph.nodes):
        return program
    for stage, readers in sorted(readers_of(program).items()):
        arriving = list(entering(program, stage, readers))
        behind_copies = _of_copies(program, readers)
        said = [arrival.gather for arrival in arriving if arrival.gather is not None] + behind_copies
        sources = [program.stage_of.get(arrival.value.name, -1) for arrival in arriving]
        before = [found[source] for source in sources if source in found]
        if not said and not before:
            continue
        groups = {one.group for one in said} | {one.group for one in before}
        if len(groups) > 1:
            _fail(program, stage, f"is given groups of several sizes, group={sorted(groups, key=str)}; write one")
        modes = frozenset(one.mode for one in behind_copies)
        modes = modes.union(*(_modes(program, arrival) for arrival in arriving))
        found[stage] = Gathered(groups.pop(), modes)
        program = program.replace(gathered=dict(found))
        for arrival in arriving:
            _check(program, stage, arrival, bool(said))
        _check_no_batch_norm(program, stage, [node for node in readers if node.op != "output"])
    return program


def _modes(program: Program, arrival: Entering) -> frozenset[Mode]:
    """Whose rows a value has that enters: its group's alone, or every replica's, too."""
    source = program.gathered.get(program.stage_of.get(arrival.value.name, -1))
    if arrival.gather is not None and (source is None or arrival.gather.mode == "global"):
        return frozenset([arrival.gather.mode])
    return frozenset() if source is None else source.modes


def readers_of(program: Program) -> dict[int, list[fx.Node]]:
    """Stage → its own nodes in program order, and what returns the result for the stage that has it."""
    found: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        stage = program.output_stage if node.op == "output" else program.stage_of.get(node.name)
        if stage is not None:
            found.setdefault(stage, []).append(node)
    return found


def entering(program: Program, stage: int, readers: Sequence[fx.Node]) -> Iterator[Entering]:
    """What a stage is given, in the order in which it is read; what is copied is looked through.

    ``readers``: the stage's, as ``readers_of`` has them.
    """
    seen: set[fx.Node] = set()
    waiting = list(readers)
    for reader in waiting:
        for operand in reader.all_input_nodes:
            value = made_by(operand)
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


def crossed(operand: fx.Node) -> tuple[Gather | None, fx.Node | None]:
    """What the boundaries in front of a reader gather, and the last of them."""
    found: Gather | None = None
    last: fx.Node | None = None
    while is_boundary_value(operand):
        marker = operand.all_input_nodes[0]
        last, found = last or marker, found or gather_of(marker)
        operand = before_boundary(operand)
    return found, last


def _of_copies(program: Program, readers: Sequence[fx.Node]) -> list[Gather]:
    """What boundaries gather that stand behind copied values, such as masks, which the stage computes by itself."""
    operands = [o for node in readers for o in node.all_input_nodes if made_by(o).name in program.copied]
    return [said for said, _ in map(crossed, operands) if said is not None]


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


def _check_no_batch_norm(program: Program, stage: int, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        name = next((n for n, module in _modules(program, node) if _has_running_statistics(module)), None)
        if name is None and "batch_norm" in operator_name(node) and written(program, node):
            name = node.name
        if name is not None:
            _fail(
                program,
                stage,
                f"holds the batch norm {name!r}{where(node)}, whose running statistics would be of groups and not of "
                "micro-batches; put it in front of the boundary, put it in eval(), or write a LayerNorm or GroupNorm",
            )


def _modules(program: Program, node: fx.Node) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose parameters and buffers a node uses, by name."""
    names = [str(source.target) for source in map(made_by, node.all_input_nodes) if source.op == "get_attr"]
    if node.op == "call_module" and str(node.target) in program.opaque:
        names = list(program.effects[node.name].reads)
    elif node.op == "call_module":
        yield from program.attribute(str(node.target)).named_modules(prefix=str(node.target))
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names if name not in program.constants)
    yield from ((owner, program.module.get_submodule(owner)) for owner in owners)


def _has_running_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) and module.training and module.running_mean is not None


_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_NORMS = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _fail(program: Program, stage: int, fact: str) -> NoReturn:
    names = program.stage_names
    name = names[stage] if names else stage
    raise PartitionError(f"stage {name!r}, which runs once for a group of micro-batches, {fact}")
