"""What a tracer is asked to capture."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.graph.boundary import Gather
from fxpipe.graph.listed import Listed
from fxpipe.graph.modes import Autocast
from fxpipe.graph.question import Answer, Answers
from fxpipe.graph.with_loss import loss_module
from fxpipe.torch_compat import pytree
from fxpipe.trace.opaque.regions import Region, SeenCall

Place = tuple[str, int, int]
"""A dimension of an input: its name, which of its leaves, and which dimension of that."""


def named(places: Iterable[Place]) -> str:
    """Dimensions of inputs, in words."""
    named = dict.fromkeys((name, dim) for name, _, dim in sorted(places))
    return ", ".join(f"{name!r} in dimension {dim}" for name, dim in named)


def target_of(loss_fn: Callable[..., Any] | None) -> inspect.Parameter | None:
    """What a loss function takes behind the output, as ``target``; None where it takes the output alone."""
    if loss_fn is None:
        return None
    unknown = inspect.Parameter("target", inspect.Parameter.POSITIONAL_ONLY)
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):  # a builtin function
        return unknown
    by_place = [p for p in signature.parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    if by_place and by_place[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        return unknown
    return by_place[1] if len(by_place) > 1 else None


class Word:
    """Forward is given a ``Word`` for a string that a program leaves open, and may pass it on to opaque code."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return str

    def _refuse(self, *others: Any) -> Any:
        raise TraceError("forward looks at a string among the inputs")

    __eq__ = __ne__ = __hash__ = __bool__ = __str__ = __format__ = _refuse


def tensors_of_words(value: Any) -> Any:
    """``value`` with its tensor in place of each ``Word``."""
    # A ``Listed`` has no word, and to look into it would be to open it.
    return pytree.tree_map_only(Word, lambda word: word.tensor, value, is_leaf=lambda part: isinstance(part, Listed))


Side = Literal["before", "after", "both"]


class GatheredCut(NamedTuple):
    """Where a submodule is cut, and what its boundaries gather."""

    side: Side
    before: Gather | None = None
    after: Gather | None = None


Cut = Side | GatheredCut


@dataclass(frozen=True)
class Request:
    """A model, an optional loss function on its output, and which of its inputs are fixed.

    ``inputs``: the names that become inputs of the program, in call order. ``fixed``: inputs whose value is a part of
    the program (None, bools, strings: what Python code branches on). ``example``: what tracers that need shapes know
    of a micro-batch; each input with a ``TensorLike`` for each tensor. ``cuts``: submodule path → where a boundary is
    put, as if the user had marked it. ``may_lack_cuts``: whether these inputs may leave submodules out that are cut,
    as a batch of text the image encoder. ``training``: of what the model returns, only the loss and the scalars beside
    it are wanted. ``autocast``: what is on around the call. ``varying``: the dimensions whose sizes have been seen to
    change, which a tracer may keep symbolic.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    loss_fn: Callable[..., Any] | None = None
    target: str = "target"
    example: Mapping[str, Any] | None = None
    cuts: Mapping[str, Cut] = field(default_factory=lambda: MappingProxyType({}))
    may_lack_cuts: bool = False
    training: bool = True
    autocast: tuple[Autocast, ...] = ()
    varying: frozenset[Place] = frozenset()
    whole: tuple[Region, ...] = ()
    """The opaque regions, which run for real in every step."""
    seen: Mapping[tuple[str, int], SeenCall] = field(default_factory=lambda: MappingProxyType({}))
    """What calls of these were seen to do: by the region's name, and which of its calls."""
    numbers: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """Small buffers of integers and truth values, by name, for those that another rank holds by now."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (it is immutable)
    """Where the model will run, for parameters that are on no device yet."""
    compute: torch.dtype | None = None
    """The type in which floating-point parameters and inputs will be; None: as they are."""
    answers: Mapping[str, Answer] = field(default_factory=lambda: MappingProxyType({}))
    """The answers to questions about the micro-batch, by their keys."""
    ask: Callable[[Request, Any, Any, Answers], None] = lambda *_: None
    """Given this request, a program that computes what forward asks for, what was ``Asked``, and the answers before:
    raises ``Unanswered`` for a question; returns where it is none, and is refused."""
    asks_numbers: bool = False
    """Whether forward may ask for numbers, of which each takes a capture, and not for truth values alone."""
    any_words: bool = False
    """Whether the program is to hold for any strings in containers among the inputs."""
    holding: Mapping[str, Sequence[bool]] = field(default_factory=lambda: MappingProxyType({}))
    """The inputs whose containers are fixed in the program → whether each of their leaves is fixed, too."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What each call of the model runs in."""

    @property
    def loss_module(self) -> nn.Module | None:
        """The module that the loss function is, or is a method of."""
        return loss_module(self.loss_fn)

    @property
    def roots(self) -> list[nn.Module]:
        """The model, and the loss function's module where there is one."""
        return [self.module, *([] if self.loss_module is None else [self.loss_module])]

    @staticmethod
    def signature(module: nn.Module, loss_fn: Callable[..., Any] | None) -> inspect.Signature:
        """The signature of a call: the model's forward, and ``target`` where there is a loss function that takes it.

        What is given by place to a forward of ``*args, **kwargs`` has no name, and ``batch.bind`` refuses it.
        """
        signature = inspect.signature(module.forward)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        if kinds == [inspect.Parameter.VAR_POSITIONAL]:
            raise TraceError(
                f"{type(module).__name__}.forward takes *{next(iter(signature.parameters))} and nothing by name; give "
                "its inputs names, so that stages can ask for them"
            )
        target = target_of(loss_fn)
        if target is None or "target" in signature.parameters:
            return signature
        default = target.empty if target.default is target.empty else None
        extra = inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY, default=default)
        parameters = list(signature.parameters.values())
        tail = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
        return signature.replace(parameters=[*(p for p in parameters if p not in tail), extra, *tail])

    def call(self, values: Mapping[str, Any]) -> Any:
        """Calls the model, and the loss function on what it returns, with a value for each of ``inputs``.

        By place where that can be, as hooks expect it; through ``__call__``, so that hooks run.
        """
        given = {**self._with_words(values), **self.fixed}
        signature = inspect.signature(self.module.forward)
        takes_target = self.target in given and target_of(self.loss_fn) is not None
        target = (given.pop(self.target),) if takes_target else ()
        # forward pre-hooks see what is given by place alone; what comes behind a gap goes by name
        leading = []
        for p in signature.parameters.values():
            if p.kind is not p.POSITIONAL_ONLY or (p.name not in given and p.default is p.empty):
                break
            leading.append(given.pop(p.name, p.default))
        bound = signature.bind(*leading, **given)
        with self.around():
            output = self.module(*bound.args, **bound.kwargs)
            return tensors_of_words(self.loss_fn(output, *target) if self.loss_fn else output)

    def _with_words(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """``values`` with a ``Word`` in place of each tensor that stands for a string."""

        def word(leaf: Any, value: Any) -> Any:
            return Word(value) if isinstance(leaf, str) and isinstance(value, Tensor) else value

        if not self.any_words or self.example is None:
            return values
        return {name: pytree.tree_map(word, self.example[name], value) for name, value in values.items()}

    def wanted(self, output: Any) -> Any:
        """What of the model's result the program returns: in training, only the loss and the scalars beside it.

        Whatever else there is, such as a cache of keys and values, would be sent to the output's stage for nothing.
        """
        if not (self.training and isinstance(output, Mapping) and "loss" in output):
            return output
        return {name: value for name, value in output.items() if name == "loss" or _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, (Real, torch.SymInt, torch.SymFloat))
