"""Modes: the state of gradients and autocast where an operation runs; and a model's evaluation mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe.device import ATTENTION, default_device, kinds
from fxpipe.plain_data import admitted


class Autocast(NamedTuple):
    """The state of autocast on a type of device. ``cache``: whether a region casts a weight only once."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool = True


@dataclass(frozen=True)
class Modes:
    """The modes that forward has changed around an operation; None and () mean the modes around the call.

    ``region`` numbers the ``with`` blocks of a capture, so that two blocks of the same modes remain two blocks.
    """

    grad: bool | None = None
    autocast: tuple[Autocast, ...] = ()
    region: int = 0

    @property
    def arguments(self) -> tuple[bool | None, tuple[tuple[Any, ...], ...]]:
        """The arguments of ``enter_modes``: plain tuples, which generated code can contain."""
        return self.grad, tuple(map(tuple, self.autocast))


@admitted
@dataclass(frozen=True)
class Ambient:
    """The settings of torch around a call that forward can query: a kind of batch is captured once for each of them.

    Whether gradients are enabled is not included: they are in a step, and are not in an evaluation.

    ``settings``: the values of ``SETTINGS``, in their order.
    """

    autocast: tuple[Autocast, ...] = ()
    settings: tuple[Any, ...] = ()

    @staticmethod
    def now() -> Ambient:
        return Ambient(ambient_autocast(), tuple([ask() for ask in SETTINGS.values()]))

    def difference(self, other: Ambient) -> str:
        """Returns the first setting that differs, with both values; "" if no setting differs."""
        if self.autocast != other.autocast:
            return f"autocast, {list(self.autocast)} and {list(other.autocast)}"
        pairs = zip(SETTINGS, self.settings, other.settings, strict=True)
        return next((f"{name}, {mine!r} and {its!r}" for name, mine, its in pairs if mine != its), "")


SETTINGS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "torch.get_default_dtype()": torch.get_default_dtype,
        "torch.get_default_device()": default_device,
        "torch.get_deterministic_debug_mode()": torch.get_deterministic_debug_mode,
        **ATTENTION,
    }
)
"""Settings of torch, other than autocast, that forward can query, by the call that queries them."""


def autocast_now() -> tuple[Autocast, ...]:
    """Returns the current state of autocast on each type of device."""
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), cache)
        for device in kinds()
    )


def ambient_autocast() -> tuple[Autocast, ...]:
    """Returns the current state of autocast on each type of device where it is enabled."""
    return tuple(state for state in autocast_now() if state.enabled)


@contextlib.contextmanager
def within(autocast: Sequence[Autocast]) -> Iterator[None]:
    """Enters an autocast region of its own, with its own cache, on each of the devices."""
    with contextlib.ExitStack() as stack:
        for region in autocast:
            stack.enter_context(torch.autocast(region.device, region.dtype, region.enabled, cache_enabled=region.cache))
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Sets the model to evaluation mode, or to training mode, while the context is open."""
    flags = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stacks: list[contextlib.ExitStack] = []
        """The modes that this thread has entered and not left yet."""


_entered = _Entered()


def enter_modes(grad: bool | None, autocast: Sequence[tuple[str, bool, torch.dtype, bool]]) -> contextlib.ExitStack:
    """Enters the modes of a ``Modes``; an operator of a stage's graph. ``leave_modes`` of the result leaves them."""
    # recorded before any mode is entered: if entering fails, modes_restored leaves the modes entered so far
    stack = contextlib.ExitStack()
    _entered.stacks.append(stack)
    stack.enter_context(within([Autocast(*region) for region in autocast]))
    if grad is not None:
        stack.enter_context(torch.set_grad_enabled(grad))
    return stack


def leave_modes(stack: contextlib.ExitStack) -> None:
    """Leaves the modes that ``enter_modes`` entered; an operator of a stage's graph."""
    _entered.stacks.remove(stack)
    stack.close()


class modes_restored:  # a context manager; as a class, for it is around each call of a stage
    """Leaves, at its end, the modes that a stage's graph entered inside, also if an error is raised."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = len(_entered.stacks)

    def __exit__(self, *error: object) -> None:
        while len(_entered.stacks) > self._before:
            _entered.stacks.pop().close()
