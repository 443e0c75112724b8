"""Pattern: what a capture, and with it a plan, depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxpipe.errors import RunError
from fxpipe.graph.modes import Autocast
from fxpipe.graph.plain_data import admitted
from fxpipe.plan.batch import Description


@admitted
@dataclass(frozen=True)
class Flags:
    """The state of a model that a capture depends on: each module's training flag, each parameter's requires_grad."""

    training: bytes
    trainable: bytes


def flags_of(model: nn.Module) -> Flags:
    """The flags of a model as it is now."""
    return Flags(
        training=bytes(module.training for module in model.modules()),
        trainable=bytes(parameter.requires_grad for parameter in model.parameters()),
    )


@dataclass(frozen=True)
class Pattern:
    """What a capture depends on: which inputs there are, the values fixed in it, the flags of the model."""

    inputs: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...]
    microbatches: int
    with_loss: bool
    flags: Flags
    training: bool = True
    """Whether it is for a step; else for a forward-only run, where the user's own table need not fit."""
    shapes: tuple[Description, ...] = ()
    """Each micro-batch, described, for tracers that need it; () where no batch has been seen yet."""
    autocast: tuple[Autocast, ...] = ()
    """What is on around the call."""
    everyone: tuple[int, ...] = ()
    """The rows of each micro-batch on all replicas together, where stages see them; () where that is not known yet."""

    def for_any_shape(self) -> Pattern:
        """The pattern without what only tracers that need shapes depend on."""
        return dataclasses.replace(self, shapes=(), autocast=(), everyone=())


def pattern_of(
    microbatches: Sequence[Description],
    training: bool,
    loss_fn: Callable[..., Any] | None,
    flags: Flags,
    autocast: tuple[Autocast, ...] = (),
) -> Pattern:
    """The capture that micro-batches like these need; RunError where they have different inputs."""
    has_target = any(name == "target" and given.kind != "none" for name, given in microbatches[0])
    with_loss = loss_fn is not None and (training or has_target)
    shapes = tuple(
        tuple((name, given) for name, given in description if with_loss or loss_fn is None or name != "target")
        for description in microbatches
    )
    inputs = {tuple(name for name, given in one if given.kind == "input") for one in shapes}
    fixed = {tuple((name, given.detail) for name, given in one if given.kind != "input") for one in shapes}
    if len(inputs) > 1 or len(fixed) > 1:
        raise RunError("the micro-batches of one step must have the same inputs")
    return Pattern(inputs.pop(), fixed.pop(), len(shapes), with_loss, flags, training, shapes, autocast)
