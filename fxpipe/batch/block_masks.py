"""The rows of a ``BlockMask`` of flex_attention, a mask without elements."""

from __future__ import annotations

import sys
from typing import Any


def block_mask_rows(value: object) -> int | None:
    """The number of rows of a ``BlockMask``; None for other values."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # without this import no BlockMask exists
    return int(value.kv_num_blocks.shape[0]) if flex is not None and isinstance(value, flex.BlockMask) else None


def block_mask_part(mask: Any, start: int, size: int) -> Any:
    """Rows ``start`` to ``start + size`` of a ``BlockMask``; a slice of a BlockMask itself drops ``mask_mod``."""
    part, mask_mod = mask[start : start + size], mask.mask_mod
    part.mask_mod = lambda b, h, q, kv: mask_mod(b + start, h, q, kv)
    return part
