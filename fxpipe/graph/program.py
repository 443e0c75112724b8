"""``Program``: a captured model as one graph, and what is asked of its nodes. Frozen."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Reversible, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.fx import Node

from fxpipe.graph.boundary import Gather, Gathered, boundary
from fxpipe.graph.question import Answers
from fxpipe.torch_compat import CHECKS, pytree

SizeGuard = Callable[[Sequence[Any]], bool]
"""Given something with ``size()``, ``stride()`` and ``storage_offset()`` for each tensor among the inputs, in order."""
IN_PLACE_NAMES = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
"""The names in ``operator`` behind ``x += y`` and its like: each writes its first argument, and returns it."""


@dataclass(frozen=True)
class Effects:
    """What a call of an opaque module does beside computing its result, as a capture saw it.

    ``reads``, ``writes``: the model's parameters and buffers that it uses, and those of them that it writes, by name.
    ``shares``: the places, among the tensors that it is given, of those whose memory its result shares.
    ``is_rehearsed``: whether it was run on made-up numbers, since its code looks at the values of tensors.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    draws_random: bool = False
    is_rehearsed: bool = False


@dataclass(frozen=True)
class Program:
    """A captured model: an fx graph, the module whose parameters it names, and what the passes found out.

    Facts about nodes are kept by node name, so that a pass which copies the graph keeps them.
    """

    module: nn.Module
    graph: fx.Graph
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    tracer: str = ""
    """The tracer's name."""
    refusals: tuple[tuple[str, str], ...] = ()
    """The tracers that were tried before it, and why they could not capture the model."""
    result: pytree.TreeSpec | None = None
    """How the flat values that the graph returns make the model's result; None: they are the result as they stand."""
    opaque: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules that the graph calls and that are no submodules of the model, by the names under which it calls them."""
    effects: Mapping[str, Effects] = field(default_factory=dict)
    """What calls of opaque modules do, by node name."""
    holds_for: SizeGuard | None = None
    """For what sizes of its inputs' leaves it holds, where some are symbolic; None: for those of its capture alone."""
    fixed_sizes: str = ""
    """Of which sizes that were to be symbolic forward makes numbers of Python's, and on which lines, in words."""
    answers: Answers = ()
    """What forward has asked about its inputs, and the answers for which the program holds."""
    sets: frozenset[tuple[int, str]] = frozenset()
    """The attributes that forward sets before it reads them: the identity of a module's ``__dict__``, and a name."""
    computed_with: tuple[tuple[str, Tensor, int], ...] = ()
    """Tensors of the model, no parameters or buffers, whose numbers the capture has computed with: their names, they,
    and how often they had been written in place."""
    copied: frozenset[str] = frozenset()
    """Nodes that every stage needing them computes for itself."""
    written: tuple[frozenset[str], ...] = ()
    """Groups of nodes that share storage which some node writes."""
    first: Program | None = None
    """The first capture of the model, if this is a later one: it has the first's stages, and what that writes is
    written."""
    stage_of: Mapping[str, int] = field(default_factory=dict)
    """Node name → stage, in topological order of the stages; copied nodes have none."""
    stage_names: tuple[str, ...] = ()
    gathered: Mapping[int, Gathered] = field(default_factory=dict)
    """The stages that run once for a group of micro-batches."""

    @property
    def nodes(self) -> Reversible[Node]:
        """The graph's, in order; a pass may insert some while it goes through them."""
        return self.graph.nodes

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(str(node.target) for node in self.nodes if node.op == "placeholder")

    def attribute(self, named: str | Node) -> Any:
        """What a ``get_attr`` or ``call_module`` node names; or the attribute of that name."""
        target = named if isinstance(named, str) else str(named.target)
        if target in self.constants:
            return self.constants[target]
        if target in self.opaque:
            return self.opaque[target]
        owner, _, name = target.rpartition(".")
        return getattr(self.module.get_submodule(owner), name) if target else self.module

    @property
    def output_stage(self) -> int | None:
        """The last stage that makes a part of the result; None where no stage does."""
        makers = [self.stage_of.get(made_by(node).name) for node in self.graph.output_node().all_input_nodes]
        return max((stage for stage in makers if stage is not None), default=None)

    def replace(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def with_own_graph(self) -> Program:
        """The same program with a copy of the graph, which a pass may change: node names stay."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return self.replace(graph=graph)

    def __str__(self) -> str:
        names = self.stage_names or range(1 + max(self.stage_of.values(), default=0))
        notes = {name: f"  # stage {names[stage]}" for name, stage in self.stage_of.items()}
        notes |= dict.fromkeys(self.copied, "  # copied")
        *nodes, output = self.graph.nodes
        lines = [f"{node.format_node()}{notes.get(node.name, '')}" for node in nodes]
        return "\n".join([*lines, f"return {output.args[0]}"])


def is_boundary(node: Node) -> bool:
    return node.op == "call_function" and node.target is boundary


def is_boundary_value(node: Node) -> bool:
    """Whether ``node`` is one value behind a boundary: ``getitem(boundary, i)``."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    return isinstance(source, Node) and is_boundary(source)


def gather_of(marker: Node) -> Gather | None:
    """What a boundary gathers; None where it is an ordinary one."""
    return Gather(*marker.args[2:]) if len(marker.args) > 2 else None  # type: ignore[arg-type]


def before_boundary(node: Node) -> Node:
    """The value in front of the boundary that ``node`` is a value behind of."""
    marker, index = node.args
    value: Node = marker.args[0][index]  # type: ignore[union-attr, index, assignment]
    return value


def made_by(node: Node) -> Node:
    """The node that makes a value: what is in front of all boundaries that ``node`` stands behind."""
    return made_by(before_boundary(node)) if is_boundary_value(node) else node


def readers(value: Node) -> Iterator[Node]:
    """Who uses a value, through boundaries too."""
    for user in value.users:
        if not is_boundary(user):
            yield user
        else:
            for out in user.users:
                if before_boundary(out) is value:
                    yield from readers(out)


def is_compute(node: Node) -> bool:
    """Whether ``node`` does something: no input, parameter, boundary or output."""
    return node.op.startswith("call_") and not is_boundary(node) and not is_boundary_value(node)


def is_assertion(node: Node) -> bool:
    """Whether ``node`` only raises an error where its operand is false."""
    return node.target in CHECKS


def called_in(node: Node) -> tuple[str, ...]:
    """The submodules that a node was called in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(path for path, _ in stack.values() if path)


def where(node: Node) -> str:
    """The user's source line of a node, as `` (model.py:12: y = x + 1)``; empty where it is not known."""
    *_, last = ("", *_FRAME.findall(node.stack_trace or ""))
    return last and f" ({last[0]}: {last[1]})"


_FRAME = re.compile(r"^ *(File .*)\n? *(.*)$", re.MULTILINE)
"""A line of a traceback, and the code in the line behind it."""


# --- the module of a graph, whose submodules and tensors bear the model's names, but where these are taken ---

_TAKEN = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
"""What ``fx.GraphModule`` has itself: ``graph``, ``code``, ``meta``, ``recompile``."""


def graph_module(root: Mapping[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A module that runs a graph on what its nodes name in ``root``.

    >>> model = nn.ModuleDict({"graph": nn.Linear(2, 2), "class": nn.Linear(2, 2)})
    >>> graph = fx.Graph()
    >>> _ = graph.call_module("class", (graph.call_module("graph", (graph.placeholder("x"),)),))
    >>> [name for name, _ in graph_module(dict(model), graph, "stage").named_children()]
    ['graph_', 'class_']
    """
    own = _names(root)
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            node.target = own[str(node.target)]
    return fx.GraphModule({own[name]: value for name, value in root.items()}, graph, class_name=class_name)


def _names(targets: Iterable[str]) -> dict[str, str]:
    """For each target one that a graph's module can have, and its generated code can write."""
    # all paths, of owners too: a new name must be none of them
    known = {tuple(target.split(".")[:end]) for target in targets for end in range(1, target.count(".") + 2)}
    found: dict[str, str] = {}
    for target in targets:
        parts = target.split(".")
        for place, part in enumerate(parts):
            is_taken = keyword.iskeyword(part) or (place == 0 and part in _TAKEN)
            while is_taken and (part in _TAKEN or (*target.split(".")[:place], part) in known):
                part += "_"
            parts[place] = part
        found[target] = ".".join(parts)
    return found


# --- sizes of inputs, which every rank knows, whatever it was given ---

Step = tuple[Callable[[Any, Any], Any], Any]
"""``getitem`` or ``getattr``, and its second argument: a step into a container."""


class SizeOf(str):
    """The name of such a number, as ``images[0].shape[2]``: which input, the steps to its tensor, the dimension."""

    input: str
    steps: tuple[Step, ...]
    dim: int

    @staticmethod
    def asked(node: Node) -> SizeOf | None:
        """What a node that asks for a size asks for; None where that is no input's."""
        source, dim = node.args
        steps: list[Step] = []
        while isinstance(source, Node) and source.target in (operator.getitem, getattr):
            steps.insert(0, (source.target, source.args[1]))
            source = source.args[0]
        if not isinstance(source, Node) or source.op != "placeholder" or not isinstance(dim, int):
            return None
        words = "".join(f"[{key!r}]" if step is operator.getitem else f".{key}" for step, key in steps)
        made = SizeOf(f"{source.target}{words}.shape[{dim}]")
        made.input, made.steps, made.dim = str(source.target), tuple(steps), dim
        return made

    def of(self, inputs: Mapping[str, Any]) -> int:
        """The number. ``inputs``: by name, with tensors or what is like them."""
        value = inputs[self.input]
        for step, key in self.steps:
            value = step(value, key)
        return int(value.shape[self.dim])
