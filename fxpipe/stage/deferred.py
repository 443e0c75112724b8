"""Deferred gradients: calls whose parameter gradients are left to W, the second half of a backward.

Such a call runs on inputs detached from autograd's graph, with the parameters unchanged: so the call has a graph of its
own, a few nodes between its inputs and the parameters. I differentiates this graph from the call's result to its
inputs, and W, later, from the same result to the parameters. Autograd skips gradients that nobody requests, so I and W
each run their own half of the kernels of a full backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fxpipe.errors import RunError
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import HOOK_TABLES


class _CallInput(NamedTuple):
    leaf: Tensor
    value: Tensor


def _enter(value: Tensor) -> _CallInput:
    leaf = value.detach().requires_grad_()
    return _CallInput(leaf, leaf)


def _enter_without_memory(value: Tensor) -> _CallInput:
    """As ``_enter``, but the leaf, which lives until I, does not keep the value's memory."""
    leaf = value.detach().requires_grad_()
    entered = leaf.view_as(leaf)
    leaf.data = leaf.new_empty(0)
    return _CallInput(leaf, entered)


_inputs_leave: ContextVar[bool] = ContextVar("inputs_leave", default=False)


@contextlib.contextmanager
def inputs_leave() -> Iterator[None]:
    """While the context is open, calls whose gradients are left to W hold no memory beside the tensors that autograd
    saves, so that these can be offloaded."""
    token = _inputs_leave.set(True)
    try:
        yield
    finally:
        _inputs_leave.reset(token)


class DeferredCall(Protocol):
    """The data that a call of a compiled graph leaves for W."""

    @property
    def pending(self) -> list[Tensor]:
        """The tensors that it holds."""

    def change_tensors(self, change: Callable[[Any], Any]) -> None:
        """Replaces each tensor that it holds by ``change(tensor)``."""

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Returns each parameter with a gradient; called once."""


class Deferred:
    """The data that a micro-batch leaves for a stage's W: results of calls, and the gradients of these results.

    W differentiates all calls in one pass, the last call first, the order of autograd in a full backward. So a
    parameter that several calls use, or values computed from the parameter, has its sums in the same order.
    """

    def __init__(self) -> None:
        self.enter = _enter_without_memory if _inputs_leave.get() else _enter
        """A call's input → the leaf at which its gradient arrives, and the value that the call computes with."""
        self._roots: list[GradientEdge] = []
        self._seeds: list[Any] = []
        self._parameters: dict[int, Tensor] = {}
        self._calls: list[DeferredCall] = []
        self._open = False

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Marks the time while I runs."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def check_open(self) -> None:
        """Raises RunError if a backward runs that is not I."""
        if not self._open:
            raise RunError(
                "forward differentiates its own values, or somebody goes backward through a stage's output; a backward "
                'cannot be in two halves then: write schedule="1f1b"'
            )

    def keep(self, roots: Sequence[GradientEdge], seeds: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Records the gradients that arrived at a call's results. RunError if forward itself differentiates."""
        self.check_open()
        self._roots += roots
        self._seeds += seeds
        self._parameters |= {id(parameter): parameter for parameter in parameters}

    def add_call(self, call: DeferredCall) -> None:
        """Records a call whose W makes gradients by itself."""
        self._calls.append(call)

    def accumulate(self) -> None:
        """Runs W: adds the parameters' gradients to their ``.grad``; once."""
        # the last call goes back first, as in a whole backward: so a parameter's sums have the same order
        pairs = [pair for call in reversed(self._calls) for pair in call.gradients() if pair[0].requires_grad]
        roots = [*self._roots, *(get_gradient_edge(parameter) for parameter, _ in pairs)]
        seeds = [*self._seeds, *(gradient for _, gradient in pairs)]
        parameters = self._parameters | {id(parameter): parameter for parameter, _ in pairs}
        # parameters that are frozen by now are left out
        ends = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self._roots, self._seeds, self._parameters, self._calls = [], [], {}, []
        if roots and ends:
            torch.autograd.backward(roots, seeds, inputs=ends)

    def change_tensors(self, change: Callable[[Any], Any]) -> None:
        """Between I and W: replaces each gradient that waits for W, and each tensor of compiled calls, by
        ``change(tensor)``. A second change, before W, makes tensors of the results."""
        self._seeds = list(map(change, self._seeds))
        for call in self._calls:
            call.change_tensors(change)

    @property
    def nodes(self) -> list[Node]:
        """The nodes at which W begins."""
        return [root.node for root in self._roots]

    @property
    def pending(self) -> list[Tensor]:
        """The tensors that wait for W; of calls with a graph of their own, only the gradients."""
        return [*self._seeds, *(value for call in self._calls for value in call.pending)]


def deferring(function: Callable[..., Any], name: str, is_attention: bool = False) -> Callable[..., Any]:
    """Returns ``function`` as a call whose parameter gradients are left to W: an operator of a stage's graph.

    The call's arguments: a ``Deferred``; a module to call in place of ``function``, or None; the parameters used,
    except the module's; the arguments that are parameters, or made only from parameters; and the function's arguments.
    The call is not deferred if two of its arguments are the same tensor, since autograd would sum their gradients in
    another order. It is not deferred either if the module has hooks by then, since I and W would both call hooks that
    see gradients. ``is_attention``: of ``nn.MultiheadAttention``, which merges queries, keys and values that are the
    same object.
    """

    def call(
        deferred: Deferred,
        module: nn.Module | None,
        parameters: Sequence[Tensor],
        attached: Sequence[Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        run = function if module is None else module
        used = [*parameters, *(module.parameters() if module is not None else ())]
        # the call stays in the stage's own graph if W would have nothing to do, or hooks would run twice
        is_trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in used)
        if not is_trained or (module is not None and runs_hooks(module)):
            return run(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        stays = set(map(id, pytree.tree_leaves(attached)))
        tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}
        ends = {index: leaf for index, leaf in tensors.items() if id(leaf) not in stays}
        if not (_uses_each_once(*args, **kwargs) if is_attention else len(ends) == len(set(map(id, ends.values())))):
            return run(*args, **kwargs)
        # detached from the stage's graph: backward through the call ends here, and _Join continues
        cut = {id(leaf): deferred.enter(leaf) for leaf in ends.values()}
        for index, leaf in ends.items():
            leaves[index] = cut[id(leaf)].value
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        results, shape = pytree.tree_flatten(run(*args, **kwargs))
        places = [index for index, result in enumerate(results) if isinstance(result, Tensor) and result.requires_grad]
        if places:
            own = _OwnGraph(
                deferred,
                used,
                [entry.leaf for entry in cut.values()],
                [get_gradient_edge(results[index]) for index in places],
            )
            values = [results[index].detach() for index in places]
            sources = {id(leaf): leaf for leaf in ends.values()}.values()
            anchor = torch.empty(0, requires_grad=True)
            joined = _Join.apply(anchor, own, values, *sources)  # type: ignore[no-untyped-call]
            for index, result in zip(places, joined, strict=True):
                results[index] = result
        return pytree.tree_unflatten(results, shape)

    call.__name__ = call.__qualname__ = name
    return call


def runs_hooks(module: nn.Module) -> bool:
    """Whether calls of the module, or of a submodule, run hooks."""
    return any(vars(part)[table] for part in module.modules() for table in HOOK_TABLES)


def _uses_each_once(*args: Any, **kwargs: Any) -> bool:
    """Whether attention makes one projection of each object among its queries, keys and values.

    False for unbatched inputs, of which torch makes three views, and if queries are keys or values, not both.
    """
    query, key, value = (*args[:3], *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))
    return query.dim() == 3 and (key is value or len({id(query), id(key), id(value)}) == 3)


class _OwnGraph(NamedTuple):
    """A call's own part of autograd's graph, from its detached inputs to the roots of its backward."""

    deferred: Deferred
    parameters: Sequence[Tensor]
    entered: Sequence[Tensor]
    roots: Sequence[GradientEdge]


def nodes_within(node: Node) -> list[Node]:
    """The last nodes of the call's own graph, if the node stands for a call whose parameter gradients W makes."""
    own = getattr(node, "own", None)
    return [root.node for root in own.roots] if isinstance(own, _OwnGraph) else []


class _Join(torch.autograd.Function):
    """Inserts a call with a graph of its own into the stage's graph. The first argument only makes the result require a
    gradient, even if no argument of the call requires a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, own: _OwnGraph, values: Sequence[Tensor], *sources: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.own = own
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Computes I's part: the gradients of the call's arguments."""
        own = ctx.own
        arrived = [(root, seed) for root, seed in zip(own.roots, gradients, strict=True) if seed is not None]
        roots, seeds = [root for root, _ in arrived], [seed for _, seed in arrived]
        own.deferred.keep(roots, seeds, own.parameters)
        # W differentiates the same graph later, so the graph is retained
        grads = own.entered and torch.autograd.grad(roots, own.entered, seeds, retain_graph=True, allow_unused=True)
        return None, None, None, *grads
