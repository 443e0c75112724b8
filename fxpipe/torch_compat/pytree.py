"""Trees of containers: ``torch.utils._pytree``, documented in spite of its private name; the same in 2.13 to 2.15."""

# ruff: noqa: F401  (other files take what is imported here)

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def one_level(value: Any, *leaves: type) -> tuple[list[Any], TreeSpec]:
    """Flattens only the outermost container. Instances of ``leaves`` are leaves."""
    # torch leaves is_leaf in a reference cycle, which would keep a value alive; a number keeps nothing alive
    outermost = id(value)
    return tree_flatten(value, lambda node: id(node) != outermost or isinstance(node, leaves))
