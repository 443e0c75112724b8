"""Batch: how many rows it has, and counts that do not fit; its parts as described, joined, are the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from fxpipe import Offsets, Packed, RunError
from fxpipe.batch.batch import Batch, joined, joined_description
from fxpipe.batch.description import describe
from fxpipe.batch.rows import counts_of, row_count, whole_lists
from fxpipe.specs import TensorSpec

PATCHES: Any = {"grid": Packed("images"), "patches": Packed(lambda grid: grid.prod(1), of="grid")}


def rows(values: dict[str, Any], batch_dim: Any) -> int | None:
    return row_count(describe(values), batch_dim, counts_of(values, batch_dim))


with torch.device("cpu"):  # as it asks of lengths
    PACKED = pack_sequence([torch.zeros(2), torch.zeros(1)])


def zeros(*shape: int) -> Any:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("values", "batch_dim", "wanted"),
    [
        ({"x": zeros(4, 2), "n": 3}, 0, 4),
        ({"x": zeros(4, 2), "y": zeros(2)}, {"x": 1}, 2),
        ({"x": zeros(())}, 0, None),
        ({"x": zeros(8, 2)}, {"x": Packed(4)}, 2),
        ({"x": [zeros(2), zeros(5), zeros(1)]}, {"x": Packed(1)}, 3),
        ({"cu": torch.tensor([0, 2, 3])}, {"cu": Offsets()}, 2),
        ({"x": zeros(1, 5)}, {"x": Packed(lambda x: [2, 0, 3], dim=1)}, 3),
        ({"images": torch.tensor([1, 0, 2]), "grid": torch.ones(3, 3).int(), "patches": zeros(3)}, PATCHES, 3),
        ({"images": torch.tensor([0, 0]), "grid": torch.ones(0, 3).int(), "patches": zeros(0, 5)}, PATCHES, 2),
        ({"images": torch.tensor([0, 0]), "grid": None, "patches": None}, PATCHES, 2),
        ({"b": {"x": zeros(6), "y": zeros(1, 3)}}, {"b": {"x": Packed(2), "y": 1}}, 3),
        ({"b": {"x": zeros(3)}}, {"b": {"x": 0, "images": Packed(2)}}, 3),  # which this batch has not
    ],
)
def test_rows_are_told_by_tensors_lists_counts_and_offsets(values: Any, batch_dim: Any, wanted: int | None) -> None:
    assert rows(values, batch_dim) == wanted


IMAGE = zeros(3, 4, 4)


@pytest.mark.parametrize(
    ("values", "batch_dim", "message"),
    [
        (
            {"x": zeros(4), "y": zeros(3)},
            0,
            "different numbers of rows (x: 4, y: 3); what is not cut into micro-batches is named in batch_dim={'name': "
            "None}, and what has several rows for one of the batch's, or none, in batch_dim={'name': fxpipe.Packed(",
        ),
        ({"x": zeros(4), "y": zeros(4)}, {"y": Packed(lambda x: [4])}, "(x: 4, counts of y: 1)"),
        ({"x": zeros(7)}, {"x": Packed(2)}, "input 'x' has 7 rows, which are not 2 for each row of a batch"),
        ({"x": zeros(4), "y": zeros(5)}, {"y": Packed(lambda x: [1, 1, 1, 1])}, "'y' sum to 4 for the 4 rows of the b"),
        (
            {"x": zeros(2), "g": zeros(3), "y": zeros(3)},
            {"g": Packed(lambda x: [1, 2]), "y": Packed(lambda x: [1, 2], of="g")},
            "the counts of 'y' are 2 numbers for the 3 rows of 'g'",
        ),
        ({"x": zeros(2), "y": zeros(2), "n": None}, {"y": Packed("n")}, "read from n, and no rank was given all of it"),
        ({"x": zeros(2).int(), "y": 3}, {"y": Packed("x")}, "'y' is named in batch_dim as packed, and holds no tensor"),
        ({"x": zeros(2), "y": zeros(2)}, {"y": Packed(1, dim=1)}, "of shape [2] has no dimension 1"),
        ({"b": zeros(2)}, {"b": {"x": 0}}, "batch_dim names what is in input 'b', which is"),
        ({"b": {"xs": zeros(2)}}, {"b": {"x": 1}}, "names 'x', which is not in input 'b'; did you mean \"xs\"?"),
        ({"x": PACKED}, 0, "an input is a PackedSequence, which cannot be made of any"),
        ({"b": {"x": [zeros(2, 2)]}}, {"b": Packed(1)}, "name the list, batch_dim={'b': {'x': fxpipe.Packed(...)}}"),
        ({"x": [zeros(2), zeros(3)]}, 0, "tensors of 2 and of 3 rows; where it is a list with an entry for each row, "),
        # lists that may have an entry for each row, of which nobody has said whether they have
        ({"x": [IMAGE] * 2}, 0, "input 'x' is a list of 2, and it is not clear where it has the batch's rows: write "),
        ({"x": [IMAGE] * 3, "y": zeros(3)}, 0, "batch_dim={'x': 0} where each of its tensors has all rows"),
        ({"x": [{"boxes": zeros(2, 4)}], "y": zeros(2)}, 0, "input 'x' is a list of 1"),
    ],
)
def test_what_does_not_go_together_is_refused(values: Any, batch_dim: Any, message: str) -> None:
    with pytest.raises(RunError) as caught:
        rows(values, batch_dim)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "batch_dim"),
    [
        ({"x": [IMAGE] * 3}, {"x": 0}),
        ({"x": [zeros(3, 5), zeros(3)]}, 0),  # a batch as a DataLoader has it
        ({"x": [zeros(3, 5, 5)] * 2, "y": zeros(3)}, 0),  # two views
        ({"x": [zeros(3, 3, 4, 4)] * 2}, 0),
    ],
)
def test_lists_of_tensors_that_have_all_rows_are_cut_as_ever(values: Any, batch_dim: Any) -> None:
    assert rows(values, batch_dim) == 3


def test_micro_batches_have_what_is_counted_for_their_rows() -> None:
    counts = {"grid": (1, 0, 2, 0), "patches": (4, 2, 3), "cu": (5, 5, 1, 1)}
    rules = PATCHES | {"pairs": Packed(2), "cu": Offsets(), "each": Packed(3, of="grid")}
    assert Batch((), True, rules, counts, 4, (1, 1, 2)).part_sizes == {
        "": (1, 1, 2),
        "grid": (1, 0, 2),
        "patches": (4, 0, 5),
        "pairs": (2, 2, 4),
        "cu": (1, 1, 2),
        "each": (3, 0, 6),
    }
    assert Batch((), True, PATCHES, {}, 1, (1,)).part_sizes == {"": (1,)}  # neither was given


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_with_how_to_pack_it(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([zeros(2), zeros(1)], layout=layout)
    with pytest.raises(RunError, match=r"is a nested tensor, .* pass its values padded, .* or packed, with batch_dim="):
        rows({"x": nested}, 0)


@pytest.mark.parametrize(
    ("value", "batch_dim", "found"),
    [
        (["a", "b", "c"], 0, ["n"]),
        ([4, 7, 1], {"x": 0}, ["n"]),
        ((224, 224, 3), 0, []),
        ({"ids": ["a", "b", "c"], "m": [1]}, 0, ["n.ids"]),
        ({"ids": ["a", "b", "c"]}, {"n": {"ids": None}}, []),
        (["a", "b", "c"], {"n": Packed(1)}, []),
    ],
)
def test_lists_that_are_given_whole_and_may_have_an_entry_for_each_row_are_found(
    value: Any, batch_dim: Any, found: list[str]
) -> None:
    assert whole_lists(describe({"x": zeros(3), "n": value}), batch_dim, 3) == found


# --- parts ---

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
BATCH = Batch.from_descriptions([describe(VALUES)], [counts_of(VALUES, RULES)], RULES, 3)


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
        return (leaf.shape, leaf.dtype) if isinstance(leaf, TensorSpec) else leaf

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
    assert (x.spec.shape, x.spec.stride) == ((10, 3), (3, 1))
    assert (columns.spec.shape, columns.spec.stride) == ((5, 6), torch.cat([values["columns"]] * 2, 1).stride())
