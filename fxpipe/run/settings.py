"""Settings: what was set between two steps that must be the same on all ranks, beside the batch of the next one."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from fxpipe.distributed.activity import NOTHING, Alike
from fxpipe.sharding.distributed_optimizer import DistributedOptimizer
from fxpipe.validation import is_number, list_of

_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
"""What schedulers set in parameter groups. Other numbers there may be a rank's own, such as those that it has found."""


def settings(sync: bool, clipped: Any, optimizers: Sequence[DistributedOptimizer | None]) -> Alike:
    """Compared by ranks that have and step all ``optimizers``: one without parameters may have dropped its own.

    ``sync``: whether the step sums gradients over replicas. ``clipped``: what gradients were clipped with last.
    """
    own = [optimizer for optimizer in optimizers if optimizer is not None and optimizer.steps_here]
    if len(own) < len(optimizers):
        return NOTHING
    groups = [group for optimizer in own for group in optimizer.param_groups]
    steps = [optimizer.steps for optimizer in own]
    found = (sync, clipped, *steps, *(_plain(group.get(key)) for group in groups for key in _SCHEDULED))

    def facts() -> Mapping[str, str]:
        places = [f"{key} of parameter group {place}" for place in range(len(groups)) for key in _SCHEDULED]
        made = ["the number of calls of optimizer.step()" + f" of optimizer {n}" * bool(n) for n in range(len(own))]
        names = ("set_requires_gradient_sync()", "(max_norm, norm_type) of clip_grad_norm_()", *made, *places)
        return {name: repr(value) for name, value in zip(names, found, strict=True)}

    return Alike(zlib.crc32(repr(found).encode()) >> 1 or 1, facts)


def _plain(value: Any) -> Any:
    """Numbers; of a tensor, for which a device would be waited for, nothing."""
    return value if is_number(value) or list_of(is_number)(value) else None
