"""A stage's forward and backward: two callables that a user can call and print on their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.errors import RunError
from fxpipe.graph.deferred import Deferred
from fxpipe.torch_compat import pytree


@dataclass
class Saved:
    """What a forward leaves for its backward: the arrivals' gradients to be, and where backward begins.

    ``roots``: for each output the autograd edge of each of its tensors, None where one needs no gradient. An edge does
    not keep the tensor itself: once it has been sent, its memory is free unless autograd saved it.
    ``deferred``: what its backward leaves for W, where it is the first of two halves.
    """

    arrivals: list[_Arrival]
    roots: list[list[GradientEdge | None]]
    deferred: Deferred | None = None

    def take_root(self, output: Any) -> None:
        """Lets backward begin at ``output`` in place of the last output, which it was found in."""
        self.roots[-1] = edges(output)


class _Arrival:
    """One input of a stage: collects the gradient of each of its tensors, exactly as autograd hands it over."""

    def __init__(self, value: Any) -> None:
        self._leaves, self._spec = pytree.tree_flatten(value)
        self.gradients: list[Tensor | None] = [None] * len(self._leaves)
        self.anchors: list[Tensor] = []
        """Leaves of autograd's graph at which backward ends."""

    def enter(self) -> Any:
        """The value to compute with: cut from where it came from, its gradient collected here. Called once.

        From then on the value is kept by whoever uses it, and where autograd saves it, but not here.
        """
        leaves, self._leaves = self._leaves, []
        return pytree.tree_unflatten([self._enter(i, leaf) for i, leaf in enumerate(leaves)], self._spec)

    def _enter(self, index: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return leaf.detach()
        anchor = torch.empty(0, requires_grad=True)
        self.anchors.append(anchor)
        entered: Tensor = _KeepGradient.apply(anchor, self, index, leaf.detach())  # type: ignore[no-untyped-call]
        return entered

    def gradient(self) -> Any:
        """The gradient, shaped like the input; None where no tensor of it got any."""
        if all(gradient is None for gradient in self.gradients):
            return None
        return pytree.tree_unflatten(self.gradients, self._spec)


class _KeepGradient(torch.autograd.Function):
    """Identity whose backward keeps the gradient.

    A leaf's ``.grad`` would do, but AccumulateGrad copies a gradient into its leaf's strides, and the next kernel
    would no longer be the one that plain PyTorch runs.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: _Arrival, index: int, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.arrival, ctx.index = arrival, index
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.arrival.gradients[ctx.index] = gradients[0]
        return None, None, None, None


class Forward:
    """``forward(*inputs) -> (outputs, saved)``.

    ``inputs`` are the stage's batch inputs and received values, in the order of ``names``; a received tensor that
    requires a gradient gets one from ``Backward``. ``outputs`` are the values for other stages, in the order of
    ``outputs``, and on the output stage the model's result as well. ``print()`` shows the code. ``in_halves``: whether
    its backward is to leave the gradients of parameters to W; the function then takes a ``Deferred`` first.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., tuple[Any, ...]],
        names: Sequence[str],
        outputs: Sequence[str],
        code: str,
        in_halves: bool = False,
    ) -> None:
        self.name, self.names, self.outputs, self.code = name, tuple(names), tuple(outputs), code
        self.in_halves = in_halves
        self._function = function

    def __call__(self, *inputs: Any) -> tuple[tuple[Any, ...], Saved]:
        if len(inputs) != len(self.names):
            raise TypeError(f"stage {self.name} takes {len(self.names)} inputs {self.names}, {len(inputs)} were given")
        arrivals = [_Arrival(value) for value in inputs]
        deferred = Deferred() if self.in_halves else None
        outputs = self._function(*([deferred] if deferred else []), *[arrival.enter() for arrival in arrivals])
        return outputs, Saved(arrivals, [edges(output) for output in outputs], deferred)

    def __str__(self) -> str:
        return f"# forward of stage {self.name}: ({', '.join(self.names)}) -> ({', '.join(self.outputs)})\n{self.code}"

    __repr__ = __str__


class Backward:
    """``backward(saved, gradients) -> input gradients``; parameters accumulate into ``.grad``, or else in ``weights``.

    ``gradients`` has an entry for each output: a tensor (or a container shaped like the output), or None where
    nothing came back; ``True`` stands for the seed of a scalar loss. The result has an entry for each input.
    """

    def __init__(self, name: str, names: Sequence[str], outputs: Sequence[str]) -> None:
        self.name, self.names, self.outputs = name, tuple(names), tuple(outputs)

    def __call__(self, saved: Saved, gradients: Sequence[Any]) -> list[Any]:
        roots, seeds = _begin(saved, gradients)
        with self._telling_of_writes(), saved.deferred.collecting() if saved.deferred else contextlib.nullcontext():
            if roots:
                torch.autograd.backward(roots, seeds)
        return [arrival.gradient() for arrival in saved.arrivals]

    def weights(self, deferred: Deferred) -> None:
        """W: what a backward has left for it, where the forward was one ``in_halves``."""
        with self._telling_of_writes():
            deferred.accumulate()

    @contextlib.contextmanager
    def _telling_of_writes(self) -> Iterator[None]:
        try:
            yield
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
        """The same, with the parameters' gradients given back and not accumulated: (input gradients, theirs)."""
        roots, seeds = _begin(saved, gradients)
        ends = [*parameters, *(anchor for arrival in saved.arrivals for anchor in arrival.anchors)]
        found: Sequence[Tensor | None] = [None] * len(ends)
        if roots and ends:
            found = torch.autograd.grad(roots, ends, seeds, allow_unused=True)
        return [arrival.gradient() for arrival in saved.arrivals], list(found[: len(parameters)])

    def __str__(self) -> str:
        returned = ", ".join(f"d_{name}" for name in self.names)
        given = ", ".join(f"d_{output}" for output in self.outputs)
        return (
            f"# backward of stage {self.name}\ndef backward(saved, ({given})):\n"
            f"    torch.autograd.backward([{', '.join(self.outputs)}], [{given}])  # parameters accumulate into .grad\n"
            f"    return [{returned}]"
        )

    __repr__ = __str__


def _begin(saved: Saved, gradients: Sequence[Any]) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Where a stage's backward begins, and with which gradients."""
    roots: list[GradientEdge] = []
    seeds: list[Tensor | None] = []
    # the last user first: where one tensor is several outputs, this is the order in which autograd adds up
    for output, gradient in reversed(list(zip(saved.roots, gradients, strict=True))):
        for root, seed in _pairs(output, gradient):
            roots.append(root)
            seeds.append(seed)
    return roots, seeds


def edges(output: Any) -> list[GradientEdge | None]:
    """Where the backward of an output begins: an autograd edge for each of its tensors that needs a gradient."""
    return [
        get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        for leaf in pytree.tree_leaves(output)
    ]


def _pairs(roots: list[GradientEdge | None], gradient: Any) -> list[tuple[GradientEdge, Tensor | None]]:
    """(root, seed) for each tensor of an output that has a gradient."""
    if gradient is None:
        return []
    seeds = [None] if gradient is True else pytree.tree_leaves(gradient)
    return [
        (root, seed)
        for root, seed in zip(roots, seeds, strict=True)
        if root is not None and (seed is not None or gradient is True)
    ]


def shapes_of(value: Any) -> Any:
    """Nested tuples, lists and mappings with its shape in place of each tensor, and None for what is none."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return {key: shapes_of(part) for key, part in value.items()}
    return [shapes_of(part) for part in value] if isinstance(value, (tuple, list)) else None


def check_shapes(result: Any, captured: Any, name: str, is_rehearsed: bool) -> None:
    """RunError where a submodule that is called as a whole returns other shapes than it was captured with.

    What comes behind it holds for those alone. ``is_rehearsed``: whether its code looks at the values of tensors.
    """
    found = shapes_of(result)
    if found != captured:
        raise RunError(
            f"{name} returned tensors of shapes {found}, but was captured with {captured}, for which alone the rest of "
            "the program holds: its sizes depend on the values of its inputs, or on what it has kept from earlier "
            "calls; make them fixed (pad, or mask in place of selecting)"
        )
