"""What a tracer is asked to capture."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from fxpipe.errors import TraceError


@dataclass(frozen=True)
class Request:
    """A model, an optional loss function on its output, and which of its inputs are fixed.

    ``inputs``: the names that become inputs of the program, in call order. ``fixed``: inputs whose value is a part of
    the program (None, bools, strings: what Python code branches on).
    """

    module: nn.Module
    inputs: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    loss_fn: Callable[..., Any] | None = None
    target: str = "target"

    @property
    def loss_module(self) -> nn.Module | None:
        """The module that the loss function is, or is a method of."""
        function: Any = self.loss_fn
        while isinstance(function, functools.partial):
            function = function.func
        owner = getattr(function, "__self__", function)
        return owner if isinstance(owner, nn.Module) else None

    @staticmethod
    def signature(module: nn.Module, loss_fn: Callable[..., Any] | None) -> inspect.Signature:
        """The signature of a call: the model's forward, and ``target`` where there is a loss function."""
        signature = inspect.signature(module.forward)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                raise TraceError(
                    f"{type(module).__name__}.forward takes *{parameter.name}; give its inputs names, so that stages "
                    "can ask for them"
                )
        if loss_fn is None or "target" in signature.parameters:
            return signature
        extra = inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY)
        parameters = list(signature.parameters.values())
        tail = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
        return signature.replace(parameters=[*(p for p in parameters if p not in tail), extra, *tail])
