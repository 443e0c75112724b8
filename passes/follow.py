"""Follow: cuts a later capture of a model like the first capture: a stage keeps its modules and parameters, whichever
of them another kind of batch runs. A stage whose modules do not run is idle.

Takes: a later ``Program``, the first one with its stages, and the units that no cut may separate. Gives: ``stage_of``
for the later program, with the first program's numbers.

1. For each unit, find the stages that it may be in: the stages that hold its parameters, run its submodule, and are
   behind its boundaries.
2. From the last unit to the first: a unit is no later than its users.
3. From the first to the last: a unit takes the stage of its counterpart in the first capture if this fits, else the
   first stage that fits, and is no earlier than its inputs.
4. A parameter that a stage reads without holding it is read and sent by a stage that holds it.

Where no stage fits all rules, order is kept, and ``chain.check`` or the plan refuses what is then wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import torch
from torch.fx import Node

from fxpipe.graph.program import Program, called_in, gather_of, is_boundary, is_boundary_value, made_by
from fxpipe.passes.effects import used_tensors
from fxpipe.passes.union import Union


def follow(program: Program, first: Program, units: Union[Node], after: dict[Node, set[Node]]) -> Program:
    """Fills ``Program.stage_of``: each node is in a stage of ``first`` that holds its parameters and runs its module.

    ``units``: nodes that no cut may separate; ``after``: unit → its users, in topological order. If several stages fit,
    the node takes the stage of its counterpart in ``first``, or else the first that fits.
    """
    numbers = set(range(len(first.stage_names)))
    owners, inside = _owners(first), stages_inside(first)
    opened, counterpart = _opened(first), _counterparts(first, program)
    allowed = dict.fromkeys(after, numbers)
    stage_before: dict[Node, int] = {}
    nodes, markers = [node for node in program.nodes if node in units], _markers(program)
    earliest = _earliest(program, owners)
    # 1. The stages that each unit may be in.
    for node in nodes:
        unit = units.find(node)
        holders = [owners[tensor] for tensor in _tensors(program, node) if tensor in owners]
        may = numbers.intersection(*holders) or {max(map(min, holders))}
        path = next((path for path in reversed(called_in(node)) if path in inside), "")
        may = may & inside.get(path, numbers) or may
        opens = [opened.get(markers[marker], 0) for marker in _crossed(node)]
        behind = max([*opens, *(earliest.get(made_by(operand), 0) for operand in node.all_input_nodes)], default=0)
        may = {stage for stage in may if stage >= behind} or may
        allowed[unit] = allowed[unit] & may or {max(min(allowed[unit]), min(may))}
        if node in counterpart:
            stage_before[unit] = counterpart[node]
    # 2. and 3. A unit's stage is no later than its users' stages, and no earlier than its inputs' stages.
    last: dict[Node, int] = {}
    for unit, users in reversed(after.items()):
        last[unit] = min([max(allowed[unit]), *(last[user] for user in users)])
    least, stage_of = dict.fromkeys(after, 0), dict[Node, int]()
    for unit, users in after.items():
        fitting = {stage for stage in allowed[unit] if least[unit] <= stage <= last[unit]}
        stage_of[unit] = stage_before[unit] if stage_before.get(unit) in fitting else min(fitting, default=least[unit])
        least |= {user: max(least[user], stage_of[unit]) for user in users}
    program = program.replace(stage_of={node.name: stage_of[units.find(node)] for node in nodes})
    # 4. parameters that other stages hold
    return program if any(map(gather_of, markers)) else _read_on_holders(program, owners)


def stages_inside(program: Program) -> dict[str, set[int]]:
    """Returns submodule → the stages that it runs in."""
    stages_in: dict[str, set[int]] = {}
    for node in program.nodes:
        for path in called_in(node) if node.name in program.stage_of else ():
            stages_in.setdefault(path, set()).add(program.stage_of[node.name])
    return stages_in


def _owners(first: Program) -> dict[int, set[int]]:
    """Returns id of a parameter or buffer → the stages that use it."""
    owners: dict[int, set[int]] = {}
    for node, stages in _stages_of(first).items():
        for tensor in _tensors(first, node) if stages else ():
            owners.setdefault(tensor, set()).update(stages)
    return owners


def _earliest(program: Program, owners: dict[int, set[int]]) -> dict[Node, int]:
    """Returns copied node → the first stage that holds all parameters and buffers that the node depends on."""
    start: dict[Node, int] = {}
    for node in program.nodes:
        if node.name in program.copied:
            own = [min(owners[tensor]) for tensor in _tensors(program, node) if tensor in owners]
            start[node] = max([*own, *(start.get(made_by(operand), 0) for operand in node.all_input_nodes)], default=0)
    return start


def _opened(first: Program) -> dict[Hashable, int]:
    """Returns boundary → the first stage behind it."""
    markers, opened = _markers(first), dict[Hashable, int]()
    for node in [node for node in first.nodes if node.name in first.stage_of]:
        stage = first.stage_of[node.name]
        for marker in map(markers.__getitem__, _crossed(node)):
            opened[marker] = min(stage, opened.get(marker, stage))
    return opened


def _markers(program: Program) -> dict[Node, Hashable]:
    """Returns boundary → its key: its name, and the number of earlier boundaries with this name."""
    seen: Counter[object] = Counter()
    keys: dict[Node, Hashable] = {}
    for node in filter(is_boundary, program.nodes):
        keys[node] = node.args[1], seen[node.args[1]]
        seen[node.args[1]] += 1
    return keys


def _crossed(node: Node) -> list[Node]:
    """Returns the last boundary in front of each value that a node reads."""
    return [operand.all_input_nodes[0] for operand in node.all_input_nodes if is_boundary_value(operand)]


def _counterparts(first: Program, program: Program) -> dict[Node, int]:
    """Returns node → the stage of its counterpart in ``first``, matched by submodule and operation.

    Names do not match: a capture with symbolic sizes has nodes for sizes, and numbers its nodes differently.
    """
    before: dict[tuple[str, ...], list[Node]] = {}
    now: dict[tuple[str, ...], list[Node]] = {}
    placed = [node for node in first.nodes if node.name in first.stage_of]
    for by_key, every in ((before, placed), (now, program.nodes)):
        for node in every:
            by_key.setdefault((*called_in(node)[-1:], str(node.target)), []).append(node)
    return {
        node: first.stage_of[other.name]
        for key, here in now.items()
        if len(here) == len(before.get(key, ()))
        for node, other in zip(here, before[key], strict=True)
    }


def _tensors(program: Program, node: Node) -> set[int]:
    """Returns the ids of the parameters and buffers that a node itself uses."""
    return set(map(id, used_tensors(program, node).values()))


def _read_on_holders(program: Program, owners: dict[int, set[int]]) -> Program:
    """Makes a holding stage read and send a parameter or buffer that a stage without it uses, since the ranks of other
    stages have released it.

    Examples are a buffer of zeros in evaluation, for the loss of vector_quantize_pytorch's quantisers, and T5's
    position bias, which training sends if its layer is checkpointed."""
    program = program.with_own_graph()
    graph = program.graph
    stage_of, copied = dict(program.stage_of), set(program.copied)
    for node in [node for node in graph.nodes if node.op == "get_attr" and node.target not in program.constants]:
        holders = owners.get(id(program.attribute(node)), set())
        stages = _stages_of(program)[node] if holders else set()
        if stages <= holders or min(holders) > min(stages):
            continue
        # Copied nodes that depend on it move along, so that a single value is sent.
        source, moved = min(holders), {node}
        for each in graph.nodes:
            if each.name in copied and moved.intersection(map(made_by, each.all_input_nodes)):
                moved.add(each)
                stage_of[each.name] = source
        copied -= {each.name for each in moved}
        with graph.inserting_after(node):
            sent = graph.call_function(torch.ops.aten.alias.default, (node,))
        stage_of[sent.name] = source
        node.replace_all_uses_with(
            sent,
            lambda user: user is not sent and stage_of.get(user.name) not in {*holders, source},  # noqa: B023
        )
    return program.replace(stage_of=stage_of, copied=frozenset(copied))


def _stages_of(program: Program) -> dict[Node, set[int]]:
    """Returns node → the stages that compute or read it; for a copied node, the stages of all its users."""
    stages: dict[Node, set[int]] = {}
    for node in reversed(program.nodes):
        if node.op == "output":
            stages[node] = set() if program.output_stage is None else {program.output_stage}
        elif node.name in program.stage_of:
            stages[node] = {program.stage_of[node.name]}
        else:
            stages[node] = set().union(*(stages[user] for user in node.users))
    return stages
