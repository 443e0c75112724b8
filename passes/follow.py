"""Follow: cuts a later capture of a model as an earlier one was cut, where no boundary says where."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from fxpipe.graph.program import Program, called_in, is_compute, made_by
from fxpipe.passes.analysis.union import Union


def follow(program: Program, first: Program) -> Program:
    """Fills ``Program.stage_of``: each node in the stage that it, or its parameters, are in in ``first``.

    For batches of another shape, whose program has the very nodes of the first, this is the first's cut. In others, as
    in evaluation, a node that the first has not goes with what it is computed from.
    """
    nodes = [node for node in program.graph.nodes if is_compute(node) and node.name not in program.copied]
    if {node.name for node in nodes} == set(first.stage_of):
        return program.replace(stage_of=first.stage_of)
    owner = _owners(first)
    known = _known(first, nodes)
    together = Union(nodes)
    for group in program.written:
        members = [node for node in nodes if node.name in group]
        for member in members[1:]:
            together.join(members[0], member)
    stages = _behind(program, nodes, owner, known, together)
    number = {stage: place for place, stage in enumerate(sorted(set(stages.values())))}
    return program.replace(stage_of={node.name: number[stages[node]] for node in nodes})


def _known(first: Program, nodes: list[fx.Node]) -> dict[str, int]:
    """Node name → stage, of those that ``first`` has too, as far as submodules and operations show.

    Names alone show nothing: a capture with symbolic sizes asks for them, and numbers its nodes otherwise.
    """
    before, now = _by_place([node for node in first.graph.nodes if node.name in first.stage_of]), _by_place(nodes)
    return {
        node.name: first.stage_of[other.name]
        for place, found in now.items()
        if len(found) == len(before.get(place, ()))
        for node, other in zip(found, before[place], strict=True)
    }


def _by_place(nodes: Iterable[fx.Node]) -> dict[tuple[str, str], list[fx.Node]]:
    """(submodule, operation) → the nodes, in program order."""
    found: dict[tuple[str, str], list[fx.Node]] = {}
    for node in nodes:
        *_, path = ("", *called_in(node))
        found.setdefault((path, str(node.target)), []).append(node)
    return found


def _owners(first: Program) -> dict[int, int]:
    """The stage of each parameter and buffer, by identity: the first that uses it."""
    found: dict[int, int] = {}
    for node in first.graph.nodes:
        if node.name in first.stage_of:
            for tensor in _tensors(first, node):
                found.setdefault(tensor, first.stage_of[node.name])
    return found


def _behind(
    program: Program,
    nodes: list[fx.Node],
    owner: dict[int, int],
    known: dict[str, int],
    together: Union[fx.Node],
) -> dict[fx.Node, int]:
    """For each node the last of its stages in the first program: its own, its parameters', those of what it uses and
    of what it must be with."""
    least: dict[fx.Node, int] = {}  # of each group that is together
    changed = True
    while changed:  # once, unless a group spans nodes that depend on each other
        changed = False
        for node in nodes:
            used = [least.get(together.find(made_by(o)), 0) for o in node.all_input_nodes if made_by(o) in together]
            held = [owner[tensor] for tensor in _tensors(program, node) if tensor in owner]
            root = together.find(node)
            now = max([least.get(root, 0), known.get(node.name, 0), *used, *held])
            changed, least[root] = changed or now != least.get(root), now
    return {node: least[together.find(node)] for node in nodes}


def _tensors(program: Program, node: fx.Node) -> set[int]:
    """The parameters and buffers that a node uses itself, by identity."""
    found = {
        id(program.attribute(str(source.target)))
        for source in map(made_by, node.all_input_nodes)
        if source.op == "get_attr"
    }
    if node.op == "call_module" and str(node.target) in program.opaque:
        found |= {id(program.attribute(name)) for name in program.effects[node.name].reads}
    elif node.op == "call_module":
        module = program.attribute(str(node.target))
        found |= {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return found


def as_before(program: Program, first: Program) -> Program:
    """``program`` with its stages as those of ``first``: what that has in one stage is one, and what it has not, such
    as an output of evaluation alone, runs with the last of what it is computed from.

    The program itself where that cannot be, or where stages gather.
    """
    if program.stage_names == first.stage_names or program.gathered or first.gathered:
        return program
    owner = _owners(first)
    nodes: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.name in program.stage_of:
            nodes.setdefault(program.stage_of[node.name], []).append(node)
    now: dict[int, int] = {}
    for stage in sorted(nodes):  # in topological order
        own, name = nodes[stage], program.stage_names[stage]
        held = {owner[tensor] for node in own for tensor in _tensors(program, node) if tensor in owner}
        makers = (program.stage_of.get(made_by(source).name) for node in own for source in node.all_input_nodes)
        before = max((now[maker] for maker in makers if maker is not None and maker != stage), default=0)
        if not held:
            held = {first.stage_names.index(name) if name in first.stage_names else before}
        if len(held) > 1 or min(held) < before:
            return program
        now[stage] = min(held)
    number = {stage: place for place, stage in enumerate(sorted(set(now.values())))}
    return program.replace(
        stage_of={name: number[now[stage]] for name, stage in program.stage_of.items()},
        stage_names=tuple(first.stage_names[stage] for stage in number),
    )


def read_where_held(program: Program, first: Program) -> Program:
    """``program``; a buffer that other stages hold in ``first`` is read in one of those, and sent from there.

    So for a quantiser's loss that is a buffer of zeros in evaluation: the ranks of stages that do not use a buffer in
    the first program have let go of it.
    """
    if program.gathered or first.gathered:
        return program
    held = _stages_holding(first)
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    stage_of, copied = dict(program.stage_of), set(program.copied)
    for node in [node for node in graph.nodes if node.op == "get_attr" and node.target not in program.constants]:
        buffer, stages = program.attribute(str(node.target)), _stages_of(program, graph)
        holders = {i for i, name in enumerate(program.stage_names) if name in held.get(id(buffer), ())}
        elsewhere = stages[node] - holders
        if isinstance(buffer, nn.Parameter) or not elsewhere or not holders or min(holders) > min(stages[node]):
            continue
        source = min(holders)
        made = {node}
        for each in graph.nodes:
            if each.name in copied and made.intersection(map(made_by, each.all_input_nodes)):
                made.add(each)
                stage_of[each.name] = source
        copied -= {each.name for each in made}
        with graph.inserting_after(node):
            sent = graph.call_method("detach", (node,))
        stage_of[sent.name] = source
        node.replace_all_uses_with(sent, lambda user: stage_of.get(user.name) not in {*holders, source})  # noqa: B023
    return program.replace(graph=graph, stage_of=stage_of, copied=frozenset(copied))


def _stages_holding(program: Program) -> dict[int, set[str]]:
    """The stages that use each parameter and buffer, by identity and name."""
    stages, found = _stages_of(program, program.graph), dict[int, set[str]]()
    for node in program.graph.nodes:
        own = {id(program.attribute(str(node.target)))} if node.op == "get_attr" else _tensors(program, node)
        for tensor in own:
            found.setdefault(tensor, set()).update(program.stage_names[stage] for stage in stages[node])
    return found


def _stages_of(program: Program, graph: fx.Graph) -> dict[fx.Node, set[int]]:
    """The stages in which each node is computed, or read: of what is copied, those of all that use it."""
    found: dict[fx.Node, set[int]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            found[node] = set() if program.output_stage is None else {program.output_stage}
        elif node.name in program.stage_of:
            found[node] = {program.stage_of[node.name]}
        else:
            found[node] = set().union(*(found[user] for user in node.users))
    return found
