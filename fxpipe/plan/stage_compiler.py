"""Compiles stages by a function of the user's, such as ``torch.compile``, on the ranks that run the stages.

Takes: a ``Stage``, and ``stage_compiler=``, a function from a graph module to a callable. Gives: the stage with a
function that compiles itself in its first call.

A table without input-grad and weight-grad actions needs no more than that. For others (``in_halves``):

1. TorchDynamo captures the stage, and AOTAutograd makes a forward and a backward graph of it.
2. ``passes.cut_backward`` cuts the backward graph into I and W.
3. The user's function compiles each of the three graphs.
4. In a step, the backward runs I at once, and keeps the values that W needs. The action W runs W later.

The parameters' gradients of I go to stand-ins, so that ``.grad`` changes in W only. Parameters with hooks on their
gradients, and calls with tensor subclasses, stay in I.

As it uses a pass, this file is in ``plan``, and not in ``stage``, which the passes import.
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
from fxpipe.graph.stage_graph import Stage
from fxpipe.passes.cut_backward import BackwardPart, Halves, cut_backward
from fxpipe.passes.effects import operator_name
from fxpipe.stage.deferred import Deferred
from fxpipe.stage.modes import ambient_autocast, within
from fxpipe.torch_compat.autograd import aot_compiled
from fxpipe.torch_compat.tensors import has_gradient_hooks, version_of

Function = Callable[..., Any]
StageCompiler = Callable[[Function], Function]
Piece = Callable[[Mapping[str, Any]], dict[str, Any]]


def compiled_lazily(stage: Stage, stage_compiler: StageCompiler) -> Stage:
    """The same stage, whose first run replaces its function by ``stage_compiler(module)``.

    The compiler takes the stage's ``fx.GraphModule``, or the function that the user wrote, and returns a callable with
    the same arguments and the same result tuple. Only processes that run the stage compile it, once: a compiler that
    distinguishes shapes, as ``torch.compile`` does, recompiles by its own guards.
    """
    if isinstance(stage.function, Compiled):
        return stage
    original = stage.module if isinstance(stage.module, fx.GraphModule) else stage.function
    if isinstance(original, fx.GraphModule):
        _check_writes(original, stage.name)
    return replace(stage, function=Compiled(stage.name, original, stage_compiler))


def _check_writes(module: fx.GraphModule, name: str) -> None:
    """RunError for a write into a 0-dimensional float64 on the CPU, which AOTAutograd of torch 2.13 to 2.15 loses."""
    for node in module.graph.nodes:
        written = node.args[0] if node.args and operator_name(node).endswith("_") else None  # as copy_ and mul_ do
        if not isinstance(written, fx.Node) or written.op != "get_attr":
            continue
        attr = operator.attrgetter(str(written.target))(module)
        if isinstance(attr, Tensor) and attr.dim() == 0 and attr.dtype == torch.float64 and attr.device.type == "cpu":
            raise RunError(
                f"stage {name!r} writes {written.target}, a number in float64 without dimensions, which torch.compile "
                "may leave as it was: give it shape (1,), or float32, or leave out stage_compiler="
            )


class Compiled:
    """A stage's function, or a graph made from it, which the first call compiles. A failed first call leaves it
    uncompiled."""

    def __init__(self, name: str, original: Function, stage_compiler: StageCompiler) -> None:
        self._name, self._original, self._stage_compiler = name, original, stage_compiler
        self._function: Function | None = None  # set after the first call

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self._function is not None:
            outputs: tuple[Any, ...] = self._function(*inputs)
            return outputs
        with phase(f"the compiling of stage {self._name}"):  # may take long, while other ranks wait for the outputs
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
        """The same function in three compiled parts: its forward, and the two halves of its backward."""
        return in_halves(self._original, lambda module: Compiled(self._name, module, self._stage_compiler))


Compile = Callable[[fx.GraphModule], Function]


class _Here(threading.local):
    """The present work of this thread: ``deferred`` of a micro-batch's forward, ``call`` of a backward."""

    deferred: Deferred | None = None
    call: _HalvedCall | None = None


_here = _Here()


def in_halves(original: Function, compile: Compile) -> Callable[..., tuple[Any, ...]]:
    """A stage's function that takes a ``Deferred`` before its inputs, and is compiled in three parts by its first run.

    ``compile`` makes a callable from a graph of operators. It compiles forward, I and W of each graph that TorchDynamo
    captures from ``original``. These graphs run without gradients.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        """The backend that TorchDynamo calls with each captured graph."""
        graph = _CutGraph(inputs, compile)
        function = aot_compiled(module, inputs, graph.forward, graph.backward)
        return lambda *inputs: graph.run(function, inputs)

    function = torch.compile(original, backend=backend)  # 1. capture at the first run

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

    A call with a ``Deferred`` takes stand-ins for its parameters, which share the parameters' memory. So I leaves
    ``.grad`` unchanged, and W adds all gradients of the stand-ins to ``.grad``.
    """

    def __init__(self, inputs: Sequence[Any], compile: Compile) -> None:
        self._compile = compile
        self._kinds = [(value.dim(), value.dtype) if isinstance(value, Tensor) else None for value in inputs]
        tensors = [(index, value) for index, value in enumerate(inputs) if isinstance(value, Tensor)]
        self._leaves = [index for index, value in tensors if value.requires_grad and value.is_leaf]

    def run(self, function: Function, inputs: Sequence[Any]) -> Any:
        """Runs the forward; with stand-ins for parameters if the micro-batch defers weight gradients."""
        # A subclass such as DTensor decides what detach() does, so a call with a subclass makes all gradients in I.
        plain = all(type(value) in (Tensor, nn.Parameter) for value in inputs if isinstance(value, Tensor))
        # A hook must see the complete gradient once, so it cannot wait for W. Hooks after accumulation run after W.
        leaves = [(index, inputs[index]) for index in self._leaves]
        waiting = {index: p for index, p in leaves if plain and p.is_leaf and not has_gradient_hooks(p)}
        if _here.deferred is None or not waiting:
            return function(*inputs)
        call = _HalvedCall(self, _here.deferred, waiting)
        results = function(*(call.stand_ins.get(index, value) for index, value in enumerate(inputs)))
        for node in call.nodes(results):
            node.register_prehook(call.comes)
        call.deferred.add_call(call)
        return results

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        """The compiler that AOTAutograd calls for backwards."""
        # A backward whose results are not the inputs' gradients in order cannot be cut by position: all of it is I.
        fits = self._fits(module)

        @cache
        def cut(waiting: frozenset[int]) -> _Cut:
            # 2. and 3. cut the backward, and compile both halves when they run
            halves = cut_backward(fx.GraphModule(module, copy.deepcopy(module.graph)), waiting if fits else ())
            waits = {index: name for index, name in enumerate(halves.gradients) if index in waiting and name}
            return _Cut(halves, waits, self._piece(halves.of_input), self._piece(halves.of_weights))

        def run(*arguments: Any) -> list[Any]:
            call, _here.call = _here.call, None  # before any code that may fail
            call = call if call is not None and call.graph is self else None
            parts = cut(frozenset(self._leaves if call is None else call.parameters))
            # 4. I makes the inputs' gradients, and the values that W takes.
            values = dict(zip(parts.halves.arguments, arguments, strict=True))
            values |= parts.of_input(values)
            # If this is a micro-batch's I, W runs later, otherwise at once.
            if call is None:
                values |= parts.of_weights(values)
            else:
                call.keep(values, parts)
            late = () if call is None else parts.waits
            gradients = enumerate(parts.halves.gradients)
            return [None if name is None or index in late else values[name] for index, name in gradients]

        return run

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any] = ()) -> Function:
        """The compiler that AOTAutograd calls for forwards; it also compiles I and W."""

        @cache
        def function() -> Function:
            # A new module, made only now: TorchDynamo does not compile code that was created while it compiled, and
            # AOTAutograd's modules share their code before their first call.
            return self._compile(fx.GraphModule(module, module.graph))

        def run(*inputs: Any) -> Any:
            # the graph already fixes the operators' types, so autocast is off
            with within([region._replace(enabled=False) for region in ambient_autocast()]):
                return function()(*inputs)

        return run

    def _fits(self, module: fx.GraphModule) -> bool:
        """Whether the backward's results are the gradients of the graph's inputs, in order."""
        results: Any = module.graph.output_node().args[0]
        values = [None if node is None else node.meta["val"] for node in results]
        return len(values) == len(self._kinds) and all(
            value is None or (value.dim(), value.dtype) == kind for value, kind in zip(values, self._kinds, strict=True)
        )

    def _piece(self, part: BackwardPart) -> Piece:
        """I or W as a function from named values to named values."""
        if not part.does_anything:
            return lambda values: {}
        function = self.forward(part.code)
        return lambda values: dict(zip(part.gives, function(*[values[name] for name in part.takes]), strict=True))


class _Cut(NamedTuple):
    """A backward in two halves."""

    halves: Halves
    waits: dict[int, str]
    """Position → the name of the gradient that W makes."""
    of_input: Piece
    of_weights: Piece


class _HalvedCall:
    """A call of a graph: its parameters by position, their stand-ins, and the values kept for its W.

    Its life: made in the forward; ``comes`` when autograd reaches its backward; ``keep`` after I; ``gradients`` in W,
    once.
    """

    def __init__(self, graph: _CutGraph, deferred: Deferred, parameters: Mapping[int, Tensor]) -> None:
        self.graph, self.deferred, self.parameters = graph, deferred, parameters
        self.stand_ins = {index: parameter.detach().requires_grad_() for index, parameter in parameters.items()}
        self._values: dict[str, Any] = {}
        self._tensors: list[str] = []
        self._versions: list[int] = []
        self._parts: _Cut | None = None

    def nodes(self, results: Sequence[Any]) -> Iterator[Node]:
        """The autograd nodes of the results that AOTAutograd made, without the nodes of views of its inputs."""
        # Searches from the results back to the nodes that lead directly to a stand-in.
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
        """A hook: notes that this call's backward runs next in this thread."""
        _here.call = self

    def keep(self, values: Mapping[str, Any], parts: _Cut) -> None:
        """Called after I has made ``values``: keeps the values that W takes or passes on unchanged."""
        self.deferred.check_open()
        weights = parts.halves.of_weights
        needed = {*weights.takes, *parts.waits.values()} - {*weights.gives}
        self._values, self._parts = {name: values[name] for name in needed}, parts
        tensors = {name: value for name, value in self._values.items() if isinstance(value, Tensor)}
        self._tensors = [name for name, tensor in tensors.items() if not tensor.is_inference()]
        self._versions = list(map(version_of, self.pending))

    def change_tensors(self, change: Callable[[Any], Any]) -> None:
        self._values |= {name: change(self._values[name]) for name in self._tensors}
        self._versions = list(map(version_of, self.pending))

    @property
    def pending(self) -> list[Tensor]:
        """The tensors that are kept for W."""
        return [value for name in self._tensors if isinstance(value := self._values[name], Tensor)]

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Runs W and returns (parameter, gradient) pairs; may be called once."""
        if list(map(version_of, self.pending)) != self._versions:
            raise RunError(
                "what W needs was written in place since I; write it out of place (self.n = self.n + 1) or use a clone"
            )
        values, self._values, self._tensors, self._versions = self._values, {}, [], []
        if self._parts is not None:
            with torch.no_grad():
                values |= self._parts.of_weights(values)
        waits = {} if self._parts is None else self._parts.waits
        # Gradients that reach a stand-in elsewhere, such as through a view of it that is a result, are added, too.
        stand_ins, self.stand_ins = self.stand_ins, {}
        return [
            (parameter, gradient)
            for index, parameter in self.parameters.items()
            for gradient in (values.get(waits.get(index, "")), stand_ins[index].grad)
            if gradient is not None
        ]
