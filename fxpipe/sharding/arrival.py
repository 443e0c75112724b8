"""Arrival: what tells that a gradient has been added to a parameter's ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge

from fxpipe.errors import RunError


class ArrivalHook:
    """Calls ``call(is_final)`` behind each gradient that autograd has added to a parameter's ``.grad``.

    The hook is on the autograd node that adds gradients up, so it runs behind all hooks of the parameter. ``is_final``
    is False where the user has put a hook on that node since: that hook runs next, and may change the gradient. From
    then on this hook is behind it.
    """

    def __init__(self, parameter: nn.Parameter, call: Callable[[bool], object]) -> None:
        self._call = call
        self._node = get_gradient_edge(parameter).node  # autograd keeps it for no longer than somebody holds it
        self._handle: Any = self._node.register_hook(_runs(weakref.ref(self)))

    def run(self) -> None:
        hooks, key = self._handle.hooks_dict_ref(), self._handle.id
        is_final = next(reversed(hooks)) == key
        if not is_final:
            hooks[key] = hooks.pop(key)
        self._call(is_final)

    def remove(self) -> None:
        self._handle.remove()


def _runs(hook: weakref.ref[ArrivalHook]) -> Callable[..., None]:
    """What the node calls; it keeps nothing that the user has dropped."""

    def run(*gradients: object) -> None:
        alive = hook()
        if alive is not None:
            alive.run()

    return run


def late(name: str) -> RunError:
    """For a gradient that comes when the sum of the others is on its way."""
    return RunError(
        f"a gradient of {name} came after its last one: inside a reentrant checkpoint, perhaps; "
        "write torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    )
