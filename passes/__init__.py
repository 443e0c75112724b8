"""The passes: pure functions ``Program → Program``, each in its own file. ``compile`` runs the pipeline ``default()``.

A new pass needs a file, a test, and an entry in ``default()``.
"""

from __future__ import annotations

if __name__ == "passes":
    raise ImportError("this folder is the package fxpipe.passes; import it by that name")

from fxpipe.passes.alias_groups import alias_groups
from fxpipe.passes.blocks import blocks
from fxpipe.passes.chain import Pass
from fxpipe.passes.drop_unused import drop_unused, erase_boundaries, erase_cuts
from fxpipe.passes.gather import gather
from fxpipe.passes.mark_copies import mark_copies
from fxpipe.passes.name_stages import name_stages
from fxpipe.passes.order_writes import order_writes
from fxpipe.passes.partition import partition
from fxpipe.passes.split import split


def default() -> tuple[Pass, ...]:
    """Returns the pass pipeline, in order. ``compile(passes=...)`` takes this tuple, changed or unchanged."""
    return drop_unused, order_writes, alias_groups, mark_copies, partition, name_stages, gather


def before_balance() -> tuple[Pass, ...]:
    """Returns the passes that run before ``fxpipe.search``, which replaces ``partition``."""
    return erase_cuts, drop_unused, order_writes, alias_groups, mark_copies


__all__ = [
    "alias_groups",
    "before_balance",
    "blocks",
    "default",
    "drop_unused",
    "erase_boundaries",
    "erase_cuts",
    "gather",
    "mark_copies",
    "name_stages",
    "order_writes",
    "partition",
    "split",
]
