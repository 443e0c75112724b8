"""With loss: a model, and the parameters of its loss function, which are trained with it, as a single module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fxpipe.errors import RunError

LOSS_FN = "loss_fn"
"""The name of the loss function among the model's submodules."""


def loss_module(loss_fn: Callable[..., Any] | None) -> nn.Module | None:
    """Returns the module that a loss function is, or whose method it is; None if it is neither."""
    function: Any = loss_fn
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def target_of(loss_fn: Callable[..., Any] | None) -> inspect.Parameter | None:
    """The loss function's parameter after the output, for ``target``; None if the function takes the output alone."""
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


def about_target(loss_fn: Callable[..., Any] | None, error: TypeError) -> str:
    """The end of a message about arguments that the model does not take: how to pass a target; "" without one.

    >>> about_target(None, TypeError("got an unexpected keyword argument 'target'"))
    '; a target needs loss_fn= of fxpipe.compile'
    """
    if target_of(loss_fn) is not None:
        return '; the target is passed as target=, and in an example as example_kwargs={"target": ...}'
    return "; a target needs loss_fn= of fxpipe.compile" if f"{error}".endswith("'target'") else ""


class WithLoss(nn.Module):
    """Replaces a model, and is called like the model; ``loss_fn`` is an additional submodule.

    It shares the model's ``__dict__``, so that both have the same attributes, whichever sets or replaces them. The
    model itself does not have the loss function: its forward may loop over its submodules.
    """

    __slots__ = (LOSS_FN, "model")

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        object.__setattr__(self, "__dict__", vars(model))
        object.__setattr__(self, "model", model)
        object.__setattr__(self, LOSS_FN, loss)

    @property
    def _modules(self) -> dict[str, nn.Module | None]:  # type: ignore[override]
        return {**vars(self.model)["_modules"], LOSS_FN: self.loss_fn}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def with_loss(model: nn.Module, loss_fn: Callable[..., Any] | None) -> nn.Module:
    """Returns the model, with its loss function if that is a module with trainable parameters that the model lacks.

    RunError if the model has another attribute of that name.
    """
    loss, owned = loss_module(loss_fn), set(model.parameters())
    if loss is None or not any(p.requires_grad and p not in owned for p in loss.parameters()):
        return model
    if hasattr(model, LOSS_FN):
        raise RunError(
            f"loss_fn= is a module with parameters, which would be called {LOSS_FN}, and {type(model).__name__} has a "
            f"{LOSS_FN} of its own; make the module that holds them a submodule of the model, under another name"
        )

    @functools.wraps(type(model).forward)
    def forward(self: WithLoss, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)

    named = {"__slots__": (), "__module__": type(model).__module__, "forward": forward}
    return type(type(model).__name__, (WithLoss,), named)(model, loss)  # type: ignore[no-any-return]


def plain_model(model: nn.Module) -> nn.Module:
    """Returns the model without its loss function's parameters."""
    return model.model if isinstance(model, WithLoss) else model
