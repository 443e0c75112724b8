"""``Request``: what a tracer captures, as one frozen value; and the call of the model that all tracers make.

Takes: a model, an optional loss function, the names and descriptions of inputs. Gives: ``Request.call``, which calls
the model as plain PyTorch would, and ``Request.wanted``, the part of its result that a program returns.

A tracer runs these steps, each with values of its own kind (proxies, or fake tensors):

1. ``request.call(values)`` passes the values to the model's ``__call__``, so that hooks run, and its result to the loss
   function.
2. ``request.wanted(output)`` keeps the loss and other scalars in training, and everything in evaluation.

A ``Request`` does not know how it is captured, and tracers change none of it: what they find out is in their
``Program``.
"""

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
from fxpipe.graph.question import Answer, Answers
from fxpipe.seeds import Generators
from fxpipe.stage.listed import Listed
from fxpipe.stage.loss import Sum
from fxpipe.stage.modes import Autocast
from fxpipe.stage.with_loss import loss_module, target_of
from fxpipe.torch_compat import pytree
from fxpipe.trace.opaque.regions import Region, SeenCall

Place = tuple[str, int, int]
"""A dimension of an input: (the input's name, the index of the leaf, the leaf's dimension)."""


def named(places: Iterable[Place]) -> str:
    """The names of dimensions of inputs, for a message."""
    named = dict.fromkeys((name, dim) for name, _, dim in sorted(places))
    return ", ".join(f"{name!r} in dimension {dim}" for name, dim in named)


class Word:
    """The stand-in for a string that a program leaves open, so that one capture is valid for any text.

    Forward may ask whether it is a ``str``, and may pass it on to opaque code. Any other use raises a TraceError: the
    value is not known. ``tensor``: the tracer's value that carries the string through the graph.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    # UniPHD of github.com/bo-miao/RefHuman asks isinstance(captions[0], str) before it calls its text encoder
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return str

    def _refuse(self, *others: Any) -> Any:
        raise TraceError("forward looks at a string among the inputs")

    __eq__ = __ne__ = __hash__ = __bool__ = __str__ = __format__ = _refuse


def tensors_of_words(value: Any) -> Any:
    """``value`` with each ``Word`` replaced by its tensor."""
    # A ``Listed`` holds no ``Word``. A look into it would open it.
    return pytree.tree_map_only(Word, lambda word: word.tensor, value, is_leaf=lambda part: isinstance(part, Listed))


Side = Literal["before", "after", "both"]


class GatheredCut(NamedTuple):
    """The side on which a submodule is cut, and the gather of each of its boundaries."""

    side: Side
    before: Gather | None = None
    after: Gather | None = None


Cut = Side | GatheredCut


@dataclass(frozen=True)
class Request:
    """A model, an optional loss function on its output, and which of its inputs are fixed.

    ``inputs``: the names that become inputs of the program, in call order. ``fixed``: inputs whose value is a constant
    of the program (None, bools, strings, on which Python code branches). ``example``: a micro-batch for tracers that
    need shapes, with a ``TensorSpec`` for each tensor. ``cuts``: submodule path → the side of its boundary, as if
    forward called ``stage_boundary``. ``may_lack_cuts``: whether forward may skip cut submodules for these inputs, as
    it skips the image encoder for a batch of text. ``training``: whether the program returns only the loss and other
    scalars of the model's result. ``autocast``: the autocast modes around the call. ``varying``: the dimensions whose
    sizes have changed between batches, and which a tracer may keep symbolic.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    loss_fn: Callable[..., Any] | None = None
    example: Mapping[str, Any] | None = None
    cuts: Mapping[str, Cut] = field(default_factory=lambda: MappingProxyType({}))
    may_lack_cuts: bool = False
    training: bool = True
    autocast: tuple[Autocast, ...] = ()
    varying: frozenset[Place] = frozenset()
    whole: tuple[Region, ...] = ()
    """The opaque regions, whose Python code runs in every step."""
    seen: Mapping[tuple[str, int], SeenCall] = field(default_factory=lambda: MappingProxyType({}))
    """(a region's name, the number of its call) → the observed effects of that call."""
    numbers: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """The values of small integer and bool buffers, by name, for buffers that only another rank still holds."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (it is immutable)
    """The device on which the model will run, for parameters on the meta device."""
    compute: torch.dtype | None = None
    """The dtype that floating-point parameters and inputs will have; None: their own dtypes."""
    answers: Mapping[str, Answer] = field(default_factory=lambda: MappingProxyType({}))
    """Question's key → answer for the micro-batch."""
    ask: Callable[[Request, Any, Any, Answers], None] = lambda *_: None
    """``ask(request, program, asked, answers)`` takes a program that computes the ``Asked`` value, and the earlier
    answers. It raises ``Unanswered`` for a question; if it returns, the tracer refuses the model."""
    around_layers: frozenset[str] = frozenset()
    """The submodules around layers that are to be checkpointed, which are therefore no single calls."""
    asks_numbers: bool = False
    """Whether forward may ask for numbers, and not for bools alone. Each number takes a capture."""
    any_words: bool = False
    """Whether the program must be valid for any strings in containers among the inputs."""
    fixed_leaves: Mapping[str, Sequence[bool]] = field(default_factory=lambda: MappingProxyType({}))
    """The name of an input whose containers are constants of the program → whether each of its leaves is, too."""
    is_leaf_module: Callable[[str, nn.Module], bool] = lambda path, module: False
    """Whether a tracer that keeps modules keeps this submodule as one call also in a model without boundaries."""
    generators: Generators = field(default_factory=lambda: MappingProxyType({}))
    """The random generators of the model's own, by name."""
    call_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Makes the context of each call of the model."""

    @property
    def roots(self) -> list[nn.Module]:
        """The model, and the loss function's module if any: the modules whose state a capture must leave unchanged."""
        loss = loss_module(self.loss_fn)
        return [self.module] if loss is None else [self.module, loss]

    @staticmethod
    def signature(module: nn.Module, loss_fn: Callable[..., Any] | None) -> inspect.Signature:
        """The signature of a call: of the model's forward, with ``target`` added as a keyword if the loss function
        takes a target. A model whose forward itself names ``target`` keeps its own.

        A positional argument of a forward with ``*args, **kwargs`` has no name, and ``batch.bind`` refuses it.
        TraceError for a forward that takes ``*args`` alone, whose inputs have no names at all.
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
        """Calls the model with a value for each of ``inputs``, and the loss function with the model's result.

        ``values``: input's name → value; ``fixed`` adds the constants. The call passes arguments by position where
        possible, as hooks expect, and uses ``__call__``, so that hooks run. ``around`` is open during the call. Returns
        the loss function's result, or the model's own without a loss function, with tensors in place of each ``Word``.
        """
        # 1. the arguments by name; the target goes to the loss function
        arguments = {**self._with_words(values), **self.fixed}
        signature = inspect.signature(self.module.forward)
        takes_target = "target" in arguments and target_of(self.loss_fn) is not None
        target = (arguments.pop("target"),) if takes_target else ()
        # 2. positional arguments: forward pre-hooks see these alone; arguments after a missing argument go by name
        leading = []
        for p in signature.parameters.values():
            if p.kind is not p.POSITIONAL_ONLY or (p.name not in arguments and p.default is p.empty):
                break
            leading.append(arguments.pop(p.name, p.default))
        bound = signature.bind(*leading, **arguments)
        # 3. the call
        with self.call_context():
            output = self.module(*bound.args, **bound.kwargs)
            return tensors_of_words(self.loss_fn(output, *target) if self.loss_fn else output)

    def _with_words(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """``values`` with each tensor that stands for a string replaced by a ``Word``."""

        def word(leaf: Any, value: Any) -> Any:
            return Word(value) if isinstance(leaf, str) and isinstance(value, Tensor) else value

        if not self.any_words or self.example is None:
            return values
        return {name: pytree.tree_map(word, self.example[name], value) for name, value in values.items()}

    def wanted(self, output: Any) -> Any:
        """The part of the model's result that the program returns: in training, only the loss and other scalars,
        with None in place of other values.

        Stages would send other values, such as a cache of keys and values, to the output's stage without use.
        """
        if not (self.training and isinstance(output, Mapping) and "loss" in output):
            return output
        wanted = {name: value if name == "loss" or _is_scalar(value) else None for name, value in output.items()}
        # a list that an opaque region returns may have any length, as long as nothing looks at its entries
        return {name: value for name, value in wanted.items() if value is not None or output[name] is not None}


_NUMBERS = Real, torch.SymInt, torch.SymFloat, Sum


def _is_scalar(value: Any) -> bool:
    """Whether a value is a number, or a tensor without dimensions, which is cheap to send to the output's stage."""
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, _NUMBERS)
