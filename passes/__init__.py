"""The passes: each a pure function ``Program → Program``, one a file. ``default()`` is the pipeline that compile runs.

A new pass is a file, its test, and its name in ``default()``.
"""

from __future__ import annotations

if __name__ == "passes":
    raise ImportError("this folder is the package fxpipe.passes; import it by that name")

from fxpipe.passes.alias_groups import alias_groups
from fxpipe.passes.blocks import blocks
from fxpipe.passes.chain import Pass
from fxpipe.passes.drop_unused import drop_unused, erase_boundaries
from fxpipe.passes.gather import gather
from fxpipe.passes.mark_copies import mark_copies
from fxpipe.passes.name_stages import name_stages
from fxpipe.passes.order_writes import order_writes
from fxpipe.passes.partition import partition
from fxpipe.passes.split import split


def default() -> tuple[Pass, ...]:
    """The pass pipeline, in order. What it returns can be given to ``compile(passes=...)``, changed or not."""
    return drop_unused, order_writes, alias_groups, mark_copies, partition, name_stages, gather


def before_balance() -> tuple[Pass, ...]:
    """What stands in front of ``fxpipe.plan.balance.balance``, which takes the place of ``partition``."""
    return erase_boundaries, drop_unused, order_writes, alias_groups, mark_copies


__all__ = [
    "alias_groups",
    "before_balance",
    "blocks",
    "default",
    "drop_unused",
    "erase_boundaries",
    "gather",
    "mark_copies",
    "name_stages",
    "order_writes",
    "partition",
    "split",
]
