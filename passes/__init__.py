"""The passes: pure functions ``Program → Program``, each in its own file. ``compile`` runs the pipeline ``default()``.

Takes: a captured ``Program``, a graph without stages. Gives: a ``Program`` in which every node has its stage; ``split``
then makes the ``StageGraph``.

1. ``drop_unused`` removes nodes that change nothing.
2. ``order_writes`` adds an edge from each write to the later reads.
3. ``alias_groups`` finds the nodes that share written memory: a stage has all or none of them.
4. ``mark_copies`` finds what each stage computes for itself, such as masks.
5. ``partition`` gives each remaining node its stage; for later captures it calls ``follow``.
6. ``name_stages`` names the stages.
7. ``gather`` finds the stages that run once for several micro-batches.
8. ``checkpoint_layers`` puts the layers that ``recompute=`` names into calls that run again in the backward.

A new pass needs a file, a test, and an entry in ``default()``. ``chain`` checks the program after each pass.

Other files: ``effects`` and ``union`` are what passes share, ``blocks`` is for the search of cuts. ``counting`` is used
by ``split``, and ``defer_weights`` and ``cut_backward`` change stages after they have been made.
"""

from __future__ import annotations

if __name__ == "passes":
    raise ImportError("this folder is the package fxpipe.passes; import it by that name")

from fxpipe.passes.alias_groups import alias_groups
from fxpipe.passes.blocks import blocks
from fxpipe.passes.chain import Pass
from fxpipe.passes.checkpoint_layers import checkpoint_layers, without_checkpoints
from fxpipe.passes.drop_unused import drop_unused, erase_boundaries, erase_cuts
from fxpipe.passes.gather import gather
from fxpipe.passes.mark_copies import mark_copies
from fxpipe.passes.name_stages import name_stages
from fxpipe.passes.order_writes import order_writes
from fxpipe.passes.partition import partition
from fxpipe.passes.split import split


def default() -> tuple[Pass, ...]:
    """Returns the pass pipeline, in order. ``compile(passes=...)`` takes this tuple, changed or unchanged."""
    return drop_unused, order_writes, alias_groups, mark_copies, partition, name_stages, gather, checkpoint_layers


def before_balance() -> tuple[Pass, ...]:
    """Returns the passes that run before ``fxpipe.search``, which replaces ``partition``."""
    return erase_cuts, drop_unused, order_writes, alias_groups, mark_copies


__all__ = [
    "alias_groups",
    "before_balance",
    "blocks",
    "checkpoint_layers",
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
    "without_checkpoints",
]
