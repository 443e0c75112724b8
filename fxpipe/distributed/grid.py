"""The grid of ranks: a row-major index, its axes and the groups along each axis. Plain arithmetic with input checks."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Sequence
from itertools import groupby, product

from fxpipe.errors import TopologyError, nearest
from fxpipe.validation import shown

# Axis name → its role. A topology has at most one axis per role.
_NAMES = {"pipe": "pp", "data": "dp", "tensor": "tp", "expert": "ep", "context": "cp"}
ROLES = {name: role for role, short in _NAMES.items() for name in (role, short)}
ROW_AXES = ("data", "expert")
"""The axes whose ranks draw rows of their own."""
BATCH_AXES = (*ROW_AXES, "context")
"""The axes whose ranks work on other rows, or on other positions of the same rows: gradients are summed over them."""
# Names of groups that are no axis: the ranks that work on the same replica's data; and the ranks along all batch axes.
MODEL, BATCH = "model", "batch"

# The number of ranks of a group, and of characters of all groups, that a printed row shows.
_SHOWN_RANKS = 8
_SHOWN_WIDTH = 64


def checked_axes(axes: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Returns the axes as (name, size) pairs; TopologyError if ``axes`` are malformed or not valid for a topology."""
    checked: list[tuple[str, int]] = []
    roles: dict[str, str] = {}
    for axis in axes if isinstance(axes, Iterable) else [axes]:
        if not isinstance(axis, tuple | list) or len(axis) != 2 or not isinstance(axis[0], str):
            raise TopologyError(
                f'an axis is a (name, size) pair, got {shown(axis)}: write Topology([("pipe", 2), ("data", 4)])'
            )
        name, size = axis[0], whole(axis[1], f'the size of axis "{axis[0]}"')
        role = role_of(name)
        if role in roles:
            raise TopologyError(f'axes "{roles[role]}" and "{name}" are both the {role} axis: keep one of them')
        if size < 1:
            raise TopologyError(f'axis "{name}" has size {size}: write 1 or more, or leave the axis out')
        roles[role] = name
        checked.append((name, size))
    if not checked:
        raise TopologyError('a topology has at least one axis: write Topology([("pipe", 1)]) for a single rank')
    return tuple(checked)


def checked_node(axes: Sequence[tuple[str, int]], ranks_per_node: int) -> int:
    """Returns the ranks per node; TopologyError if nodes, or data groups within nodes, would have unequal sizes."""
    per_node, sizes = whole(ranks_per_node, "ranks_per_node"), [size for _, size in axes]
    ranks = math.prod(sizes)
    # ZeRO shards inside each node alike: a batch group must have equally many ranks in every node that it spans.
    batch = [index for index, (name, _) in enumerate(axes) if ROLES[name] in BATCH_AXES]
    groups = axis_groups(sizes, batch)

    def fits(size: int) -> bool:
        return ranks % size == 0 and all(len({len(part) for part in by_node(group, size)}) == 1 for group in groups)

    if per_node > 0 and fits(per_node):
        return per_node
    fitting = " or ".join(str(size) for size in range(1, ranks + 1) if fits(size))
    raise TopologyError(
        f"ranks_per_node={per_node} does not divide the {ranks} ranks of {shape(axes)}, or a group that sums gradients "
        f"would have more ranks in one node than in another: write ranks_per_node={fitting}, or make "
        f"{', '.join(BATCH_AXES)} the innermost axes"
    )


def shape(axes: Sequence[tuple[str, int]]) -> str:
    """Returns the axes as messages show them: "pipe 2 × data 4"."""
    return " × ".join(f"{name} {shown(size)}" for name, size in axes)


def role_of(axis: str) -> str:
    """Returns the role of an axis; TopologyError for an unknown name."""
    role = ROLES.get(axis) if isinstance(axis, str) else None
    if role is None:
        raise TopologyError(f'unknown axis "{axis!s:.100}"{nearest(axis, ROLES)}')
    return role


def whole(value: int, what: str) -> int:
    """Returns ``value`` as an int; TopologyError, naming ``what``, if it is no whole number."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)
    raise TopologyError(f"{what} must be a whole number, got {shown(value)}")


def positive(value: int, what: str) -> int:
    """Returns ``value`` as an int; TopologyError, naming ``what``, if it is below 1."""
    if whole(value, what) < 1:
        raise TopologyError(f"{what} is {value}: write 1 or more")
    return whole(value, what)


def axis_groups(sizes: Sequence[int], indices: Sequence[int]) -> list[list[int]]:
    """Returns the groups of ranks of a row-major grid that differ along the axes ``indices`` alone: ascending lists,
    sorted by the axes inside the last of ``indices`` first. Without ``indices``, each rank is a group."""
    last = max(indices, default=-1)
    others = [index for index in (*range(last + 1, len(sizes)), *range(last)) if index not in indices]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in enumerate(product(*map(range, sizes))):
        groups.setdefault(tuple(coordinate[index] for index in others), []).append(rank)
    return [groups[key] for key in sorted(groups)]


def by_node(group: list[int], per_node: int) -> list[list[int]]:
    """Splits a group's ascending ranks by node."""
    return [list(part) for _, part in groupby(group, key=lambda rank: rank // per_node)]


def abbreviated(group: list[int]) -> str:
    """Formats a group for a message or a table: all ranks, or for large groups the first few and the last."""
    if len(group) <= _SHOWN_RANKS:
        return str(group)
    start = ", ".join(str(rank) for rank in group[: _SHOWN_RANKS // 2])
    return f"[{start}, …, {group[-1]}]"


def listed(groups: list[list[int]]) -> str:
    """Formats groups for a table: all groups, or for many groups the first few and the count."""
    shown = ""
    for count, group in enumerate(groups):
        text = abbreviated(group)
        if count and len(shown) + len(text) > _SHOWN_WIDTH:
            return f"{shown}… {len(groups)} groups"
        shown += f"{text} "
    return shown.rstrip()
