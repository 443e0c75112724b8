"""Pattern: what a capture, and with it a plan, depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxpipe.errors import RunError
from fxpipe.graph.modes import Ambient
from fxpipe.graph.plain_data import admitted
from fxpipe.plan.batch import Description


@admitted
@dataclass(frozen=True)
class Flags:
    """What a capture depends on of a model: each module's training flag, each parameter's requires_grad, and the number
    of the state that what it reads beside them is in: see ``Reads``."""

    training: bytes
    trainable: bytes
    state: int = 0


def flags_of(model: nn.Module, state: int = 0) -> Flags:
    """The flags of a model as it is now."""
    modules = modules_of(model)
    return Flags(
        training=bytes([module.training for module in modules]),
        trainable=bytes([parameter.requires_grad for parameter in parameters_in(modules)]),
        state=state,
    )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """``model.modules()``, in its order, without the names that torch makes for each: every step asks."""
    found = {id(model): model}
    waiting = [iter(model._modules.values())]
    while waiting:
        module = next(waiting[-1], waiting)
        if module is waiting:
            waiting.pop()
        elif isinstance(module, nn.Module) and id(module) not in found:
            found[id(module)] = module
            waiting.append(iter(module._modules.values()))
    return list(found.values())


def parameters_in(modules: Iterable[nn.Module]) -> Collection[nn.Parameter]:
    """``model.parameters()`` for the modules of a model, in its order."""
    return {id(one): one for module in modules for one in module._parameters.values() if one is not None}.values()


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
    ambient: Ambient = Ambient()  # noqa: RUF009  (it is frozen)
    everyone: tuple[int, ...] = ()
    """The rows of each micro-batch on all replicas together, where stages see them; () where that is not known yet."""

    def for_any_shape(self) -> Pattern:
        """The pattern without what only tracers that need shapes depend on."""
        return dataclasses.replace(self, shapes=(), everyone=())


def pattern_of(
    microbatches: Sequence[Description],
    training: bool,
    loss_fn: Callable[..., Any] | None,
    flags: Flags,
    ambient: Ambient,
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
        raise RunError(_different(shapes))
    return Pattern(inputs.pop(), fixed.pop(), len(shapes), with_loss, flags, training, shapes, ambient)


def _different(shapes: Sequence[Description]) -> str:
    """Why micro-batches cannot be of one step."""
    kinds = [{name: given.kind for name, given in one} for one in shapes]
    names = dict.fromkeys(name for one in kinds for name in one)
    absent = [name for name in names if len({one.get(name, "none") == "none" for one in kinds}) > 1]
    if not absent:
        return "the micro-batches of one step must have the same inputs, and of plain values the same ones"
    which = [place for place, one in enumerate(kinds) if one.get(absent[0], "none") == "none"]
    return (
        f"the micro-batches {which} lack {', '.join(map(repr, absent))}, which others of this step have, and those of "
        "one step have the same inputs: order rows so that each has some, or add to such a row what counts for nothing "
        "(an image whose words have no labels); or make two calls, one of those with it and one of those without, and "
        "then optimizer.step()"
    )
