"""Batch: the description and the counts of a call's inputs, and their split into micro-batches.

Takes: the merged descriptions of all ranks, the counts of packed inputs, and ``batch_dim=``. Gives: ``Batch``, equal on
all ranks; ``split`` applies it to one rank's inputs.

1. The inputs with rows must agree on their number.
2. The rows are divided over the micro-batches, as ``torch.tensor_split`` does: 10 rows in 4 micro-batches are 3, 3, 2,
   2.
3. A packed input is divided where the rows are: a micro-batch takes the counts of its own rows.
4. Each input is split by its rule; inputs without rows go to every micro-batch.

For example, 4 rows with 1, 2, 1 and 3 images, in 2 micro-batches: rows 2 and 2, images 3 and 4.

It decides sizes from descriptions alone, before any tensor is split, so that all ranks decide the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from fxpipe.batch.description import Description, described, example_of
from fxpipe.batch.rows import Counts, row_count, split_rows
from fxpipe.batch.rules import InRows, PartSizes, rule_of
from fxpipe.packed import BatchDim, Offsets, counted
from fxpipe.specs import TensorSpec
from fxpipe.torch_compat import pytree


@dataclass(frozen=True)
class Batch:
    """A batch, or the micro-batches into which the caller has split a batch.

    ``given``: the description of the batch, or of each micro-batch. ``counts``: the counts of a batch's packed inputs.
    ``rows``: the number of rows, or None if no input gives it. ``sizes``: the rows of each micro-batch, or 1 each.
    """

    given: tuple[Description, ...]
    is_whole: bool
    batch_dim: BatchDim
    counts: Counts
    rows: int | None
    sizes: tuple[int, ...]

    @staticmethod
    def from_descriptions(
        descriptions: Sequence[Description],
        counts: Sequence[Counts],
        batch_dim: BatchDim,
        microbatches: int | None,
        may_be_fewer: bool = False,
    ) -> Batch:
        """A call's batch.

        Args:
            descriptions: one, merged over the ranks; or one for each micro-batch.
            counts: for each description, the counts of packed inputs.
            batch_dim: where inputs have their rows.
            microbatches: the number of micro-batches; None if ``descriptions`` are micro-batches.
            may_be_fewer: a batch with fewer rows is split into single rows.

        Raises:
            RunError: inputs contradict each other, or the batch has too few rows.
        """
        # 1. the rows of the inputs
        rows = [row_count(each, batch_dim, numbers) for each, numbers in zip(descriptions, counts, strict=True)]
        # 2. the rows of each micro-batch
        if microbatches is None:
            sizes = tuple(1 if count is None else count for count in rows)
        else:
            fewer = may_be_fewer and rows[0] is not None and rows[0] < microbatches
            sizes = split_rows(rows[0], max(rows[0] or 0, 1) if fewer else microbatches)
        total = sum(sizes) if any(count is not None for count in rows) else None
        return Batch(tuple(descriptions), microbatches is not None, batch_dim, counts[0], total, sizes)

    @cached_property
    def part_sizes(self) -> PartSizes:
        """Path → the size of each micro-batch's part of that input; under "" the rows of each micro-batch."""
        sizes, rules = {"": self.sizes}, counted(self.batch_dim)
        for path, rule in rules.items():
            own = sizes.get(rule.of if rule.of in rules else "")
            if own is None:
                continue  # neither the input with the counted rows nor this input was given
            if isinstance(rule, Offsets):
                sizes[path] = own
            elif isinstance(rule.counts, int):
                sizes[path] = tuple(rule.counts * size for size in own)
            elif path in self.counts:
                # 3. A micro-batch takes the counts of its own rows, which are consecutive.
                ends = zip(accumulate(own), own, strict=True)
                sizes[path] = tuple(sum(self.counts[path][end - size : end]) for end, size in ends)
        return sizes

    def split(self, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Splits a rank's inputs into micro-batches: input's name → its part, for each micro-batch.

        Parts of tensors are views of the rank's tensors. ``inputs``: one dict for a batch; for micro-batches of the
        user's own one dict each, which are returned as copies.
        """
        if not self.is_whole:
            return [dict(part) for part in inputs]
        # 4. split each input by its rule
        columns = {
            name: rule_of(self.batch_dim, name, value).split(value, self.part_sizes)
            for name, value in inputs[0].items()
        }
        return [{name: parts[number] for name, parts in columns.items()} for number in range(len(self.sizes))]

    def describe_parts(self, descriptions: Sequence[Description] | None = None) -> list[Description]:
        """The micro-batches' descriptions. ``descriptions``: a single rank's description, instead of the merged one."""
        descriptions = self.given if descriptions is None else descriptions
        if not self.is_whole:
            return list(descriptions)
        return [_with_specs(descriptions[0], part) for part in self.split([example_of(descriptions[0])])]


def joined(batches: Sequence[Mapping[str, Any]], batch_dim: BatchDim) -> dict[str, Any]:
    """The inputs of several micro-batches, concatenated; inputs without rows come from the first micro-batch."""
    first = batches[0]
    if len(batches) == 1:
        return dict(first)
    return {name: rule_of(batch_dim, name, first[name]).join([batch[name] for batch in batches]) for name in first}


def joined_description(descriptions: Sequence[Description], batch_dim: BatchDim) -> Description:
    """The description of several concatenated micro-batches."""
    return _with_specs(descriptions[0], joined(list(map(example_of, descriptions)), batch_dim))


def with_rows(description: Description, batch_dim: BatchDim, rows: int) -> Description:
    """The description of a batch with ``rows`` rows; packed inputs stay unchanged."""
    specs = example_of(description)
    for name, spec in specs.items():
        if type(rule := rule_of(batch_dim, name, spec)) is InRows:
            specs[name] = pytree.tree_map_only(TensorSpec, partial(TensorSpec.resized, dim=rule.dim, size=rows), spec)
    return _with_specs(description, specs)


def _with_specs(description: Description, specs: Mapping[str, Any]) -> Description:
    """The description with ``specs`` in place of its own inputs."""
    return tuple(
        (name, described(specs[name], not any(type(leaf) is str for leaf in entry.detail[1])))
        if name in specs
        else (name, entry)
        for name, entry in description
    )
