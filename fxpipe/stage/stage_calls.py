"""A stage's forward and backward: two callables that a user can call and print on their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.errors import RunError, printable
from fxpipe.stage.deferred import Deferred
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.autograd import plain_apply, run_backward


@dataclass(slots=True)
class Saved:
    """The data that a forward leaves for its backward: the nodes that collect input gradients, and the roots of
    backward.

    ``arrivals``: for each input, the node that collects its gradient, exactly as autograd passes it; None if the input
    gets no gradient; for a container, the nodes of its leaves, and its structure. ``roots``: for each output, its
    autograd edge, None if it needs no gradient; for a container, the list of its tensors' edges. An edge does not keep
    the tensor itself: once sent, the tensor's memory is free unless autograd saved it. ``deferred``: the data that the
    backward leaves for W, if it is the first of two halves.
    """

    arrivals: list[Any]
    roots: list[_Edge | list[_Edge]]
    deferred: Deferred | None = None
    seed: Tensor | None = None
    """The gradient of a scalar loss, once known."""

    def take_root(self, output: Tensor, weight: float | Tensor = 1.0) -> None:
        """Makes backward begin at ``output``, a scalar, times ``weight``. ``output`` is the last output, or was found
        in it.

        The seed is a new tensor: a parameter's gradient may share memory with the seed.
        """
        # the container's leaves were roots; now only the loss is a root
        if isinstance(self.roots[-1], list):
            self.roots[-1] = edges(output)
        if isinstance(weight, Tensor):
            self.seed = torch.empty((), dtype=output.dtype, device=output.device).copy_(weight)
        else:
            self.seed = torch.full((), weight, dtype=output.dtype, device=output.device)


_Edge = GradientEdge | None


def _enter(value: Any) -> tuple[Any, Any]:
    """Returns a detached input to compute with, and the node that collects its gradient."""
    if isinstance(value, Tensor):
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value.detach(), None
        entered = _keep_gradient(_ANCHOR, value.detach())
        return entered, entered.grad_fn  # the node, not the tensor, whose memory is freed with its last user
    leaves, spec = pytree.tree_flatten(value)
    if spec.is_leaf():
        return value, None
    entered = [_enter(leaf) if isinstance(leaf, Tensor) else (leaf, None) for leaf in leaves]
    return pytree.tree_unflatten([leaf for leaf, _ in entered], spec), ([arrival for _, arrival in entered], spec)


class _KeepGradient(torch.autograd.Function):
    """Identity whose backward keeps the gradient, and passes none to the anchor.

    A leaf's ``.grad`` would do, but AccumulateGrad copies a gradient into its leaf's strides, and the next kernel
    would no longer be the kernel of plain PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient = None
        return value  # autograd makes a view of it

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gradient = gradients[0]
        return None, None


_keep_gradient = plain_apply(_KeepGradient)
_ANCHOR = torch.empty(0, device="cpu").requires_grad_()
"""The leaf of autograd's graph at which the backward of every input ends. The anchor never gets a gradient."""


@dataclass(frozen=True, eq=False, repr=False)
class Forward:
    """``forward(*inputs) -> (outputs, saved)``.

    ``inputs`` are the stage's batch inputs and received values, in the order of ``names``; a received tensor that
    requires a gradient gets its gradient from ``Backward``. ``outputs`` are the values for other stages, in the order
    of ``outputs``, and on the output stage the model's result as well. ``print()`` shows the code. ``in_halves``:
    whether the backward leaves the parameters' gradients to W; the function then takes a ``Deferred`` first.
    """

    name: str
    function: Callable[..., tuple[Any, ...]]
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    code: str
    in_halves: bool = False

    def __call__(self, *inputs: Any) -> tuple[tuple[Any, ...], Saved]:
        if len(inputs) != len(self.names):
            raise TypeError(f"stage {self.name} takes {len(self.names)} inputs {self.names}, {len(inputs)} were given")
        entered, arrivals = zip(*map(_enter, inputs), strict=True) if inputs else ((), ())
        deferred = Deferred() if self.in_halves else None
        outputs = self.function(*entered) if deferred is None else self.function(deferred, *entered)
        return outputs, Saved(list(arrivals), list(map(edges, outputs)), deferred)

    def __str__(self) -> str:
        name, outputs = printable(self.name), ", ".join(self.outputs)
        return f"# forward of stage {name}: ({', '.join(self.names)}) -> ({outputs})\n{self.code}"

    __repr__ = __str__


@dataclass(frozen=True, eq=False, repr=False)
class Backward:
    """``backward(saved, gradients) -> input gradients``; parameters accumulate into ``.grad``, or else in ``weights``.

    ``gradients`` has an entry for each output: a tensor (or a container shaped like the output), or None if no gradient
    came back; ``True`` means the seed of a scalar loss. The result has an entry for each input.
    """

    name: str
    names: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, saved: Saved, gradients: Sequence[Any]) -> list[Any]:
        roots, seeds = _begin(saved, gradients)
        if saved.deferred is not None:
            with saved.deferred.collecting():
                self._run(run_backward, roots, seeds)
        else:
            self._run(run_backward, roots, seeds)
        return list(map(_gradient, saved.arrivals))

    def weights(self, deferred: Deferred) -> None:
        """Runs W: the gradients that a backward has deferred, if the forward ran ``in_halves``."""
        self._run(deferred.accumulate)

    def _run(self, backward: Callable[..., None], *args: Any) -> None:
        """Runs ``backward(*args)``; RunError, which names the stage, if a tensor that it needs was written."""
        try:
            backward(*args)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RunError(
                f"the backward of stage {self.name} needs a tensor that was written in place since its forward, as "
                "a buffer of a submodule is by the forward of the next micro-batch; write it out of place "
                f"(self.n = self.n + 1) or use a clone of it: {error}"
            ) from error

    def apart(
        self, saved: Saved, gradients: Sequence[Any], parameters: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor | None]]:
        """As a call, but returns the parameters' gradients and does not accumulate them: (input gradients, parameter
        gradients)."""
        roots, seeds = _begin(saved, gradients)
        # through the anchor, autograd runs the nodes that collect the arrivals' gradients
        ends = [*parameters, *([_ANCHOR] if any(arrival is not None for arrival in saved.arrivals) else ())]
        computed: Sequence[Tensor | None] = [None] * len(ends)
        if roots and ends:
            computed = torch.autograd.grad(roots, ends, seeds, allow_unused=True)
        return list(map(_gradient, saved.arrivals)), list(computed[: len(parameters)])

    def __str__(self) -> str:
        returned = ", ".join(f"d_{name}" for name in self.names)
        taken = ", ".join(f"d_{output}" for output in self.outputs)
        return (
            f"# backward of stage {printable(self.name)}\ndef backward(saved, ({taken})):\n"
            f"    torch.autograd.backward([{', '.join(self.outputs)}], [{taken}])  # parameters accumulate into .grad\n"
            f"    return [{returned}]"
        )

    __repr__ = __str__


def _gradient(arrival: Any) -> Any:
    """Returns the gradient of an input, shaped like the input; None if no tensor of the input got a gradient."""
    if not isinstance(arrival, tuple):
        return None if arrival is None else arrival.gradient
    arrivals, spec = arrival
    gradients = list(map(_gradient, arrivals))
    return None if all(gradient is None for gradient in gradients) else pytree.tree_unflatten(gradients, spec)


def keep_finite(root: Any) -> None:
    """Makes inf and nan 0 in the gradients behind a root, or roots. A loss without weight has the gradient 0, which may
    meet 1 / 0 in the loss, and no rank that the stage meets must see it."""
    todo = [edge.node for edge in (root if isinstance(root, list) else [root]) if edge is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        node.register_prehook(
            lambda gradients: tuple(g if g is None else g.nan_to_num(0.0, 0.0, 0.0) for g in gradients)
        )
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        todo += following


def _begin(saved: Saved, gradients: Sequence[Any]) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Returns the roots of a stage's backward, and their gradients."""
    roots: list[GradientEdge] = []
    seeds: list[Tensor | None] = []
    # the last user first: if one tensor is several outputs, this is autograd's order of summation
    for output, gradient in zip(reversed(saved.roots), reversed(gradients), strict=True):
        if gradient is None:
            continue
        edges_of_output = output if isinstance(output, list) else [output]
        is_tree = isinstance(output, list) and gradient is not True
        for root, seed in zip(edges_of_output, pytree.tree_leaves(gradient) if is_tree else [gradient], strict=True):
            if root is not None and seed is not None:
                roots.append(root)
                seeds.append(saved.seed if seed is True else seed)
    return roots, seeds


def edges(output: Any) -> _Edge | list[_Edge]:
    """Returns the roots of an output's backward: a tensor's autograd edge, None if it gets no gradient; for a
    container, a list of edges."""
    on = torch.is_grad_enabled()  # otherwise a parameter that is an output has no edge
    if isinstance(output, Tensor):
        return get_gradient_edge(output) if on and output.requires_grad else None
    leaves = [leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in pytree.tree_leaves(output)]
    return [get_gradient_edge(leaf) if on and leaf is not None else None for leaf in leaves]


def shapes_of(value: Any) -> Any:
    """Returns nested tuples, lists and mappings with the shape of each tensor, and None for each other leaf."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return {key: shapes_of(part) for key, part in value.items()}
    return [shapes_of(part) for part in value] if isinstance(value, (tuple, list)) else None


def check_shapes(result: Any, captured: Any, name: str, is_rehearsed: bool, whole: str = "") -> None:
    """Raises RunError if a submodule that the tracer record calls as a whole returns other shapes than at capture."""
    shapes = shapes_of(result)
    if shapes != captured:
        instead = (
            'tracer="record" captures the code behind it for those alone; pass tracer="export" or "symbolic"'
            if whole
            else "the rest of the program holds for those alone; make its sizes fixed (pad, or mask in place of "
            'selecting), or keep it whole, boundaries={...: "whole"}, under tracer="export"'
        )
        raise RunError(
            f"{f'{whole}, an opaque region,' if whole else name} returned tensors of shapes {shapes}, but was captured "
            f"with {captured}, and {instead}, which takes sizes that change"
        )
