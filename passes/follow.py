"""Follow: cuts a later capture of a model as an earlier one was cut, where no boundary says where."""

from __future__ import annotations

from torch import nn
from torch.fx import Node

from fxpipe.graph.program import Program, called_in, is_compute, made_by
from fxpipe.passes.effects import used_tensors
from fxpipe.passes.union import Union


def follow(program: Program, first: Program) -> Program:
    """Fills ``Program.stage_of``: each node in the stage that it, or its parameters, are in in ``first``.

    For batches of another shape, whose program has the very nodes of the first, this is the first's cut. In others, as
    in evaluation, a node that the first has not goes with what it is computed from: it is in the last of its stages in
    the first program, those of its parameters, of what it uses and of what it must be with.
    """
    nodes = [node for node in program.nodes if is_compute(node) and node.name not in program.copied]
    if {node.name for node in nodes} == set(first.stage_of):
        return program.replace(stage_of=first.stage_of)
    owner, known = _owners(first), _known(first, nodes)
    together = Union(nodes)
    for group in program.written:
        members = [node for node in nodes if node.name in group]
        if members:
            together.join(*members)
    least: dict[Node, int] = {}  # by what stands for a group that is together
    # The least stage of each group that its makers and its parameters allow.
    changed = True
    while changed:  # once, unless a group spans nodes that depend on each other
        changed = False
        for node in nodes:
            root = together.find(node)
            makers = [maker for maker in map(made_by, node.all_input_nodes) if maker in together]
            stages = [least.get(together.find(maker), 0) for maker in makers]
            stages += [owner[tensor] for tensor in _tensors(program, node) if tensor in owner]
            now = max([least.get(root, 0), known.get(node, 0), *stages])
            changed, least[root] = changed or now != least.get(root), now
    number = {stage: place for place, stage in enumerate(sorted(set(least.values())))}
    return program.replace(stage_of={node.name: number[least[together.find(node)]] for node in nodes})


def _known(first: Program, nodes: list[Node]) -> dict[Node, int]:
    """The stages of those nodes that ``first`` has too, by the submodules that they are called in, and operations.

    Names show nothing: a capture with symbolic sizes asks for them, and numbers its nodes otherwise.
    """
    before: dict[tuple[str, ...], list[Node]] = {}
    now: dict[tuple[str, ...], list[Node]] = {}
    placed = [node for node in first.graph.nodes if node.name in first.stage_of]
    for found, every in ((before, placed), (now, nodes)):
        for node in every:
            found.setdefault((*called_in(node)[-1:], str(node.target)), []).append(node)
    return {
        node: first.stage_of[other.name]
        for place, here in now.items()
        if len(here) == len(before.get(place, ()))
        for node, other in zip(here, before[place], strict=True)
    }


def _owners(first: Program) -> dict[int, int]:
    """The stage of each parameter and buffer, by identity: the first that uses it."""
    found: dict[int, int] = {}
    for node in first.graph.nodes:
        for tensor in _tensors(first, node) if node.name in first.stage_of else ():
            found.setdefault(tensor, first.stage_of[node.name])
    return found


def _tensors(program: Program, node: Node) -> set[int]:
    """The parameters and buffers that a node uses itself, by identity."""
    return set(map(id, used_tensors(program, node).values()))


def as_before(program: Program, first: Program) -> Program:
    """``program`` with its stages as those of ``first``: what that has in one stage is one, and what it has not, such
    as an output of evaluation alone, runs with the last of what it is computed from.

    The program itself where that cannot be, or where stages gather.
    """
    if program.stage_names == first.stage_names or program.gathered or first.gathered:
        return program
    owner = _owners(first)
    held: list[set[int]] = [set() for _ in program.stage_names]  # the first's stages that hold what each uses
    sources: list[set[int]] = [set() for _ in program.stage_names]
    for node in program.nodes:
        stage = program.stage_of.get(node.name)
        if stage is not None:
            held[stage] |= {owner[tensor] for tensor in _tensors(program, node) if tensor in owner}
            makers = (program.stage_of.get(made_by(source).name, stage) for source in node.all_input_nodes)
            sources[stage] |= {maker for maker in makers if maker != stage}
    now: list[int] = []
    for stage, name in enumerate(program.stage_names):  # in topological order
        before = max((now[source] for source in sources[stage]), default=0)
        known = first.stage_names.index(name) if name in first.stage_names else before
        # Parameters decide; a stage without any keeps its name's place, or runs with what it is computed from.
        choices = held[stage] or {known}
        if len(choices) > 1 or min(choices) < before:
            return program
        now.append(min(choices))
    number = {stage: place for place, stage in enumerate(sorted(set(now)))}
    return program.replace(
        stage_of={name: number[now[stage]] for name, stage in program.stage_of.items()},
        stage_names=tuple(first.stage_names[stage] for stage in number),
    )


def read_where_held(program: Program, first: Program, training: bool) -> Program:
    """``program``; a buffer that other stages hold in ``first`` is read in one of those, and sent from there.

    So for the loss of vector_quantize_pytorch's quantisers, a buffer of zeros in evaluation: the ranks of stages that
    do not use a buffer in the first program have let go of it. In evaluation parameters are sent, too, without a
    gradient: so T5's bias by position, which training sends where its layer is checkpointed.
    """
    if program.gathered or first.gathered:
        return program
    held: dict[int, set[str]] = {}  # buffer → the names of the first's stages that use it
    for node, stages in _stages_of(first).items():
        for tensor in _tensors(first, node):
            held.setdefault(tensor, set()).update(first.stage_names[stage] for stage in stages)
    program = program.with_own_graph()
    graph = program.graph
    stage_of, copied = dict(program.stage_of), set(program.copied)
    for node in [node for node in graph.nodes if node.op == "get_attr" and node.target not in program.constants]:
        buffer = program.attribute(node)
        names = () if training and isinstance(buffer, nn.Parameter) else held.get(id(buffer), ())
        holders = {stage for stage, name in enumerate(program.stage_names) if name in names}
        stages = _stages_of(program)[node] if holders else set()
        if stages <= holders or min(holders) > min(stages):
            continue
        # What is computed from the buffer alone and copied moves along, so that the sent value is one.
        source, made = min(holders), {node}
        for each in graph.nodes:
            if each.name in copied and made.intersection(map(made_by, each.all_input_nodes)):
                made.add(each)
                stage_of[each.name] = source
        copied -= {each.name for each in made}
        with graph.inserting_after(node):
            sent = graph.call_method("detach", (node,))
        stage_of[sent.name] = source
        node.replace_all_uses_with(sent, lambda user: stage_of.get(user.name) not in {*holders, source})  # noqa: B023
    return program.replace(stage_of=stage_of, copied=frozenset(copied))


def _stages_of(program: Program) -> dict[Node, set[int]]:
    """The stages in which each node is computed, or read: of what is copied, those of all that use it."""
    found: dict[Node, set[int]] = {}
    for node in reversed(program.nodes):
        if node.op == "output":
            found[node] = set() if program.output_stage is None else {program.output_stage}
        elif node.name in program.stage_of:
            found[node] = {program.stage_of[node.name]}
        else:
            found[node] = set().union(*(found[user] for user in node.users))
    return found
