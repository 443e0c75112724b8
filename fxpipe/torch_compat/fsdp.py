"""FSDP2: its state of a module; torch.distributed.pipelining calls the same functions.

torch 2.15 added the flag that ``fsdp_end_backward`` resets. The other names are the same in 2.13 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


def fsdp_state(module: Any) -> Any:
    """The FSDP state of a module; modules that were sharded together share a state."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


def fsdp_set_up(module: Any) -> None:
    """Runs FSDP2's lazy initialisation, which otherwise runs at a module's first forward."""
    fsdp_state(module)._lazy_init()


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups, each gathered and reduced together; each has ``fsdp_params`` and ``post_backward()``."""
    return list(fsdp_state(module)._fsdp_param_groups)


@contextlib.contextmanager
def fsdp_without_hooks(shards: Sequence[Any]) -> Iterator[None]:
    """Keeps FSDP2 from calling hooks after accumulation on the shards: the unsharded parameters have called them."""
    tables = [shard._post_accumulate_grad_hooks for shard in shards]
    for shard in shards:
        shard._post_accumulate_grad_hooks = None
    try:
        yield
    finally:
        for shard, table in zip(shards, tables, strict=True):
            shard._post_accumulate_grad_hooks = table


def fsdp_end_backward(root: Any) -> None:
    """Runs a root's callback after the last backward; afterwards the shards have their gradients."""
    state = fsdp_state(root)
    if hasattr(state._state_ctx, "manual_backward_finalization_active"):  # 2.15: set by hooks that ran
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()
