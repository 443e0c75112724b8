"""Stages compiled by a function of the user's, such as ``torch.compile``, on the ranks that run them.

Where a table has input-grad and weight-grad actions, AOTAutograd captures a stage's forward and both backwards, and
each is compiled by itself.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from fxpipe.distributed.activity import phase
from fxpipe.errors import RunError
from fxpipe.graph.deferred import Deferred
from fxpipe.graph.modes import ambient_autocast, within
from fxpipe.graph.stage_graph import Stage
from fxpipe.passes.cut_backward import BackwardPart, Halves, cut_backward
from fxpipe.passes.effects import operator_name
from fxpipe.torch_compat import aot_compiled, has_gradient_hooks, version_of

Function = Callable[..., Any]
StageCompiler = Callable[[Function], Function]
Piece = Callable[[Mapping[str, Any]], dict[str, Any]]


def compiled_lazily(stage: Stage, stage_compiler: StageCompiler) -> Stage:
    """The same stage, its function replaced by ``stage_compiler(module)`` when it first runs, and from then on.

    The compiler is given the stage's ``fx.GraphModule``, or its function where the user wrote it, and returns what is
    called with the same arguments for the same tuple. Only processes that run the stage compile it, once: a compiler
    that distinguishes shapes, as ``torch.compile`` does, is asked again by its own guards.
    """
    if isinstance(stage.function, Compiled):
        return stage
    original = stage.module if isinstance(stage.module, fx.GraphModule) else stage.function
    if isinstance(original, fx.GraphModule):
        _check_writes(original, stage.name)
    return replace(stage, function=Compiled(stage.name, original, stage_compiler))


def _check_writes(module: fx.GraphModule, name: str) -> None:
    """RunError for a write that AOTAutograd of torch 2.12 to 2.15 loses: into a 0-dimensional float64 on the CPU."""
    for node in module.graph.nodes:
        written = node.args[0] if node.args and operator_name(node).endswith("_") else None  # as copy_ and mul_ do
        if not isinstance(written, fx.Node) or written.op != "get_attr":
            continue
        held = operator.attrgetter(str(written.target))(module)
        if isinstance(held, Tensor) and held.dim() == 0 and held.dtype == torch.float64 and held.device.type == "cpu":
            raise RunError(
                f"stage {name!r} writes {written.target}, a number in float64 without dimensions, which torch.compile "
                "may leave as it was: give it shape (1,), or float32, or leave out stage_compiler="
            )


class Compiled:
    """A stage's function, or a graph that was made of it, compiled when it is first called."""

    def __init__(self, name: str, original: Function, stage_compiler: StageCompiler) -> None:
        self._name, self._original, self._stage_compiler = name, original, stage_compiler
        self._function: Function | None = None  # once it has run

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self._function is not None:
            outputs: tuple[Any, ...] = self._function(*inputs)
            return outputs
        with phase(f"the compiling of stage {self._name}"):  # which may last, and others wait for what it returns
            function = self._stage_compiler(self._original)
            if not callable(function):
                raise RunError(
                    f"stage_compiler returned {function!r:.80} for stage {self._name!r}; return a callable that takes "
                    "the stage's inputs and returns the tuple that the stage does"
                )
            outputs = function(*inputs)
        self._function = function
        return outputs

    @cached_property
    def in_halves(self) -> Callable[..., tuple[Any, ...]]:
        """The same in three: its forward, and the two halves of its backward."""
        return in_halves(self._original, lambda module: Compiled(self._name, module, self._stage_compiler))

    def __repr__(self) -> str:
        return f"stage {self._name}, compiled by {self._stage_compiler!r}"


Compile = Callable[[fx.GraphModule], Function]


class _Here(threading.local):
    """What this thread is in: a micro-batch's forward, the backward of a call."""

    deferred: Deferred | None = None
    call: _HalvedCall | None = None


_here = _Here()


def in_halves(original: Function, compile: Compile) -> Callable[..., tuple[Any, ...]]:
    """A stage's function with a ``Deferred`` in front of its inputs, compiled in three when it first runs.

    ``compile`` makes a callable of a graph of operators; it is given forward, I and W of each graph that TorchDynamo
    makes of ``original``. None of these graphs needs gradients.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        """What TorchDynamo calls with a graph that it has captured."""
        graph = _CutGraph(inputs, compile)
        function = aot_compiled(module, inputs, graph.forward, graph.backward)
        return lambda *inputs: graph.run(function, inputs)

    function = torch.compile(original, backend=backend)

    def run(deferred: Deferred, *inputs: Any) -> tuple[Any, ...]:
        before, _here.deferred = _here.deferred, deferred
        try:
            outputs: tuple[Any, ...] = function(*inputs)
            return outputs
        finally:
            _here.deferred = before

    return run


class _CutGraph:
    """A graph that TorchDynamo has captured, on its way through AOTAutograd.

    A call with a ``Deferred`` is given stand-ins for its parameters, which share their memory. So I leaves ``.grad`` as
    it is, and whatever comes back to the stand-ins, by any way, W adds to it.
    """

    def __init__(self, inputs: Sequence[Any], compile: Compile) -> None:
        self._compile = compile
        self._kinds = [(value.dim(), value.dtype) if isinstance(value, Tensor) else None for value in inputs]
        tensors = [(place, value) for place, value in enumerate(inputs) if isinstance(value, Tensor)]
        self._leaves = [place for place, value in tensors if value.requires_grad and value.is_leaf]

    def run(self, function: Function, inputs: Sequence[Any]) -> Any:
        # A subclass such as DTensor decides what detach() does: a call with one gives all gradients in I.
        plain = all(type(value) in (Tensor, nn.Parameter) for value in inputs if isinstance(value, Tensor))
        # A hook is to see a gradient once, and whole: it may not come late then. Hooks behind ``.grad`` run after W.
        leaves = [(place, inputs[place]) for place in self._leaves]
        waiting = {place: p for place, p in leaves if plain and p.is_leaf and not has_gradient_hooks(p)}
        if _here.deferred is None or not waiting:
            return function(*inputs)
        call = _HalvedCall(self, _here.deferred, waiting)
        results = function(*(call.stand_ins.get(place, value) for place, value in enumerate(inputs)))
        for node in call.nodes(results):
            node.register_prehook(call.comes)
        call.deferred.leave(call)
        return results

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        """AOTAutograd's compiler of backwards."""
        # A backward whose results are not the inputs' gradients in order cannot be cut by their places: all is I then.
        fits = self._fits(module)

        @cache
        def cut(waiting: frozenset[int]) -> _Cut:
            halves = cut_backward(fx.GraphModule(module, copy.deepcopy(module.graph)), waiting if fits else ())
            waits = {place: name for place, name in enumerate(halves.gradients) if place in waiting and name}
            return _Cut(halves, waits, self._piece(halves.of_input), self._piece(halves.of_weights))

        def run(*given: Any) -> list[Any]:
            call, _here.call = _here.call, None  # first: what comes now may fail
            call = call if call is not None and call.graph is self else None
            parts = cut(frozenset(self._leaves if call is None else call.parameters))
            # 1. I makes the gradients of the inputs, and what W takes.
            values = dict(zip(parts.halves.given, given, strict=True))
            values |= parts.of_input(values)
            # 2. W runs later where this is a micro-batch's I, else at once.
            if call is None:
                values |= parts.of_weights(values)
            else:
                call.keep(values, parts)
            late = () if call is None else parts.waits
            gradients = enumerate(parts.halves.gradients)
            return [None if name is None or place in late else values[name] for place, name in gradients]

        return run

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any] = ()) -> Function:
        """AOTAutograd's compiler of forwards, and of I and W."""

        @cache
        def function() -> Function:
            # A module of its own, made only now: TorchDynamo does not compile code that came up while it compiled, and
            # AOTAutograd's modules share theirs before their first call.
            return self._compile(fx.GraphModule(module, module.graph))

        def run(*inputs: Any) -> Any:
            # the types that operators compute in are decided already
            with within([region._replace(enabled=False) for region in ambient_autocast()]):
                return function()(*inputs)

        return run

    def _fits(self, module: fx.GraphModule) -> bool:
        """Whether the backward's results are the gradients of what the graph was given, one for one."""
        results: Any = module.graph.output_node().args[0]
        made = [None if node is None else node.meta["val"] for node in results]
        return len(made) == len(self._kinds) and all(
            value is None or (value.dim(), value.dtype) == kind for value, kind in zip(made, self._kinds, strict=True)
        )

    def _piece(self, part: BackwardPart) -> Piece:
        """I or W, from values by name to values by name."""
        if not part.does_anything:
            return lambda values: {}
        function = self.forward(part.code)
        return lambda values: dict(zip(part.gives, function(*[values[name] for name in part.takes]), strict=True))


class _Cut(NamedTuple):
    """A backward in two."""

    halves: Halves
    waits: dict[int, str]
    """By place, the gradients that W gives."""
    of_input: Piece
    of_weights: Piece


class _HalvedCall:
    """One call of a graph: its parameters by their places, their stand-ins, and what is left for its W."""

    def __init__(self, graph: _CutGraph, deferred: Deferred, parameters: Mapping[int, Tensor]) -> None:
        self.graph, self.deferred, self.parameters = graph, deferred, parameters
        self.stand_ins = {place: parameter.detach().requires_grad_() for place, parameter in parameters.items()}
        self._held: dict[str, Any] = {}
        self._versions: list[int] = []
        self._parts: _Cut | None = None

    def nodes(self, results: Sequence[Any]) -> Iterator[Node]:
        """AOTAutograd's among the nodes behind the results: its own, not those of views of what it was given."""
        # From the results back to the nodes that lead straight to a stand-in.
        ends = {get_gradient_edge(stand_in).node for stand_in in self.stand_ins.values()}
        waiting = [result.grad_fn for result in results if isinstance(result, Tensor) and result.grad_fn is not None]
        seen: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            following = [next_node for next_node, _ in node.next_functions if next_node is not None]
            if not isinstance(node, BackwardCFunction):
                waiting += following
            elif not ends.isdisjoint(following):
                yield node

    def comes(self, gradients: Any) -> None:
        """Its backward is the next that runs in this thread."""
        _here.call = self

    def keep(self, values: Mapping[str, Any], parts: _Cut) -> None:
        """I has run, and made ``values``: those that W takes, or hands on unchanged, wait for it."""
        self.deferred.check_open()
        weights = parts.halves.of_weights
        needed = {*weights.takes, *parts.waits.values()} - {*weights.gives}
        self._held, self._parts = {name: values[name] for name in needed}, parts
        self._versions = list(map(version_of, self.kept))

    @property
    def kept(self) -> list[Tensor]:
        """What waits for W."""
        return [value for value in self._held.values() if isinstance(value, Tensor) and not value.is_inference()]

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """W: each parameter with a gradient of it; once."""
        if list(map(version_of, self.kept)) != self._versions:
            raise RunError(
                "what W needs was written in place since I; write it out of place (self.n = self.n + 1) or use a clone"
            )
        made, self._held, self._versions = self._held, {}, []
        if self._parts is not None:
            with torch.no_grad():
                made |= self._parts.of_weights(made)
        waits = {} if self._parts is None else self._parts.waits
        # What came to a stand-in by another way, as through a view of it that is a result itself, is added, too.
        stand_ins, self.stand_ins = self.stand_ins, {}
        return [
            (parameter, gradient)
            for place, parameter in self.parameters.items()
            for gradient in (made.get(waits.get(place, "")), stand_ins[place].grad)
            if gradient is not None
        ]
