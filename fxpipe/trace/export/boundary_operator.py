"""A stage boundary as an operator of torch, which is what torch.export can record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SCHEMA = "(Tensor[] values, str? name, str? gather=None, int? group=None) -> Tensor[]"


@torch.library.custom_op("fxpipe::boundary", mutates_args=(), schema=_SCHEMA)
def marked(values: list[Tensor], name: str | None, gather: Any = None, group: Any = None) -> list[Tensor]:
    """The values behind a boundary. It is traced, and never runs: a converted graph has ``marker.boundary`` instead."""
    return [value.clone() for value in values]


@marked.register_fake
def _marked_fake(values: list[Tensor], name: str | None, gather: Any = None, group: Any = None) -> list[Tensor]:
    """The strides stay: what is computed behind a boundary may depend on them."""
    return [value.new_empty_strided(value.shape, value.stride()) for value in values]


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor], None, None, None]:
    return gradients, None, None, None


marked.register_autograd(_backward)
