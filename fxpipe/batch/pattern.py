"""Pattern: the facts of a call that a capture, and with it a plan, depends on.

Takes: the descriptions of a call's micro-batches, and flags of the model. Gives: ``Pattern``, a frozen key. Two calls
with equal patterns run the same plan.

It has shapes, which tracers that need them depend on. ``for_any_shape()`` is the key without them: a plan whose
captures are valid for any shapes is stored under this key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from fxpipe.batch.description import Description, for_any_words
from fxpipe.graph.question import Answers
from fxpipe.plain_data import admitted
from fxpipe.stage.modes import Ambient
from fxpipe.stage.with_loss import target_of


@admitted
@dataclass(frozen=True)
class Flags:
    """The facts of a model on which a capture depends: each module's training flag, each parameter's requires_grad, and
    the number of the state of the attributes that forward reads (``Reads``). ``states``: the numbers of all ranks, if
    they differ."""

    training: bytes
    trainable: bytes
    state: int = 0
    states: tuple[int, ...] = ()

    def difference(self, other: Flags, model: nn.Module) -> str:
        """The difference between the models of two ranks, in words. ``model``: either model, for names. States may
        differ: the captures in these states tell whether that matters."""
        for what, mine, its, named in (
            ("training flag", self.training, other.training, model.named_modules()),
            ("requires_grad", self.trainable, other.trainable, model.named_parameters()),
        ):
            if mine != its:
                pairs = zip(named, zip(mine, its, strict=False), strict=False)
                first = next((name for (name, _), (flag, its_flag) in pairs if flag != its_flag), "")
                return f"the {what} of {first or 'the model'}"
        return ""


def modules_of(model: nn.Module) -> list[nn.Module]:
    """``model.modules()`` in the same order, faster, since every step calls it: torch makes a name for each module."""
    modules = {id(model): model}

    def add(parent: nn.Module) -> None:
        for module in parent._modules.values():
            if isinstance(module, nn.Module) and id(module) not in modules:
                modules[id(module)] = module
                if module._modules:
                    add(module)

    add(model)
    return list(modules.values())


def parameters_in(modules: Iterable[nn.Module]) -> Mapping[int, nn.Parameter]:
    """Identity → parameter, as ``model.parameters()`` yields them, for the modules of a model."""
    return {id(p): p for module in modules for p in module._parameters.values() if p is not None}


def flags_of(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter], state: int) -> Flags:
    """The flags of a model's modules and parameters. ``state``: the number of the state of the attributes."""
    return Flags(bytes([each.training for each in modules]), bytes([p.requires_grad for p in parameters]), state)


class GivenInputs(NamedTuple):
    """The inputs of a micro-batch: the names of tensors and containers, and the names and values of fixed inputs."""

    inputs: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...] = ()
    holding: tuple[tuple[str, Any, tuple[Any, ...]], ...] = ()
    """(name, container, fixed leaves) of inputs with named items, or with an object, None or a truth value inside."""


@dataclass(frozen=True)
class Pattern:
    """The facts on which a capture depends: the names of inputs, the fixed values, the flags of the model."""

    given: tuple[GivenInputs, ...]
    """The inputs of each micro-batch: micro-batches may lack different inputs."""
    with_loss: bool
    flags: Flags
    training: bool = True
    """Whether the pattern is for a training step; a forward-only run does not need the user's own table."""
    shapes: tuple[Description, ...] = ()
    """The description of each micro-batch, for tracers that need it; () if no batch has been seen yet."""
    ambient: Ambient = Ambient()  # noqa: RUF009  (it is frozen)
    everyone: tuple[int, ...] = ()
    """Each micro-batch's rows summed over all replicas, if stages see them; () if they are not known yet."""

    answers: tuple[Answers, ...] = ()
    """The known answers to forward's questions about each micro-batch; () if there are no answers."""
    asks: bool = field(default=True, compare=False)
    """Whether forward may ask questions: not about inputs without numbers, nor about a group of micro-batches."""

    @property
    def microbatches(self) -> int:
        return len(self.given)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs of all micro-batches together."""
        return tuple(dict.fromkeys(name for each in self.given for name in each.inputs))

    def each(self) -> list[Pattern]:
        """For each micro-batch, the pattern of its own capture."""
        shapes = tuple((shape,) for shape in self.shapes) or ((),) * self.microbatches
        answers = self.answers or ((),) * self.microbatches
        return [
            replace(self, given=(inputs,), shapes=shape, everyone=(), answers=(answer,) if answer else ())
            for inputs, shape, answer in zip(self.given, shapes, answers, strict=True)
        ]

    @property
    def answered(self) -> Answers:
        """The answers of the first micro-batch."""
        return self.answers[0] if self.answers else ()

    @property
    def shape(self) -> Description | None:
        """The description of the first micro-batch; None if no batch has been seen."""
        return self.shapes[0] if self.shapes else None

    def for_any_words(self) -> Pattern:
        """The pattern without the strings in containers."""
        return replace(self, shapes=tuple(map(for_any_words, self.shapes)))

    def for_any_shape(self) -> Pattern:
        """The pattern without shapes, row counts and answers, on which only tracers that need shapes depend."""
        return replace(self, shapes=(), everyone=(), answers=())


def pattern_of(
    microbatches: Sequence[Description],
    training: bool,
    loss_fn: Callable[..., Any] | None,
    flags: Flags,
    ambient: Ambient,
    wants_loss: bool = False,
) -> Pattern:
    """The pattern of these micro-batches. ``wants_loss``: whether evaluation has a loss if it requires no target."""
    # An evaluation may lack a target: then the plan is of the model without the loss.
    target = target_of(loss_fn)
    has_target = any(name == "target" and entry.kind != "none" for name, entry in microbatches[0])
    is_free = target is None or target.default is not target.empty
    with_loss = loss_fn is not None and (training or (is_free and wants_loss) or (target is not None and has_target))
    shapes = tuple(
        tuple((name, entry) for name, entry in description if with_loss or target is None or name != "target")
        for description in microbatches
    )
    each = tuple(
        GivenInputs(
            tuple(name for name, entry in shape if entry.kind == "input"),
            tuple((name, entry.detail) for name, entry in shape if entry.kind != "input"),
            tuple(
                (name, entry.detail[0], leaves)
                for name, entry in shape
                if entry.kind == "input" and (any(leaves := entry.fixed_leaves) or entry.has_names)
            ),
        )
        for shape in shapes
    )
    return Pattern(each, with_loss, flags, training, shapes, ambient)
