"""Asking: where forward looks at what a region may return otherwise each time, beside values, sizes and types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpipe.graph.kept import Asked
from fxpipe.graph.listed import with_tensors
from fxpipe.trace.user_line import current_line, is_users

_ASKS: dict[str, Asked] = {
    **dict.fromkeys(("requires_grad", "grad_fn", "is_leaf"), "whether it needs a gradient"),
    **dict.fromkeys(("is_contiguous", "stride", "storage_offset"), "how it lies in memory"),
}


class Asking(TorchFunctionMode):
    """Gives ``note`` what the user's code asks of a tensor that it has computed, and at which line."""

    def __init__(self, note: Callable[[Asked, str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = with_tensors(function, args, kwargs or {})
        name = str(getattr(function, "__name__", ""))
        asked = _ASKS.get(str(function.__self__.__name__) if name == "__get__" else name)
        if asked is not None and _is_computed(args[0], asked) and is_users(sys._getframe(1).f_code.co_filename):
            self._note(asked, current_line())
        return function(*args, **kwargs)


def _is_computed(tensor: Tensor, asked: Asked) -> bool:
    """What needs no gradient in a capture is behind no region, or is detached: what such a one returns needs one."""
    return (
        tensor.grad_fn is not None if asked == "whether it needs a gradient" else not isinstance(tensor, nn.Parameter)
    )
