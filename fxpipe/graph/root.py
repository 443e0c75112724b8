"""Root: the module of a graph, whose submodules and tensors bear the model's names, but where these are taken."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx, nn

_TAKEN = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
"""What ``fx.GraphModule`` has itself: ``graph``, ``code``, ``meta``, ``recompile``."""


def graph_module(root: Mapping[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A module that runs a graph on what its nodes name in ``root``.

    >>> model = nn.ModuleDict({"graph": nn.Linear(2, 2), "class": nn.Linear(2, 2)})
    >>> graph = fx.Graph()
    >>> _ = graph.call_module("class", (graph.call_module("graph", (graph.placeholder("x"),)),))
    >>> [name for name, _ in graph_module(dict(model), graph, "stage").named_children()]
    ['graph_', 'class_']
    """
    own = _names(root)
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            node.target = own[str(node.target)]
    return fx.GraphModule({own[name]: value for name, value in root.items()}, graph, class_name=class_name)


def _names(targets: Iterable[str]) -> dict[str, str]:
    """For each target one that a graph's module can have, and its generated code can write."""
    known = {tuple(target.split(".")[:end]) for target in targets for end in range(1, target.count(".") + 2)}
    found: dict[str, str] = {}
    for target in targets:
        parts = target.split(".")
        for place, part in enumerate(parts):
            is_taken = keyword.iskeyword(part) or (place == 0 and part in _TAKEN)
            while is_taken and (part in _TAKEN or (*target.split(".")[:place], part) in known):
                part += "_"
            parts[place] = part
        found[target] = ".".join(parts)
    return found
