"""Group inputs: the inputs of a stage that runs once for a group of micro-batches, and their gradients.

Takes: the parts that micro-batches sent to such a stage. Gives: one value of the group for the stage's forward, with a
``Joined`` that says how it was made; and in backward the gradient of each part.

1. The row dimension of each leaf is found: from the captured places, or by its size in all parts.
2. The parts are concatenated along it. An input without rows must be equal in all parts; a stage's value without rows
   is refused.
3. For ``gather="global"`` an all-gather adds the rows of the other replicas, padded to the longest.
4. In backward, the gradient is split again. For "global", a reduce-scatter first sums it over the replicas.

For example, parts of 2 and 3 rows on two replicas with 5 and 4 rows give a value of 9 rows; each replica gets back the
gradient of its own rows.

All replicas check before any of them starts a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.batch.batch import joined
from fxpipe.batch.objects import PLAIN
from fxpipe.distributed.collective import Collective
from fxpipe.distributed.transport import Transport, differing
from fxpipe.errors import RunError
from fxpipe.graph.boundary import Mode
from fxpipe.graph.gathering import Places, concatenated
from fxpipe.packed import BatchDim, rule_at
from fxpipe.specs import ITEMS
from fxpipe.torch_compat import pytree

SCOPE = "rows"
"""The data axis with separate process groups, whose collectives do not wait for running gradient sums."""


@dataclass(frozen=True)
class Joined:
    """How a value was joined from parts. ``dims``: each leaf's row dimension; None for a leaf without rows.

    ``likes``: for each leaf that gets a gradient, a tensor without memory that has the leaf's shape before other
    replicas' rows are joined; None for other leaves. ``rows``: the rows of each part. ``everyone``: the rows of each
    replica if the value has all replicas' rows; else empty.
    """

    dims: Sequence[int | None]
    likes: Sequence[Tensor | None]
    spec: pytree.TreeSpec
    rows: Sequence[int]
    everyone: Sequence[int]


class GroupInputs:
    """The inputs of a step's gathered stages.

    ``rows``: the rows of each micro-batch. ``is_cut``: whether the micro-batches were cut from a batch, so that inputs
    that are not split are equal. ``places``: the row dimensions of values, as far as they are known. ``replica_rows``:
    each replica's rows of each micro-batch, if a stage sees them.
    """

    def __init__(
        self,
        transport: Transport,
        batch_dim: BatchDim,
        rows: Sequence[int],
        is_cut: bool,
        places: Places,
        replica_rows: Sequence[Sequence[int]] = (),
    ) -> None:
        self._places, self._replica_rows = places, replica_rows
        self._transport, self._batch_dim, self._rows, self._is_cut = transport, batch_dim, rows, is_cut

    def of_batch(self, name: str, parts: Sequence[Any], microbatches: range, mode: Mode | None) -> Any:
        """The value of a batch input for a group. An input that is not split must be equal in all micro-batches."""
        along = rule_at(self._batch_dim, name)
        if not isinstance(along, int | None):
            if mode == "global" and self._transport.data_size > 1:
                raise RunError(
                    f"input {name!r} is packed, and is given to a stage that gathers the rows of all replicas, which "
                    "have others; use it in front of the boundary, and gather what comes of it, or write "
                    'gather="batch"'
                )
            return joined([{name: part} for part in parts], self._batch_dim)[name]

        def dim_of(_: int, column: Sequence[Any]) -> int | None:
            if along is not None and isinstance(column[0], Tensor) and column[0].dim():
                return along
            if not self._is_cut:
                _check_whole(name, column)
            return None

        return self._joined(f"input {name!r}", parts, dim_of, (), microbatches, mode)[0]

    def of_stage(
        self, value: str, maker: str, parts: Sequence[Any], microbatches: range, mode: Mode | None
    ) -> tuple[Any, Joined]:
        """Returns a group's value, joined from the parts that micro-batches, or a group, sent, and its ``Joined``.

        ``maker``: the name of the stage that sends the parts.
        """
        rows = [self._rows[microbatch] for microbatch in microbatches]
        rows = rows if len(parts) == len(rows) else [sum(rows)]
        text = f"{value} of stage {maker!r}"

        def dim_of(leaf: int, column: Sequence[Any]) -> int | None:
            return self._dim_of_rows((value, leaf), f"{text} is gathered, and", column, rows, mode == "global")

        return self._joined(text, parts, dim_of, rows, microbatches, mode)

    def _joined(
        self,
        text: str,
        parts: Sequence[Any],
        dim_of: Callable[[int, Sequence[Any]], int | None],
        rows: Sequence[int],
        microbatches: range,
        mode: Mode | None,
    ) -> tuple[Any, Joined]:
        """Returns a group's concatenated parts, with all replicas' rows if ``mode`` is "global", and its ``Joined``."""
        everyone: Sequence[int] = ()
        if mode == "global" and self._transport.data_size > 1:
            everyone = [sum(rows[microbatch] for microbatch in microbatches) for rows in self._replica_rows]
        flat = [pytree.tree_flatten(part) for part in parts]
        leaves, dims, likes = list[Any](), list[int | None](), list[Tensor | None]()
        for number, column in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            dim = dim_of(number, column)  # 1. its row dimension
            leaf = _in_a_row(text, column, dim)  # 2. the concatenated parts
            gets_gradient = isinstance(leaf, Tensor) and leaf.requires_grad
            leaves.append(leaf)
            dims.append(dim)
            # An expanded zero has the leaf's shape, type and device, and takes no memory.
            likes.append(leaf.new_zeros(()).expand(leaf.shape) if gets_gradient else None)
        # 3. All replicas check before any replica starts a collective that the others would not join.
        if everyone:
            self._check_alike(text, leaves, dims)
            pairs = zip(leaves, dims, strict=True)
            leaves = [leaf if dim is None else self._of_everyone(leaf, dim, everyone) for leaf, dim in pairs]
        spec = flat[0][1]
        return pytree.tree_unflatten(leaves, spec), Joined(dims, likes, spec, rows, everyone)

    def cut(self, joined: Joined, gradient: Any) -> list[Any]:
        """The gradient of each part; None for a part without one.

        If the value has all replicas' rows, a collective call sums their gradients: then each replica calls this, also
        without a gradient of its own. The adjoint of an all-gather is a reduce-scatter: a replica's part is the
        gradient of the sum of all replicas' losses.
        """
        leaves: list[Any] = [None] * len(joined.dims) if gradient is None else pytree.tree_leaves(gradient)
        nothing: list[Any] = [None] * len(joined.rows)
        # 4. sum over replicas, and split
        columns = []
        for leaf, like, dim in zip(leaves, joined.likes, joined.dims, strict=True):
            if like is None or dim is None:
                columns.append(nothing)
                continue
            if joined.everyone:
                leaf = self._summed(leaf, like, dim, joined.everyone)
            columns.append(nothing if leaf is None else list(torch.split(leaf, list(joined.rows), dim)))
        if all(part is None for column in columns for part in column):
            return nothing
        return [pytree.tree_unflatten(list(parts), joined.spec) for parts in zip(*columns, strict=True)]

    def _dim_of_rows(
        self, leaf: tuple[str, int], text: str, column: Sequence[Any], rows: Sequence[int], is_global: bool
    ) -> int | None:
        """The row dimension; None if each part is None. RunError for parts without rows to be gathered."""
        if all(part is None for part in column):
            return None
        if not all(isinstance(part, Tensor) and part.dim() for part in column):
            raise RunError(
                f"{text} is one number for each micro-batch, which has no rows to be put in a row; "
                "gather what it is computed from, and compute it behind the boundary, or make it a mean there"
            )
        dims = self._places.get(leaf, range(column[0].dim()))
        # A dimension has the rows if its size is the number of rows in every micro-batch.
        fits = [dim for dim in dims if have_sizes(column, dim, rows)]
        is_alone = len(column) == 1 and not (is_global and self._transport.data_size > 1)
        if len(fits) == 1 or (fits and is_alone):
            return fits[0]
        raise RunError(
            f"{text} has shapes {shapes_of(column)} for micro-batches of {list(rows)} rows: its rows are in one "
            f"dimension, and {len(fits)} could be it. Give it rows in front of the boundary (k values for each row: "
            ".unflatten(0, (-1, k))), or another number of rows; compute numbers between rows behind the boundary"
        )

    # over the replicas

    def _check_alike(self, text: str, leaves: Sequence[Any], dims: Sequence[int | None]) -> None:
        """RunError on all replicas if their rows cannot be concatenated. A collective call of the replicas."""
        facts = [
            (leaf.dtype, leaf.requires_grad, beside(leaf, dim)) if dim is not None else None
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        if differing(self._transport, "data", str(facts)):
            shapes = ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor))
            raise RunError(
                f"{text} is gathered over the replicas, which have it in other sizes beside its rows, or of another "
                f"type; this one has {shapes or 'no tensor'}. Pad it to one size on all replicas, in the batch or in "
                "front of the boundary"
            )

    def _of_everyone(self, tensor: Tensor, dim: int, everyone: Sequence[int]) -> Tensor:
        """The tensor with the rows of all replicas, in their order. A collective call of the replicas."""
        padded = _padded(tensor.detach(), dim, max(everyone))
        mine = padded.flatten().view(torch.uint8)
        output = mine.new_empty(len(everyone) * mine.numel())
        self._perform("all_gather", output, mine)
        pieces = output.view(tensor.dtype).view(len(everyone), *padded.shape)
        parts = [piece[:count].movedim(0, dim) for piece, count in zip(pieces, everyone, strict=True)]
        return torch.cat(parts, dim).requires_grad_(tensor.requires_grad)

    def _summed(self, gradient: Tensor | None, like: Tensor, dim: int, everyone: Sequence[int]) -> Tensor:
        """This replica's rows of a gradient, summed over the replicas."""
        own, longest = everyone[self._transport.data_rank], max(everyone)
        if gradient is None:  # the value was unused here, and other replicas wait
            shape = list(like.shape)
            shape[dim] = sum(everyone)
            gradient = like.new_zeros(shape)
        # reduce_scatter needs chunks of equal size, so each replica's rows are padded to the largest number of rows.
        padded = [_padded(part, dim, longest) for part in torch.split(gradient, list(everyone), dim)]
        total = torch.empty_like(padded[0])
        self._perform("reduce_scatter", total.view(-1), torch.stack(padded).view(-1))
        return total[:own].movedim(0, dim)

    def _perform(self, operation: str, output: Tensor, source: Tensor) -> None:
        """Runs a collective over the replicas, and waits for it."""
        self._transport.start([Collective(operation, SCOPE, output, source)], "what a stage gathers").wait()


def _padded(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """A contiguous tensor with its rows in dimension 0, padded with zeros to ``rows`` rows."""
    tensor = tensor.movedim(dim, 0)
    if len(tensor) == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded


def have_sizes(parts: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> bool:
    """Whether all parts have the same number of dimensions, and these sizes in dimension ``dim``."""
    dims = {part.dim() for part in parts}
    has_dim = len(dims) == 1 and all(-each <= dim < each for each in dims)
    return has_dim and [part.shape[dim] for part in parts] == list(sizes)


def shapes_of(column: Sequence[Tensor]) -> str:
    """The shapes of tensors, for an error message."""
    return ", ".join(str(list(part.shape)) for part in column)


def beside(tensor: Tensor, dim: int) -> tuple[int, ...]:
    """A tensor's sizes in all dimensions except the row dimension."""
    sizes = list(tensor.shape)
    del sizes[dim]
    return tuple(sizes)


def _in_a_row(text: str, column: Sequence[Any], dim: int | None) -> Any:
    """The concatenated parts of a group, or the first part if ``dim`` is None. RunError if other sizes differ."""
    if dim is None:
        return column[0]
    if len({beside(part, dim) for part in column}) > 1:
        raise RunError(
            f"{text} is gathered, and has shapes {shapes_of(column)}, which differ beside its rows; pad it to one "
            "size in all micro-batches, in the batch or in front of the boundary"
        )
    return concatenated(column, dim)


def _check_whole(name: str, column: Sequence[Any]) -> None:
    """RunError if micro-batches have different values of an input that a group takes once."""
    # A micro-batch's number of items is its share of the whole batch's, so ITEMS may differ.
    if name != ITEMS and not all(_are_equal(column[0], other) for other in column):
        raise RunError(
            f"input {name!r} has no rows and is not the same for all micro-batches, but a stage that runs once for all "
            "of them takes it; pass one value for all, or one with a row for each row of the batch"
        )


def _are_equal(value: Any, other: Any) -> bool:
    """Whether two values are the same object, equal tensors of equal type, equal plain values, or of the same class."""
    if value is other or not isinstance(value, (Tensor, *PLAIN)):
        return type(value) is type(other)
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return repr(value) == repr(other)
