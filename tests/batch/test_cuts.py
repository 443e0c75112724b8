"""Cuts: parts of a batch are what their descriptions say, and put together they are the batch again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe import Offsets, Packed, RunError
from fxpipe.batch.batch import Batch, joined, joined_description
from fxpipe.batch.counts import counts_of
from fxpipe.batch.description import describe
from fxpipe.graph.like import TensorLike

CU = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
VALUES: dict[str, Any] = {
    "x": torch.arange(12.0).view(4, 3),
    "columns": torch.arange(8).view(2, 4),
    "words": torch.arange(18).view(2, 9),
    "cu": CU,
    "images": [torch.ones(3, size) for size in (2, 5, 1, 4)],
    "targets": ({"n": torch.tensor(1.0)}, {"n": torch.tensor(2.0)}, {}, {"n": torch.tensor(4.0)}),
    "names": ["a", "b", "c", "d"],
    "pairs": torch.arange(8),
    "nested": {"whole": torch.ones(7), "x": torch.arange(4), "boxes": torch.arange(5.0)},
    "scale": 2.0,
    "none": None,
}
RULES: Any = {
    "columns": 1,
    "words": Packed("cu", dim=1),
    "cu": Offsets(),
    "images": Packed(1),
    "targets": Packed(1),
    "names": Packed(1),
    "pairs": Packed(2),
    "nested": {"whole": None, "boxes": Packed(lambda x: [0, 2, 3, 0])},
}
BATCH = Batch.of([describe(VALUES)], [counts_of(VALUES, RULES)], RULES, 3)


def test_each_input_is_cut_by_its_rule() -> None:
    first, second, third = BATCH.split([VALUES])
    assert BATCH.sizes == (2, 1, 1)
    assert first["words"].tolist() == [[0, 1, 2], [9, 10, 11]]
    assert [part["cu"].tolist() for part in (first, second, third)] == [[0, 3, 3], [0, 1], [0, 5]]
    assert first["cu"].dtype == torch.int32
    assert [[image.shape[1] for image in part["images"]] for part in (first, second, third)] == [[2, 5], [1], [4]]
    assert second["targets"] == ({},)
    assert (first["names"], third["names"]) == (["a", "b"], ["d"])
    assert third["pairs"].tolist() == [6, 7]
    assert first["nested"]["boxes"].tolist() == [0, 1]
    assert third["nested"]["boxes"].shape == (0,)
    assert third["nested"]["whole"] is VALUES["nested"]["whole"]
    assert (third["columns"].tolist(), third["scale"], third["none"]) == ([[3], [7]], 2.0, None)
    assert first["x"].data_ptr() == VALUES["x"].data_ptr()  # a view


def test_a_part_is_described_as_it_is() -> None:
    parts = BATCH.split([VALUES])
    for exact in (True, False):
        found = BATCH.describe_parts([describe(VALUES, exact)])
        for mine, part in zip(found, parts, strict=True):
            assert shapes_apart(mine) == shapes_apart(describe(part, exact))


def shapes_apart(description: Any) -> Any:
    """Without strides: a description has those of the whole batch."""

    def shaped(leaf: Any) -> Any:
        return (leaf.shape, leaf.dtype) if isinstance(leaf, TensorLike) else leaf

    return [
        (name, given.kind, given.detail if given.kind != "input" else (given.detail[0], *map(shaped, given.detail[1])))
        for name, given in description
    ]


def test_parts_put_together_are_the_whole_again() -> None:
    whole = joined(BATCH.split([VALUES]), RULES)
    assert list(whole) == list(VALUES)
    leaves, spec = pytree.tree_flatten(VALUES)
    assert pytree.tree_structure(whole) == spec
    for mine, its in zip(pytree.tree_leaves(whole), leaves, strict=True):
        assert torch.equal(mine, its) if isinstance(its, Tensor) else mine == its
    description = describe(VALUES, exact=True)
    assert shapes_apart(joined_description(BATCH.describe_parts([description]), RULES)) == (shapes_apart(description))


def test_a_batch_put_beside_itself_is_as_dense_as_it_was() -> None:
    values = {"x": torch.zeros(5, 3), "columns": torch.zeros(5, 3)}
    ((_, x), (_, columns)) = joined_description([describe(values)] * 2, {"columns": 1})
    assert (x.like.shape, x.like.stride) == ((10, 3), (3, 1))
    assert (columns.like.shape, columns.like.stride[1]) == ((5, 6), 1)
    assert columns.like.stride[0] >= 6


def test_a_nested_tensor_is_refused_with_how_to_pack_it() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(
        RunError, match=r"'x' is a nested tensor, .* pass its values padded, .* or packed, with batch_dim="
    ):
        Batch.of([describe({"x": nested})], [{}], 0, 2).split([{"x": nested}])
