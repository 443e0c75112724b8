"""A stage boundary and an opaque region as operators of torch, which torch.export can record; and the conditions on
sizes that an export leaves behind.

The export takes the results of regions as inputs, ``stand_ins``, with symbolic sizes: so the guards of the export
include the conditions on these sizes that the code after a region assumes.

1. ``marked`` and ``whole`` are custom operators that copy tensors. They exist for the export only: ``Conversion``
   replaces their nodes, and nothing runs them.
2. ``clauses_of`` splits a guard of torch, such as ``L['t0'].size()[0] == 8 and L['t1'].size()[1] > 2``, into clauses.
3. ``guards_of`` gives each clause to the last region call whose result it compares.
4. In a step, ``SizeClauses.check`` evaluates the clauses on the sizes that the region returned.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.torch_compat.sizes import holds_for


def _copying(name: str, schema: str, position: int) -> Any:
    """An operator that returns copies of the tensors in argument number ``position``. The operator is never run."""

    def copies(*args: Any) -> list[Tensor]:
        return [tensor.clone() for tensor in args[position]]

    def fakes(*args: Any) -> list[Tensor]:
        # the copies keep the strides, as later operations may depend on the strides
        return [tensor.new_empty_strided(tensor.shape, tensor.stride()) for tensor in args[position]]

    def backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
        return tuple(gradients if argument == position else None for argument in range(schema.count(",") + 1))

    operator = torch.library.custom_op(f"fxpipe::{name}", copies, mutates_args=(), schema=schema)
    operator.register_fake(fakes)
    operator.register_autograd(backward)
    return operator


marked = _copying("boundary", "(Tensor[] values, str? name, str? gather=None, int? group=None) -> Tensor[]", 0)
"""The values after a boundary. The converted graph calls ``boundary`` of fxpipe.graph instead."""
whole = _copying("whole", "(Tensor[] values, SymInt[] numbers, Tensor[] stand_ins, int call) -> Tensor[]", 2)
"""The result of a region's call. The converted graph calls the region instead."""
again = _copying("again", "(Tensor[] outside, Tensor[] results, int record) -> Tensor[]", 1)
"""The result of a repeated layer. ``results``: the tensors that the first layer of its record returns."""

Size = tuple[int, int]
"""(the number of a tensor in a guard's clauses, a dimension of that tensor)"""


class SizeClauses(NamedTuple):
    """The conditions that a capture assumes for the sizes of the tensors that one call of a region returns.

    ``first``: the number of the call's first tensor in the clauses; ``others``: the sizes of other tensors in the
    clauses, which the call takes after the region's own arguments.
    """

    name: str
    first: int
    clauses: tuple[str, ...]
    others: tuple[Size, ...]

    def check(self, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        """RunError if a clause is false for these tensors and sizes."""
        # 4. evaluate them
        shown: dict[int, Any] = {}
        for (index, dim), size in zip(self.others, sizes, strict=True):
            shown.setdefault(index, {})[dim] = int(size)
        shapes = {index: list(tensor.shape) for index, tensor in enumerate(tensors) if tensor is not None}
        broken = self.broken(shown | {self.first + index: shape for index, shape in shapes.items()})
        if broken is not None:
            raise RunError(
                f"{self.name}, an opaque region, returned tensors of shapes {list(shapes.values())}, and "
                f"what is behind it was captured for those with {self._in_words(broken)} alone: keep the code whole, "
                "too, that looks at these sizes, or return tensors of sizes for which the same code runs"
            )

    def broken(self, sizes: Mapping[int, Any]) -> str | None:
        """The first clause that is false, or None. ``sizes``: the number of a tensor → the tensor's sizes."""
        sizes_of = {f"t{index}": _OfSize(shape) for index, shape in sizes.items()}
        return next((clause for clause in self.clauses if not holds_for(clause, sizes_of)), None)

    @property
    def is_of_few(self) -> bool:
        """Whether a clause says that a size equals 0 or 1."""
        return any(_FEW.fullmatch(clause) for clause in self.clauses)

    def _in_words(self, clause: str) -> str:
        def shown(match: re.Match[str]) -> str:
            index = int(match[1]) - self.first
            return f"size {match[2]} of tensor {index}" if index >= 0 else f"size {match[2]} of what is before"

        return _SIZE.sub(shown, clause)


class _OfSize(NamedTuple):
    """Answers ``.size()`` in a clause."""

    sizes: Any

    def size(self) -> Any:
        return self.sizes


_SIZE = re.compile(r"L\['t(\d+)'\]\.size\(\)\[(\d+)\]")
_FEW = re.compile(_SIZE.pattern + " == [01]")
_LAYOUT = re.compile(r"\.(?:stride|storage_offset)\(\)")


def clauses_of(expression: str) -> list[str]:
    """The operands of a guard's top-level ``and``, or the guard itself."""
    # 2. the clauses
    tree = ast.parse(expression, mode="eval").body
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(part) for part in parts]


def sizes_in(clause: str) -> set[Size]:
    """The sizes that a clause compares."""
    return {(int(index), int(dim)) for index, dim in _SIZE.findall(clause)}


def guards_of(clauses: Sequence[str], calls: Sequence[tuple[str, range]]) -> list[SizeClauses]:
    """The clauses to check at each call. ``calls``: (the region's name, the numbers of its tensors) of each, in order.

    The last call whose tensors a clause compares checks the clause. Clauses on strides and storage offsets are left
    out: these choose kernels, and do not change results.
    """
    own = {index: number for number, (_, places) in enumerate(calls) for index in places}
    mine: list[list[str]] = [[] for _ in calls]
    for clause in clauses:
        # 3. only the last call knows all the sizes in the clause; a memory layout is no size
        about = [own[index] for index, _ in sizes_in(clause) if index in own]
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
