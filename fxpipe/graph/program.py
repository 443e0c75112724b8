"""``Program``: a captured model as a single graph, and queries about its nodes. Frozen."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Reversible, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.fx import Node

from fxpipe.graph.boundary import Gather, Gathered, boundary, boundary_label
from fxpipe.graph.question import Answers
from fxpipe.seeds import Generators
from fxpipe.snapshots.snapshot import Memo
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.operators import CHECKS

Shapes = tuple[tuple[int, ...] | None, ...]
"""The shape of each leaf of a value; None for a leaf that is no tensor."""
SizeGuard = Callable[[Sequence[Any]], bool]
"""A function of the inputs' tensors, in order, each a value with ``size()``, ``stride()`` and ``storage_offset()``."""
LAYERS = "layers"
"""``recompute=LAYERS``: the largest modules of which forward calls several."""


def named(pattern: str, names: Iterable[str]) -> list[str]:
    """Returns the names that are the pattern, or match it."""
    return [name for name in names if name == pattern or fnmatchcase(name, pattern)]


IN_PLACE_NAMES = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
"""The names in ``operator`` of ``x += y`` and similar: each function writes its first argument, and returns it."""


@dataclass(frozen=True)
class Effects:
    """The effects of a call of an opaque module other than its result, as a capture saw them.

    ``reads``, ``writes``: the names of the model's parameters and buffers that the call uses, and of those that it
    writes. ``shares``: the indices of the tensor arguments whose memory the result shares. ``is_rehearsed``: whether
    the capture ran the call on made-up values, since its code looks at the values of tensors.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    draws_random: bool = False
    is_rehearsed: bool = False
    runs_python: bool = True
    """Whether the call may run code of the user's."""
    generators: frozenset[int] = frozenset()
    """The ids of the random generators, of Python, NumPy or the model's own, from which the call drew."""


@dataclass(frozen=True)
class Program:
    """A captured model: an fx graph, the module whose parameters the graph names, and the results of the passes.

    Facts about nodes are stored by node name, so that a pass that copies the graph keeps them.
    """

    module: nn.Module
    graph: fx.Graph
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    tracer: str = ""
    """The tracer's name."""
    refusals: tuple[tuple[str, str], ...] = ()
    """The tracers that were tried before, and why they could not capture the model."""
    result: pytree.TreeSpec | None = None
    """The structure that makes the graph's flat results the model's result; None: they are the result."""
    opaque: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules that the graph calls and that are no submodules of the model, by their names in the graph."""
    effects: Mapping[str, Effects] = field(default_factory=dict)
    """The effects of calls of opaque modules, by node name."""
    holds_for: SizeGuard | None = None
    """The sizes of input leaves for which the program holds, if some are symbolic; None: the captured sizes."""
    holds_for_any_size: bool = False
    """Whether the program holds for inputs of any sizes; it then needs no ``holds_for``."""
    fixed_sizes: str = ""
    """A text that says which symbolic sizes forward converts into Python numbers, and on which lines."""
    answers: Answers = ()
    """The questions of forward about its inputs, and the answers for which the program is valid."""
    sets: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """The attributes that forward sets before it reads them: (the id of a ``__dict__``, a name) → the user's line."""
    memos: tuple[Memo, ...] = ()
    """The attributes that were None, and that the first forward sets to a plain value, once and for all."""
    computed_with: tuple[tuple[str, Tensor, int], ...] = ()
    """Tensors of the model, neither parameters nor buffers, with whose values the capture has computed: their names,
    the tensors, and how often they had been written in place."""
    copied: frozenset[str] = frozenset()
    """The names of nodes that every stage that needs them computes for itself."""
    written: tuple[frozenset[str], ...] = ()
    """Groups of nodes that share storage, if some node writes that storage."""
    first: Program | None = None
    """The first capture of the model, if this is a later capture: it has the first's stages, and treats the tensors
    that the first writes as written."""
    stage_of: Mapping[str, int] = field(default_factory=dict)
    """Node name → stage, in topological order of the stages; copied nodes have none."""
    stage_names: tuple[str, ...] = ()
    gathered: Mapping[int, Gathered] = field(default_factory=dict)
    """The stages that run once for a group of micro-batches, by number."""
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    """Node name → the shapes of its value for a micro-batch of the example, under every tracer. Known to the passes of
    ``compile(passes=...)``; a node that needs real numbers may have none, and none has without an example."""
    generators: Generators = field(default_factory=dict)
    """The random generators of the model's own, by name."""
    recompute: str | tuple[str, ...] = ()
    """The layers to checkpoint: ``LAYERS``, or patterns of the names of submodules."""
    layers: Mapping[str, str] = field(default_factory=dict)
    """Path of each such layer → the reason why a call of it stays as it is; "" for a checkpointed layer."""
    inside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Call of a checkpointed layer → the nodes of ``plain`` that run in it."""
    plain: Program | None = None
    """The program before its layers were checkpointed; None if none were asked for."""

    @property
    def nodes(self) -> Reversible[Node]:
        """The graph's nodes, in order; a pass may insert nodes while it iterates over them."""
        return self.graph.nodes

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(str(node.target) for node in self.nodes if node.op == "placeholder")

    def attribute(self, named: str | Node) -> Any:
        """Returns the attribute that a ``get_attr`` or ``call_module`` node names, or the attribute of that name."""
        target = named if isinstance(named, str) else str(named.target)
        if target in self.constants:
            return self.constants[target]
        if target in self.opaque:
            return self.opaque[target]
        owner, _, name = target.rpartition(".")
        return getattr(self.module.get_submodule(owner), name) if target else self.module

    @property
    def output_stage(self) -> int | None:
        """The last stage that makes a part of the result; None if no stage does."""
        makers = [self.stage_of.get(made_by(node).name) for node in self.graph.output_node().all_input_nodes]
        return max((stage for stage in makers if stage is not None), default=None)

    def replace(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def with_own_graph(self) -> Program:
        """Returns the program with a copy of the graph, which a pass may change; node names do not change."""
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
    """Whether ``node`` is a result of a boundary: ``getitem(boundary, i)``."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    return isinstance(source, Node) and is_boundary(source)


def gather_of(marker: Node) -> Gather | None:
    """Returns the ``Gather`` of a boundary; None for an ordinary boundary."""
    return Gather(*marker.args[2:]) if len(marker.args) > 2 else None  # type: ignore[arg-type]


def before_boundary(node: Node) -> Node:
    """Returns the argument of a boundary whose result is ``node``."""
    marker, index = node.args
    value: Node = marker.args[0][index]  # type: ignore[union-attr, index, assignment]
    return value


class Crossing(NamedTuple):
    """How a value that passes between stages is recorded."""

    boundary: str = ""
    """The first boundary that the value crosses and its number there, as ``boundary_label``."""
    gradient: str = ""
    """The name of the gradient that other stages send back: the value's, unless its own stage reads it, too."""
    gradient_boundary: str = ""
    """The boundary, if other stages read the value only behind it."""
    what: str = ""
    """The value in words, as ``described``."""


def crossings(program: Program) -> dict[str, Crossing]:
    """Returns the name of each value that passes between stages → how the value is recorded."""
    first: dict[Node, tuple[str, Node]] = {}
    for number, marker in enumerate(filter(is_boundary, program.nodes)):
        for index, value in enumerate(marker.args[0]):  # type: ignore[arg-type]
            label = boundary_label(marker.meta.get("boundary", number), marker.args[1], index)
            first.setdefault(made_by(value), (label, marker))
    found = dict[str, Crossing]()
    for value in program.nodes:
        stage = program.stage_of.get(value.name)
        uses = [reader for reader in readers(value) if reader.op != "output"]
        outside = {reader for reader in uses if program.stage_of.get(reader.name) != stage}
        if stage is not None and outside:
            part = f" from {len(outside)} of {len(set(uses))} uses" * (len(outside) < len(set(uses)))
            label, crossed = first.get(value, ("", value))
            behind = {each for out in crossed.users if made_by(out) is value for each in readers(out)}
            found[value.name] = Crossing(label, value.name + part, label * (outside <= behind), described(value))
    return found


def described(node: Node) -> str:
    """A value in words: the submodule that returns it, or the operation and the submodule in which that runs."""
    if node.op == "call_module":
        return str(node.target)
    if node.target is operator.getitem:
        return f"{described(node.all_input_nodes[0])}[{node.args[1]}]"
    inside = [f"of {path}" for path in called_in(node)[-1:]]
    what = f".{node.args[1]}" if node.target is getattr else re.sub(r"_\d+$", "", node.name)
    return " ".join([what, *inside])


def made_by(node: Node) -> Node:
    """Returns the node that computes a value: the value before all boundaries that it passed through."""
    return made_by(before_boundary(node)) if is_boundary_value(node) else node


def passed(node: Node) -> list[Node]:
    """Returns the boundaries that a value passed through, in order."""
    return [*passed(before_boundary(node)), node.all_input_nodes[0]] if is_boundary_value(node) else []


def readers(value: Node) -> Iterator[Node]:
    """Yields the nodes that use a value, also through boundaries."""
    for user in value.users:
        if not is_boundary(user):
            yield user
        else:
            for out in user.users:
                if before_boundary(out) is value:
                    yield from readers(out)


def is_compute(node: Node) -> bool:
    """Whether ``node`` computes something: it is no input, parameter, boundary or output."""
    return node.op.startswith("call_") and not is_boundary(node) and not is_boundary_value(node)


def is_assertion(node: Node) -> bool:
    """Whether ``node`` only raises an error if its operand is false."""
    return node.target in CHECKS


def called_in(node: Node) -> tuple[str, ...]:
    """Returns the names of the submodules in which a node was called, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(path for path, _ in stack.values() if path)


def where(node: Node) -> str:
    """Returns the user's source line of a node, as `` (model.py:12: y = x + 1)``; empty if unknown."""
    *_, last = ("", *_FRAME.findall(node.stack_trace or ""))
    return last and f" ({last[0]}: {last[1]})"


_FRAME = re.compile(r"^ *(File .*)\n? *(.*)$", re.MULTILINE)
"""A line of a traceback, and the code in the next line."""


# --- the module of a graph, whose submodules and tensors have the model's names, unless these are taken ---

_TAKEN = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
"""The attributes of ``fx.GraphModule`` itself: ``graph``, ``code``, ``meta``, ``recompile``."""


def graph_module(root: Mapping[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """Returns a module that runs a graph on the values that its nodes name in ``root``.

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
    """Returns, for each target, a name that a graph's module can have, and that its generated code can contain."""
    # all paths, of owners too: a new name must differ from all of them
    paths = {tuple(target.split(".")[:end]) for target in targets for end in range(1, target.count(".") + 2)}
    names: dict[str, str] = {}
    for target in targets:
        parts = target.split(".")
        for depth, part in enumerate(parts):
            is_taken = keyword.iskeyword(part) or (depth == 0 and part in _TAKEN)
            while is_taken and (part in _TAKEN or (*target.split(".")[:depth], part) in paths):
                part += "_"
            parts[depth] = part
        names[target] = ".".join(parts)
    return names


# --- sizes of inputs, which every rank knows, whichever inputs it gets ---

Step = tuple[Callable[[Any, Any], Any], Any]
"""``getitem`` or ``getattr``, and its second argument: a step into a container."""


class SizeOf(str):
    """The name of an input's size, as ``images[0].shape[2]``: the input, the steps to its tensor, the dimension."""

    input: str
    steps: tuple[Step, ...]
    dim: int

    @staticmethod
    def queried_by(node: Node) -> SizeOf | None:
        """Returns the size that a node queries; None if it is no size of an input."""
        source, dim = node.args
        steps: list[Step] = []
        while isinstance(source, Node) and source.target in (operator.getitem, getattr):
            steps.insert(0, (source.target, source.args[1]))
            source = source.args[0]
        if not isinstance(source, Node) or source.op != "placeholder" or not isinstance(dim, int):
            return None
        words = "".join(f"[{key!r}]" if step is operator.getitem else f".{key}" for step, key in steps)
        size = SizeOf(f"{source.target}{words}.shape[{dim}]")
        size.input, size.steps, size.dim = str(source.target), tuple(steps), dim
        return size

    def of(self, inputs: Mapping[str, Any]) -> int:
        """Returns the size. ``inputs``: by name, with tensors or their descriptions."""
        value = inputs[self.input]
        for step, key in self.steps:
            value = step(value, key)
        return int(value.shape[self.dim])
