"""``StageGraph``: a program that is cut into stages, and the values that pass between the stages. Frozen."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from tabulate import tabulate
from torch import Tensor, fx, nn

from fxpipe.errors import PartitionError, nearest, printable
from fxpipe.graph.boundary import Gathered, Mode, running
from fxpipe.graph.program import Crossing, Program, SizeOf
from fxpipe.graph.ranks import Placement, ranks_of
from fxpipe.graph.stage_work import StageWork, in_ms
from fxpipe.graph.topological import topological_order
from fxpipe.notebook import Tabular, listed
from fxpipe.plain_data import admitted
from fxpipe.stage.awaiting import reading
from fxpipe.stage.loss import Counting
from fxpipe.stage.modes import modes_restored
from fxpipe.stage.opaque_call import unwritten
from fxpipe.stage.stage_calls import Backward, Forward
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import hook_tables
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.validation import Expected, check, is_list, is_mapping, is_text, is_whole, list_of, shown


@dataclass
class OwnGenerator:
    """A random generator of the model's own. In ``stage``, the first that draws from it, its state goes on from draw to
    draw as in the model; in the other stages it is seeded. None: no stage was seen to draw. A step sets ``value`` to
    the generator that the user has put in its place."""

    value: Any
    stage: int | None


@admitted
@dataclass(frozen=True, order=True)
class Edge:
    """A value that passes from the stage that makes it to a stage that uses it."""

    source: int
    target: int
    value: str


class ByLayers(NamedTuple):
    """A stage's code in which calls of layers keep only their inputs. ``layers``: their paths."""

    module: nn.Module | Callable[..., Any]
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """A stage: a function from batch inputs and received values to the values that other stages need."""

    index: int
    name: str
    module: nn.Module | Callable[..., Any]
    function: Callable[..., tuple[Any, ...]]
    """``function(*inputs)`` returns a value per outgoing edge, and on the output stage the model's result, or its
    leaves if ``result`` has its structure."""
    inputs: tuple[str | Edge, ...]
    """In the order of the arguments: a batch input by name, a ``SizeOf``, or the edge on which a value arrives."""
    outputs: tuple[Edge, ...]
    returns_result: bool
    tensors: Mapping[str, Tensor]
    """The stage's parameters and buffers, by the model's own names."""
    draws_random: bool
    runs_python: bool = False
    """Whether the stage runs the user's own code, which may draw Python's and NumPy's random numbers."""
    has_backward: bool = False
    """Whether the stage, or a stage before it, has a trainable parameter."""
    result: pytree.TreeSpec | None = None
    deferring: Callable[..., tuple[Any, ...]] | None = None
    """``function`` for tables that split the stage's backward into I and W. It takes a ``Deferred`` before its inputs,
    which collects the gradients of parameters for W. None if the stage's backward cannot be split."""
    in_input: tuple[str, ...] = ()
    """The parameters whose gradients I makes, even if the table has a W."""
    gathered: Gathered | None = None
    """For a stage that runs once for several micro-batches: how many, and whose rows. None for other stages."""
    ways: tuple[Mode | None, ...] = ()
    """How a gathered stage gathers each input; None if the input's stage runs for the same group."""
    varies: bool = False
    """Whether shapes of the stage's values, or which values need a gradient, may differ between calls for inputs of one
    shape. Each value is then sent after its description; so are later stages' values, unless known."""
    begins: str = ""
    """For a stage that has no name and runs no submodule alone: its first operation, in words."""
    by_layers: ByLayers | None = None
    """The stage's code with its layers checkpointed, for ``recompute="auto"``; None if nothing of it can be."""

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Returns a value per outgoing edge, and on the output stage the model's result."""
        # nn.Module.__call__ costs more than a small graph's forward, and is needed only for hooks
        function, hooks = self.function, self._hooks
        return self._returned(function if hooks is None or any(hooks) else function.forward, inputs)  # type: ignore[attr-defined]

    @cached_property
    def _hooks(self) -> Sequence[Mapping[int, Any]] | None:
        """The hook tables of a graph's module; None for other functions."""
        return hook_tables(self.function) if isinstance(self.function, fx.GraphModule) else None

    def _returned(self, function: Callable[..., tuple[Any, ...]], inputs: Sequence[Any]) -> tuple[Any, ...]:
        with modes_restored(), running(self.name):
            outputs: tuple[Any, ...] = reading(function)(*inputs)
        if self.result is None:
            return outputs
        result = outputs[-1][0] if self._is_bare else pytree.tree_unflatten(outputs[-1], self.result)
        return *outputs[:-1], result

    @cached_property
    def _is_bare(self) -> bool:
        """Whether the model's result is in no container; a step then needs no ``tree_unflatten``."""
        return self.result is not None and self.result.is_leaf()

    @property
    def batch_inputs(self) -> tuple[str, ...]:
        """The batch inputs that the stage's rank must get."""
        return tuple(name for name in self.inputs if isinstance(name, str) and not isinstance(name, SizeOf))

    @property
    def sizes(self) -> tuple[SizeOf, ...]:
        """The sizes of batch inputs that the stage gets."""
        return tuple(name for name in self.inputs if isinstance(name, SizeOf))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}

    @property
    def held(self) -> set[int]:
        """The identities of the stage's tensors: each capture may use another name of a tied tensor."""
        return {id(tensor) for tensor in self.tensors.values()}

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the stage's inputs: the model's names of batch inputs, and the makers' names of values."""
        return tuple(entry if isinstance(entry, str) else entry.value for entry in self.inputs)

    def __repr__(self) -> str:
        outputs = listed([*dict.fromkeys(self._output_names())])
        return f"<Stage {self.index} `{printable(self.name)}`: ({listed(self.input_names)}) -> ({outputs})>"

    def _output_names(self) -> tuple[str, ...]:
        return (*(edge.value for edge in self.outputs), *["result"] * self.returns_result)

    @cached_property
    def forward(self) -> Forward:
        """``forward(*inputs) -> (outputs, saved)``; prints as code."""
        code = self.module.code.strip() if isinstance(self.module, fx.GraphModule) else repr(self.module)
        return Forward(self.name, self.run, self.input_names, self._output_names(), code)

    @cached_property
    def forward_in_halves(self) -> Forward:
        """The forward for a backward that the table splits into I and W; ``forward`` if it cannot be split."""
        function, plain = self.deferring, self.forward
        if function is None:
            return plain
        run = lambda *inputs: self._returned(function, inputs)  # noqa: E731
        return replace(plain, function=run, in_halves=True)

    @cached_property
    def backward(self) -> Backward:
        """``backward(saved, gradients) -> input gradients``; prints as code."""
        return Backward(self.name, self.input_names, self._output_names())


@dataclass(frozen=True)
class StageGraph(Tabular):
    """The stages of a model in topological order, and the values that pass between them."""

    stages: tuple[Stage, ...]
    inputs: tuple[str, ...]
    """The model's inputs, in call order."""
    module: nn.Module
    """The whole model, which defines the names of the stages' parameters."""
    placement: Placement = ()
    """The pipe rank, or ranks, of each stage, once decided."""
    bytes_of: Mapping[Edge, int] = field(default_factory=lambda: MappingProxyType({}))
    """The bytes of each edge's value for one micro-batch, once a step has shown them."""
    origin: str = ""
    """The origin of the graph: the tracer, or the user's callables."""
    recomputed: frozenset[str] = frozenset()
    """The names of the stages whose forward runs again for their backward."""
    offloaded: frozenset[str] = frozenset()
    """The names of the stages whose activations wait in the host's memory for their backward."""
    labels: str = ""
    """A text that says whether the batch's labels are counted."""
    written: frozenset[str] = frozenset()
    """The names of parameters and buffers that forward wrote during a capture, in training or evaluation."""
    written_by_batch: frozenset[str] = frozenset()
    """The names of those that operators of this capture wrote by the batch's values."""
    counting: Counting | None = None
    """How the items of the loss are counted, if the loss is known to be a ``Sum``."""
    crossings: Mapping[str, Crossing] = field(default_factory=lambda: MappingProxyType({}))
    """The name of each value that passes between captured stages → how it is recorded."""
    layers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Path of each layer that ``recompute=`` asks to checkpoint → why a call of it stays as it is, or ""."""
    work: StageWork | None = None
    """The seconds of the stages, and their shares of the work, if known."""
    complete: Callable[[StageGraph], StageGraph] | None = field(default=None, compare=False)
    """Adds the figures that follow from the example's shapes; called when the graph is printed."""
    generators: Mapping[str, OwnGenerator] = field(default_factory=lambda: MappingProxyType({}))
    """The random generators of the model's own, by name."""
    by_layers: frozenset[str] = frozenset()
    """The names of the stages that run their code with checkpointed layers, as a search chose."""

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The values that pass between stages, by the stage that makes them."""
        return tuple(edge for stage in self.stages for edge in stage.outputs)

    @cached_property
    def sizes(self) -> frozenset[SizeOf]:
        """The sizes of batch inputs that stages get."""
        return frozenset(size for stage in self.stages for size in stage.sizes)

    @property
    def stage_edges(self) -> tuple[tuple[int, int], ...]:
        """The edges as pairs of stages, each once, sorted."""
        return tuple(sorted({(edge.source, edge.target) for edge in self.edges}))

    @property
    def shared(self) -> list[tuple[str, nn.Parameter, tuple[int, ...]]]:
        """The parameters that several stages use: (name, parameter, stages)."""
        users: dict[nn.Parameter, dict[int, str]] = {}
        for stage in self.stages:
            for name, parameter in stage.parameters.items():
                users.setdefault(parameter, {}).setdefault(stage.index, name)
        return [(min(names.values()), shared, tuple(names)) for shared, names in users.items() if len(names) > 1]

    @property
    def tied(self) -> tuple[tuple[int, ...], ...]:
        """Groups of stages that use the same parameter, each group once, sorted."""
        return tuple(sorted({stages for _, _, stages in self.shared}))

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Returns the pipe ranks of a stage, once decided, in the order in which they take its micro-batches."""
        return ranks_of(self.placement[stage])

    @cached_property
    def output_stage(self) -> int:
        """The number of the stage that returns the model's result."""
        return next(stage.index for stage in self.stages if stage.returns_result)

    @property
    def names(self) -> tuple[str, ...]:
        """The stages' names, in order."""
        return tuple(stage.name for stage in self.stages)

    def groups(self, microbatches: int) -> tuple[int, ...]:
        """Per stage, the micro-batches of a group, of so many in all; PartitionError if groups do not divide these."""
        sizes = [1 if stage.gathered is None else stage.gathered.group or microbatches for stage in self.stages]
        for stage, size in zip(self.stages, sizes, strict=True):
            # a smaller group would compute another loss
            if microbatches % size:
                raise PartitionError(
                    f"stage {stage.name!r} gathers groups of {size} micro-batches, which do not divide the "
                    f"{microbatches} of this batch; write another group=, or microbatches= a multiple of it"
                )
        return tuple(sizes)

    @property
    def gathers(self) -> dict[int, int | None]:
        """Gathered stage → for how many micro-batches it runs at once, None for all."""
        return {stage.index: stage.gathered.group for stage in self.stages if stage.gathered is not None}

    @cached_property
    def sees_replicas(self) -> bool:
        """Whether a stage gets the rows of other replicas."""
        return any("global" in stage.ways for stage in self.stages)

    def with_backward(self) -> StageGraph:
        """The graph in which a stage has a backward if it, or an earlier stage, has a trainable parameter now."""
        # the stages are in topological order: earlier stages are decided already
        stages: list[Stage] = []
        for stage in self.stages:
            trains = any(parameter.requires_grad for parameter in stage.parameters.values())
            fed = any(stages[entry.source].has_backward for entry in stage.inputs if isinstance(entry, Edge))
            stages.append(replace(stage, has_backward=trains or fed))
        return replace(self, stages=tuple(stages))

    @property
    def held(self) -> set[int]:
        """The identities of the tensors that stages use."""
        return {key for stage in self.stages for key in stage.held}

    def with_tensors_of_module(self) -> StageGraph:
        """Returns the graph whose stages hold the tensors that now have their names in the module."""
        tensors = all_tensors(self.module)
        stages = [replace(stage, tensors={name: tensors[name] for name in stage.tensors}) for stage in self.stages]
        return replace(self, stages=tuple(stages))

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __contains__(self, item: object) -> bool:
        return item in self.names or any(item is stage for stage in self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, key: int | str) -> Stage:
        if is_whole(key) and -len(self) <= int(key) < len(self):
            return self.stages[int(key)]
        for stage in self.stages:
            if stage.name == key:
                return stage
        hint = nearest(key, self.names) if is_text(key) else f"; write a number from 0 to {len(self) - 1}, or a name"
        raise PartitionError(f"there is no stage {shown(key)}{hint}")

    def __str__(self) -> str:
        return str(self.complete(replace(self, complete=None))) if self.complete is not None else self._table()

    def _table(self) -> str:
        rows, work = [], self.work
        has_shares = work is not None and min(work.shares) < 0.995
        what = {name: crossing.what for name, crossing in self.crossings.items()}
        for stage in self.stages:
            rank = ", ".join(map(str, self.ranks(stage.index))) if self.placement else "-"
            parameters = sum(parameter.numel() for parameter in stage.parameters.values())
            arriving = [edge for edge in self.edges if edge.target == stage.index]
            places = [f"{what.get(edge.value, edge.value)} → {self.stages[edge.target].name}" for edge in stage.outputs]
            places += ["result"] * stage.returns_result
            figures = [f"{parameters:,}", self._bytes(arriving), self._bytes(stage.outputs)]
            if work is not None:
                figures += [in_ms(work.forward[stage.index]), in_ms(work.backward[stage.index])]
                figures += [f"{work.shares[stage.index]:.0%}"] * has_shares
            rows.append((stage.name, rank, *figures, ", ".join(places)))
        times = [] if work is None else ["F, ms", "B, ms", *["of its rank"] * has_shares]
        headers = ["stage", "rank", "parameters", "bytes in", "bytes out", *times, "where its values go"]
        sides = ["left", *["right"] * (len(headers) - 2), "left"]
        grid = tabulate(rows, headers=headers, disable_numparse=True, colalign=sides)
        timed = [] if work is None else [f"F and B of a micro-batch: {work.source}", *work.idle]
        unnamed = [f"{stage.name} begins with {stage.begins}" for stage in self.stages if stage.begins]
        runs = [f"{s.name} runs once for {_size(s.gathered)}" for s in self.stages if s.gathered is not None]
        marks = (("recomputed", self.recomputed), ("offloaded", self.offloaded))
        marked = [
            f"{what}: {', '.join(name for name in self.names if name in those)}" for what, those in marks if those
        ]
        notes = [*marked, *_checkpointed(self.layers), self.origin and f"captured by {self.origin}", self.labels]
        halves = [_made_in_input(stage) for stage in self.stages if stage.in_input]
        if halves:
            halves.append('a bubble "at B = 2 F" counts half of B as W; fxpipe.preview counts the part that W has')
        # The record tracer keeps modules, and W is made of single calls.
        if halves and "the record tracer" in self.origin:
            halves.append('tracer="export" takes modules apart, and leaves more gradients to W, where it captures them')
        return printable("\n".join([grid, *timed, *unnamed, *runs, *filter(None, notes), *halves]))

    def __repr__(self) -> str:
        return f"<StageGraph of {len(self)} stages: {listed(self.names)}>"

    def _bytes(self, edges: Sequence[Edge]) -> str:
        if any(edge not in self.bytes_of for edge in edges):
            return "after 1st step"
        return f"{sum(self.bytes_of[edge] for edge in edges):,}"

    @staticmethod
    def from_callables(
        stages: Mapping[str, nn.Module | Callable[..., Any]],
        edges: Sequence[tuple[str, str]],
        inputs: Mapping[str, Sequence[str]],
    ) -> StageGraph:
        """Returns a stage graph from the user's callables, for models that no tracer can capture: each stage is opaque.

        A stage is called with its batch inputs, followed, in the order of ``edges``, by the results of the stages
        before it. Exactly one stage has no outgoing edge: this stage returns the loss.

        Parameters are named ``<stage name>.<name in the module>``. fxpipe does not find parameters that a function
        holds outside of a module; pass a module.

        Args:
            stages: name → module or function, in any order.
            edges: (from, to) pairs of names.
            inputs: stage name → the batch inputs that the stage takes; the model's inputs are all of these, in order
                of first mention.

        Raises:
            PartitionError: a name is no stage or cannot be one, a stage cannot be called, an edge is given twice, the
                edges form a cycle, or not exactly one stage returns the loss.
        """
        check(PartitionError, _KINDS, stages=stages, edges=edges, inputs=inputs)
        # an edge's value has the name of its source stage: a callable returns one value
        order = _ordered(list(stages), edges)
        index = {name: number for number, name in enumerate(order)}
        for name in inputs:
            if name not in index:
                raise PartitionError(f"inputs= names {name!r}, which is no stage{nearest(name, order)}")
        sinks = [name for name in order if all(source != name for source, _ in edges)]
        if len(sinks) != 1:
            raise PartitionError(
                f"exactly one stage returns the loss and has no edge out of it, but these have none: {sinks}; "
                "add the missing edges"
            )
        every = [Edge(index[source], index[target], source) for source, target in edges]
        built: list[Stage] = []
        for number, name in enumerate(order):
            call, batch_inputs = stages[name], inputs.get(name, ())
            leaving = tuple(edge for edge in every if edge.source == number)
            built.append(
                Stage(
                    index=number,
                    name=name,
                    module=call,
                    function=_fan_out(call, len(leaving), name, len(batch_inputs)),
                    inputs=(*batch_inputs, *(edge for edge in every if edge.target == number)),
                    outputs=leaving,
                    returns_result=name == sinks[0],
                    tensors=all_tensors(call, name) if isinstance(call, nn.Module) else {},
                    draws_random=True,
                    runs_python=True,
                    varies=True,
                )
            )
        module = nn.Module()
        for name, call in stages.items():
            if not name.isidentifier() or hasattr(module, name):
                raise PartitionError(f"{name!r} cannot name a stage: it is no plain name, or one that nn.Module uses")
            if isinstance(call, nn.Module):
                module.add_module(name, call)
        names = tuple(dict.fromkeys(name for stage in inputs.values() for name in stage))
        return StageGraph(tuple(built), names, module, origin="the user's callables").with_backward()


def _checkpointed(layers: Mapping[str, str]) -> Iterator[str]:
    """Yields texts that say which layers are checkpointed, and why others are not."""
    for why in dict.fromkeys(layers.values()):
        paths = [path for path, reason in layers.items() if reason == why]
        parts = [path.rpartition(".") for path in paths]
        runs = [[*run] for _, run in groupby(parts, lambda part: part[0] if part[2].isdecimal() else part)]
        # of several layers in one list, the first and the last are named
        some = ("".join(run[0]) + f" to {run[-1][2]}" * (len(run) > 1) for run in runs)
        yield f"{'not ' * bool(why)}checkpointed: {', '.join(some)}" + f", since {why}" * bool(why)


def _size(gathered: Gathered) -> str:
    what = "all micro-batches" if gathered.group is None else f"a group of {gathered.group} micro-batches"
    return what + " of all replicas" * ("global" in gathered.modes)


def _made_in_input(stage: Stage) -> str:
    """Returns a text that says which parameters' gradients I makes instead of W."""
    names, sizes = stage.in_input, {name: parameter.numel() for name, parameter in stage.parameters.items()}
    shown_names = ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
    share = sum(map(sizes.__getitem__, names)) / sum(sizes.values())
    return f"{stage.name}: I makes the gradients of {shown_names}, too ({share:.0%} of its parameters)"


def _is_name(value: Any) -> bool:
    return is_text(value) and value.isidentifier() and not keyword.iskeyword(value)


_KINDS: Mapping[str, Expected] = {
    "stages": Expected(
        lambda value: (
            is_mapping(value)
            and all(map(is_text, value))
            and all(callable(call) and not isinstance(call, type) for call in value.values())  # not a class
        ),
        "a dict name -> module or function",
    ),
    "edges": Expected(
        list_of(lambda pair: is_list(pair) and len(pair) == 2 and all(map(is_text, pair))),
        'a list of pairs of names, [("image", "loss")]',
    ),
    "inputs": Expected(
        lambda value: is_mapping(value) and all(map(list_of(_is_name), value.values())),
        'a dict name -> list of the inputs that a call gives it by name, {"image": ["pixels"]}',
    ),
}


def all_tensors(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Returns every parameter and buffer, by each of its names, after ``prefix``."""
    # nn.Module's own methods: those of torch's checkpoint_wrapper omit a part of the names
    return {
        **dict(nn.Module.named_parameters(module, prefix, remove_duplicate=False)),
        **dict(nn.Module.named_buffers(module, prefix, remove_duplicate=False)),
    }


def own_tensors(program: Program, node: fx.Node) -> dict[str, Tensor]:
    """The parameters and buffers, by name, that a node names, or that its module holds or is seen to use."""
    name = str(node.target)
    if node.op == "get_attr":
        return {} if name in program.constants else {name: program.attribute(name)}
    if node.op != "call_module":
        return {}
    if name in program.opaque:
        return {used: program.attribute(used) for used in program.effects[node.name].reads}
    return all_tensors(program.attribute(name), name)


def first_names(module: nn.Module) -> dict[int, str]:
    """Returns a dict: the identity of each parameter and buffer → its first name."""
    return {id(tensor): name for name, tensor in reversed(all_tensors(module).items())}


def _fan_out(call: Callable[..., Any], uses: int, name: str, input_count: int) -> Callable[..., tuple[Any, ...]]:
    """Returns ``call`` with its value passed to ``uses`` stages, or returned as the result if no stage uses it.

    ``call`` may not write values of other stages, which follow ``input_count`` batch inputs: in one process other users
    would see the write, on several ranks they would not.
    """

    def function(*inputs: Any) -> tuple[Any, ...]:
        with unwritten(f"stage {name!r}", inputs[input_count:]):
            value = call(*inputs)
        return (value,) * max(uses, 1)

    return function


def _ordered(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> list[str]:
    for edge in edges:
        for name in edge:
            if name not in names:
                raise PartitionError(f"edge {edge} names {name!r}, which is no stage{nearest(name, names)}")
        if list(edges).count(edge) > 1:
            raise PartitionError(f"edge {edge} is given twice")
    after = {name: [target for source, target in edges if source == name] for name in names}
    order = topological_order({name: number for number, name in enumerate(names)}, after)
    waiting = [name for name in names if name not in order]
    if waiting:
        raise PartitionError(f"the edges form a cycle through {waiting}; a stage graph must be acyclic")
    return list(order)


def bytes_in(value: Any) -> int:
    """Returns the bytes of all tensors in ``value``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
