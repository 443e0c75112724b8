"""A stage boundary and an opaque region as operators of torch, which is what torch.export can record.

What a region returns are inputs of the export, ``stand_ins``, whose sizes are symbolic as those of inputs may be: what
the code behind a region takes for granted of them is then among the guards of the export.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.torch_compat import holds_for


def _copying(name: str, schema: str, place: int) -> Any:
    """An operator that returns copies of the tensors in its ``place``-th argument. It is traced, and never runs."""

    def copies(*args: Any) -> list[Tensor]:
        return [tensor.clone() for tensor in args[place]]

    def fakes(*args: Any) -> list[Tensor]:
        # the strides stay: what is computed from the copies may depend on them
        return [tensor.new_empty_strided(tensor.shape, tensor.stride()) for tensor in args[place]]

    def backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
        return tuple(gradients if argument == place else None for argument in range(4))

    operator = torch.library.custom_op(f"fxpipe::{name}", copies, mutates_args=(), schema=schema)
    operator.register_fake(fakes)
    operator.register_autograd(backward)
    return operator


marked = _copying("boundary", "(Tensor[] values, str? name, str? gather=None, int? group=None) -> Tensor[]", 0)
"""The values behind a boundary. A converted graph has ``boundary`` of fxpipe.graph in its place."""
whole = _copying("whole", "(Tensor[] values, SymInt[] numbers, Tensor[] stand_ins, int call) -> Tensor[]", 2)
"""What a call of a region returns. A converted graph calls the region in its place."""

Size = tuple[int, int]
"""Which of the tensors that a guard is about, and which dimension of it."""


class SizeClauses(NamedTuple):
    """What a capture takes for granted of the sizes of the tensors that one call of a region returns.

    ``first``: the number of its first tensor in the clauses; ``others``: the sizes of others that they are about, which
    the call is given behind what the region is.
    """

    name: str
    first: int
    clauses: tuple[str, ...]
    others: tuple[Size, ...]

    def check(self, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        """RunError where it is not so."""
        shown: dict[int, Any] = {}
        for (place, dim), size in zip(self.others, sizes, strict=True):
            shown.setdefault(place, {})[dim] = int(size)
        shapes = {place: list(tensor.shape) for place, tensor in enumerate(tensors) if tensor is not None}
        broken = self.broken(shown | {self.first + place: shape for place, shape in shapes.items()})
        if broken is not None:
            raise RunError(
                f"{self.name}, an opaque region, returned tensors of shapes {list(shapes.values())}, and "
                f"what is behind it was captured for those with {self._in_words(broken)} alone: keep the code whole, "
                "too, that looks at these sizes, or return tensors of sizes for which the same code runs"
            )

    def broken(self, sizes: Mapping[int, Any]) -> str | None:
        """The first clause that does not hold where these are the sizes of tensors, by their numbers."""
        asked = {f"t{place}": _OfSize(shape) for place, shape in sizes.items()}
        return next((clause for clause in self.clauses if not holds_for(clause, asked)), None)

    @property
    def is_of_few(self) -> bool:
        """Whether a size is 0 or 1 alone."""
        return any(_FEW.fullmatch(clause) for clause in self.clauses)

    def _in_words(self, clause: str) -> str:
        def shown(match: re.Match[str]) -> str:
            place = int(match[1]) - self.first
            return f"size {match[2]} of tensor {place}" if place >= 0 else f"size {match[2]} of what is before"

        return _SIZE.sub(shown, clause)


class _OfSize(NamedTuple):
    sizes: Any

    def size(self) -> Any:
        return self.sizes


_SIZE = re.compile(r"L\['t(\d+)'\]\.size\(\)\[(\d+)\]")
_FEW = re.compile(_SIZE.pattern + " == [01]")
_LAYOUT = re.compile(r"\.(?:stride|storage_offset)\(\)")


def clauses_of(expression: str) -> list[str]:
    """The parts of a guard that must all hold."""
    tree = ast.parse(expression, mode="eval").body
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(part) for part in parts]


def sizes_in(clause: str) -> set[Size]:
    """The sizes that a clause is about."""
    return {(int(place), int(dim)) for place, dim in _SIZE.findall(clause)}


def guards_of(clauses: Sequence[str], calls: Sequence[tuple[str, range]]) -> list[SizeClauses]:
    """What is to be checked at each call: ``calls`` has, in order, its name, and the numbers of its tensors.

    A clause is checked at the last of the calls that it is about. How tensors lie in memory is taken as it comes: it
    decides about kernels, not about what they compute.
    """
    own = {place: number for number, (_, places) in enumerate(calls) for place in places}
    mine: list[list[str]] = [[] for _ in calls]
    for clause in clauses:
        # only the last call knows all the sizes; what depends on memory layout is no size
        about = [own[place] for place, _ in sizes_in(clause) if place in own]
        if about and not _LAYOUT.search(clause):
            mine[max(about)].append(clause)
    return [
        SizeClauses(
            name,
            places.start,
            tuple(shown),
            tuple(sorted({size for value in shown for size in sizes_in(value) if size[0] not in places})),
        )
        for (name, places), shown in zip(calls, mine, strict=True)
    ]
