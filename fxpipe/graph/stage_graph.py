"""``StageGraph``: a program cut into stages, and the values that pass between them. Frozen."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from tabulate import tabulate
from torch import Tensor, fx, nn

from fxpipe.errors import PartitionError, nearest, printable
from fxpipe.graph.awaiting import reading
from fxpipe.graph.boundary import Gathered, Mode, running
from fxpipe.graph.loss import Counting
from fxpipe.graph.modes import modes_restored
from fxpipe.graph.opaque_call import unwritten
from fxpipe.graph.plain_data import admitted
from fxpipe.graph.program import Program, SizeOf
from fxpipe.graph.ranks import Placement, ranks_of
from fxpipe.graph.stage_calls import Backward, Forward
from fxpipe.graph.topological import topological_order
from fxpipe.notebook import Tabular, listed
from fxpipe.torch_compat import hook_tables, pytree, tensors_in
from fxpipe.validation import Expected, check, is_list, is_mapping, is_text, is_whole, list_of, shown


@admitted
@dataclass(frozen=True, order=True)
class Edge:
    """One value on its way from the stage that makes it to one stage that uses it."""

    source: int
    target: int
    value: str


@dataclass(frozen=True)
class Stage:
    """One stage: a function from batch inputs and received values to the values that other stages need."""

    index: int
    name: str
    module: nn.Module | Callable[..., Any]
    function: Callable[..., tuple[Any, ...]]
    """``function(*inputs)`` returns one value per outgoing edge, and on the output stage the model's result, or the
    leaves of it where ``result`` says how they make it."""
    inputs: tuple[str | Edge, ...]
    """A batch input by name, a ``SizeOf`` one, or the edge that a value arrives on; the order of the arguments."""
    outputs: tuple[Edge, ...]
    returns_result: bool
    tensors: Mapping[str, Tensor]
    """Its parameters and buffers, by the model's own names."""
    draws_random: bool
    runs_python: bool = False
    """Whether code of the user's runs in it, which may draw Python's and NumPy's random numbers."""
    has_backward: bool = False
    """Whether it, or a stage before it, has something to train."""
    result: pytree.TreeSpec | None = None
    deferring: Callable[..., tuple[Any, ...]] | None = None
    """``function`` for tables that split its backward into I and W. It takes a ``Deferred`` in front of its inputs,
    which collects the gradients of parameters for W. None where the stage cannot be split."""
    in_input: tuple[str, ...] = ()
    """The parameters whose gradients are made in I, though the table has a W."""
    gathered: Gathered | None = None
    """Of a stage that runs once for several micro-batches: how many, and whose rows."""
    ways: tuple[Mode | None, ...] = ()
    """How each input is gathered then; None where the stage before runs for the same group."""
    varies: bool = False
    """Whether shapes of its values, or which of them need a gradient, may differ between calls for inputs of one shape.
    A description is then sent ahead of each value; so do the stages behind it, unless what they make is known."""

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """One value per outgoing edge, and on the output stage the model's result."""
        # nn.Module.__call__ costs more than a small graph's forward, and does nothing where there are no hooks
        function, hooks = self.function, self._hooks
        return self._returned(function if hooks is None or any(hooks) else function.forward, inputs)  # type: ignore[attr-defined]

    @cached_property
    def _hooks(self) -> Sequence[Mapping[int, Any]] | None:
        """The tables of hooks of a graph's module."""
        return hook_tables(self.function) if isinstance(self.function, fx.GraphModule) else None

    def _returned(self, function: Callable[..., tuple[Any, ...]], inputs: Sequence[Any]) -> tuple[Any, ...]:
        with modes_restored(), running(self.name):
            outputs: tuple[Any, ...] = reading(function)(*inputs)
        if self.result is None:
            return outputs
        return *outputs[:-1], pytree.tree_unflatten(outputs[-1], self.result)

    @property
    def batch_inputs(self) -> tuple[str, ...]:
        """The inputs that its rank must be given."""
        return tuple(name for name in self.inputs if isinstance(name, str) and not isinstance(name, SizeOf))

    @property
    def sizes(self) -> tuple[SizeOf, ...]:
        """The sizes of inputs that it is given."""
        return tuple(name for name in self.inputs if isinstance(name, SizeOf))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}

    @property
    def held(self) -> set[int]:
        """Its tensors, by identity: of the names of a tied one each capture may take another."""
        return {id(tensor) for tensor in self.tensors.values()}

    @property
    def input_names(self) -> list[str]:
        """What its inputs are called: batch inputs as the model calls them, values as their makers do."""
        return [entry if isinstance(entry, str) else entry.value for entry in self.inputs]

    def __repr__(self) -> str:
        outputs = listed([*dict.fromkeys(self._output_names())])
        return f"<Stage {self.index} `{printable(self.name)}`: ({listed(self.input_names)}) -> ({outputs})>"

    def _output_names(self) -> list[str]:
        return [edge.value for edge in self.outputs] + ["result"] * self.returns_result

    @cached_property
    def forward(self) -> Forward:
        """``forward(*inputs) -> (outputs, saved)``; prints as code."""
        code = self.module.code.strip() if isinstance(self.module, fx.GraphModule) else repr(self.module)
        return Forward(self.name, self.run, self.input_names, self._output_names(), code)

    @cached_property
    def forward_in_halves(self) -> Forward:
        """The forward of a micro-batch whose backward the table splits into I and W; ``forward`` without a split."""
        function, plain = self.deferring, self.forward
        if function is None:
            return plain
        run = lambda *inputs: self._returned(function, inputs)  # noqa: E731
        return Forward(self.name, run, plain.names, plain.outputs, plain.code, in_halves=True)

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
    """The whole model, whose names the stages' parameters bear."""
    placement: Placement = ()
    """The pipe rank of each stage, or its ranks, once they are decided."""
    bytes_of: Mapping[Edge, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes of each edge's value for one micro-batch, once a step has shown them."""
    origin: str = ""
    """Where the graph comes from: which tracer, or the user's callables."""
    recomputed: frozenset[str] = frozenset()
    """The names of the stages whose forward runs again for their backward."""
    labels: str = ""
    """Whether the batch's labels are counted, for a reader."""
    written: frozenset[str] = frozenset()
    """The parameters and buffers that a capture saw forward write, in training or evaluation."""
    counting: Counting | None = None
    """How the items of the loss are counted, where it is known to be a ``Sum``."""

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The values that pass between stages, by the stage that makes them."""
        return tuple(edge for stage in self.stages for edge in stage.outputs)

    @cached_property
    def sizes(self) -> frozenset[SizeOf]:
        """The sizes of inputs that stages are given."""
        return frozenset(size for stage in self.stages for size in stage.sizes)

    @property
    def stage_edges(self) -> tuple[tuple[int, int], ...]:
        """The edges as pairs of stages, each once, sorted."""
        return tuple(sorted({(edge.source, edge.target) for edge in self.edges}))

    @property
    def tied(self) -> tuple[tuple[int, ...], ...]:
        """Groups of stages that use the same parameter, each group once, sorted."""
        users: dict[int, dict[int, None]] = {}
        for stage in self.stages:
            for parameter in stage.parameters.values():
                users.setdefault(id(parameter), {})[stage.index] = None
        return tuple(sorted({tuple(stages) for stages in users.values() if len(stages) > 1}))

    def ranks(self, stage: int) -> tuple[int, ...]:
        """The pipe ranks of a stage, once they are decided, in the order in which they take its micro-batches."""
        return ranks_of(self.placement[stage])

    @property
    def output_stage(self) -> int:
        """The number of the stage that returns the model's result."""
        return next(stage.index for stage in self.stages if stage.returns_result)

    @property
    def names(self) -> tuple[str, ...]:
        """The stages' names, in order."""
        return tuple(stage.name for stage in self.stages)

    def groups(self, microbatches: int) -> tuple[int, ...]:
        """For each stage how many of so many micro-batches it runs for at once; PartitionError where none can be."""
        sizes = [1 if stage.gathered is None else stage.gathered.group or microbatches for stage in self.stages]
        for stage, size in zip(self.stages, sizes, strict=True):
            # a group of fewer micro-batches would be another loss
            if microbatches % size:
                raise PartitionError(
                    f"stage {stage.name!r} gathers groups of {size} micro-batches, which do not divide the "
                    f"{microbatches} of this batch; write another group=, or microbatches= a multiple of it"
                )
        return tuple(sizes)

    @property
    def gathers(self) -> dict[int, int | None]:
        """Stage → how many micro-batches it runs for at once, None for all; of those that gather."""
        return {stage.index: stage.gathered.group for stage in self.stages if stage.gathered is not None}

    @property
    def sees_replicas(self) -> bool:
        """Whether a stage is given the rows of other replicas."""
        return any("global" in stage.ways for stage in self.stages)

    def with_backward(self) -> StageGraph:
        """The same graph; each stage has a backward if it, or one before it, has a trainable parameter now."""
        # the stages are in topological order: those before each one are decided already
        stages: list[Stage] = []
        for stage in self.stages:
            trains = any(parameter.requires_grad for parameter in stage.parameters.values())
            fed = any(stages[entry.source].has_backward for entry in stage.inputs if isinstance(entry, Edge))
            stages.append(replace(stage, has_backward=trains or fed))
        return replace(self, stages=tuple(stages))

    @property
    def held(self) -> set[int]:
        """The tensors that stages use, by identity."""
        return {key for stage in self.stages for key in stage.held}

    def with_tensors_of_module(self) -> StageGraph:
        """The same graph; its stages hold the tensors that now bear their names in the module."""
        held = all_tensors(self.module)
        stages = [replace(stage, tensors={name: held[name] for name in stage.tensors}) for stage in self.stages]
        return replace(self, stages=tuple(stages))

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, key: int | str) -> Stage:
        if is_whole(key) and -len(self) <= int(key) < len(self):
            return self.stages[int(key)]
        for stage in self.stages:
            if stage.name == key:
                return stage
        known = nearest(key, self.names) if is_text(key) else f"; write a number from 0 to {len(self) - 1}, or a name"
        raise PartitionError(f"there is no stage {shown(key)}{known}")

    def __str__(self) -> str:
        rows = []
        for stage in self.stages:
            rank = ", ".join(map(str, self.ranks(stage.index))) if self.placement else "-"
            parameters = sum(parameter.numel() for parameter in stage.parameters.values())
            arriving = [edge for edge in self.edges if edge.target == stage.index]
            places = [f"{edge.value} → {self.stages[edge.target].name}" for edge in stage.outputs]
            places += ["result"] * stage.returns_result
            sizes = self._bytes(arriving), self._bytes(stage.outputs)
            rows.append((stage.name, rank, f"{parameters:,}", *sizes, ", ".join(places)))
        headers = ["stage", "rank", "parameters", "bytes in", "bytes out", "where its values go"]
        grid = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 4, "left"))
        runs = [f"{s.name} runs once for {_size(s.gathered)}" for s in self.stages if s.gathered is not None]
        again = ", ".join(name for name in self.names if name in self.recomputed)
        notes = [again and f"recomputed: {again}", self.origin and f"captured by {self.origin}", self.labels]
        halves = [_made_in_input(stage) for stage in self.stages if stage.in_input]
        return printable("\n".join([grid, *runs, *filter(None, notes), *halves]))

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
        """A stage graph from the user's own callables, for models that nothing can trace: each stage is opaque.

        A stage is called with its batch inputs and then, in the order of ``edges``, with what the stages before it
        returned. Exactly one stage has no edge out of it: it returns the loss.

        Parameters are named ``<stage name>.<name in the module>``. A function that holds parameters outside of a
        module cannot be seen to have any; give a module.

        Args:
            stages: name → module or function, in any order.
            edges: (from, to) pairs of names.
            inputs: stage name → the batch inputs that it takes; the model's inputs are these, in order of first
                mention.

        Raises:
            PartitionError: a name is no stage or cannot be one, a stage cannot be called, an edge is given twice, the
                edges form a cycle, or not exactly one stage returns the loss.
        """
        check(PartitionError, _KINDS, stages=stages, edges=edges, inputs=inputs)
        # an edge's value is called after the stage that makes it: a callable returns one value
        order = _ordered(list(stages), edges)
        index = {name: place for place, name in enumerate(order)}
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
        for place, name in enumerate(order):
            call, batch_inputs = stages[name], inputs.get(name, ())
            leaving = tuple(edge for edge in every if edge.source == place)
            built.append(
                Stage(
                    index=place,
                    name=name,
                    module=call,
                    function=_fan_out(call, len(leaving), name, len(batch_inputs)),
                    inputs=(*batch_inputs, *(edge for edge in every if edge.target == place)),
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


def _size(gathered: Gathered) -> str:
    what = "all micro-batches" if gathered.group is None else f"a group of {gathered.group} micro-batches"
    return what + " of all replicas" * ("global" in gathered.modes)


def _made_in_input(stage: Stage) -> str:
    """Which gradients of parameters I makes, and not W."""
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
            and all(callable(call) and not isinstance(call, type) for call in value.values())  # no class
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
    """Every parameter and buffer, by every name that it bears, each behind ``prefix``."""
    # nn.Module's own: torch's checkpoint_wrapper leaves a part out of names where it is asked itself
    return {
        **dict(nn.Module.named_parameters(module, prefix, remove_duplicate=False)),
        **dict(nn.Module.named_buffers(module, prefix, remove_duplicate=False)),
    }


def own_tensors(program: Program, node: fx.Node) -> dict[str, Tensor]:
    """The parameters and buffers that a node names, or that what it calls holds or is seen to use, by name."""
    name = str(node.target)
    if node.op == "get_attr":
        return {} if name in program.constants else {name: program.attribute(name)}
    if node.op != "call_module":
        return {}
    if name in program.opaque:
        return {used: program.attribute(used) for used in program.effects[node.name].reads}
    return all_tensors(program.attribute(name), name)


def first_names(module: nn.Module) -> dict[int, str]:
    """The identity of each parameter and buffer → the first name that it bears."""
    return {id(tensor): name for name, tensor in reversed(all_tensors(module).items())}


def _fan_out(call: Callable[..., Any], uses: int, name: str, given: int) -> Callable[..., tuple[Any, ...]]:
    """``call`` with its one value handed to ``uses`` stages, or returned as the result where there are none.

    What comes from other stages, behind the ``given`` inputs of the batch, it may not write: in one process the others
    that use it would see that, on several ranks they would not.
    """

    def function(*inputs: Any) -> tuple[Any, ...]:
        with unwritten(f"stage {name!r}", inputs[given:]):
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
    order = topological_order({name: place for place, name in enumerate(names)}, after)
    waiting = [name for name in names if name not in order]
    if waiting:
        raise PartitionError(f"the edges form a cycle through {waiting}; a stage graph must be acyclic")
    return list(order)


def bytes_in(value: Any) -> int:
    """Bytes of all tensors in ``value``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
