"""Counts: what a rank reads, and that ranks read the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fxpipe import Offsets, Packed, RunError
from fxpipe.batch.batch import Batch
from fxpipe.batch.rows import check_cut, counts_of, merge_counts

RULES: Any = {"patches": Packed(lambda lengths, twice=1: lengths * twice), "words": Packed("cu"), "cu": Offsets()}


def test_counts_are_read_from_what_this_rank_was_given() -> None:
    cu, lengths = torch.tensor([0, 3, 3, 7]), torch.tensor([2, 0, 1])
    counts = {"patches": (2, 0, 1), "words": (3, 0, 4), "cu": (3, 0, 4)}
    assert counts_of({"lengths": lengths, "cu": cu}, RULES) == counts
    assert counts_of({"lengths": None, "cu": cu}, RULES) == {"words": (3, 0, 4), "cu": (3, 0, 4)}
    assert counts_of({"cu": None, "lengths": lengths}, RULES) == {"patches": (2, 0, 1)}
    assert counts_of({"lengths": lengths, "twice": 2}, RULES)["patches"] == (4, 0, 2)  # given, and so read
    assert counts_of({"x": lengths}, 0) == {}


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        (torch.tensor([2, 0], dtype=torch.uint8), (2, 0)),
        ([2, 0], (2, 0)),
        ([], ()),
        (torch.tensor([True, False]), (1, 0)),
    ],
)
def test_counts_may_be_of_any_integer_type_a_mask_or_a_list(given: Any, counted: tuple[int, ...]) -> None:
    assert counts_of({"x": 1}, {"y": Packed(lambda x: given)}) == {"y": counted}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones(2), "the counts of 'y' are tensor([1., 1.]); they are whole numbers from 0 in one dimension"),
        ([1.5], "are [1.5]; they are whole numbers"),
        (torch.tensor(3), "are tensor(3); they are"),
        (torch.ones(2, 2).int(), "they are whole numbers from 0 in one dimension"),
        ([2, -1], "the counts of 'y' are [2, -1]; they are whole numbers from 0"),
        (None, "the counts of 'y' are None; they are"),
        (torch.ones(2, device="meta").int(), "are tensor(..., device='meta', size=(2,), dtype=torch.int32); they are"),
    ],
)
def test_what_counts_nothing_is_refused(given: Any, message: str) -> None:
    with pytest.raises(RunError) as caught:
        counts_of({"x": 1}, {"y": Packed(lambda x: given)})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.tensor([1, 3]),
            "input 'cu' is tensor([1, 3]); offsets are a 1-dimensional tensor of integers that begin",
        ),
        (torch.tensor([0, 3, 2]), "begin with 0, and none is below the one before it"),
        (torch.tensor([], dtype=torch.int), "begin with 0"),
        ([0, 3], "input 'cu' is [0, 3]; offsets are a 1-dimensional tensor of integers"),
        (torch.tensor([[0, 3]]), "tensor([[0, 3]]); they are whole numbers from 0 in one dimension"),
    ],
)
def test_offsets_begin_with_0_and_do_not_fall(given: Any, message: str) -> None:
    with pytest.raises(RunError) as caught:
        counts_of({"cu": given}, RULES)
    assert message in str(caught.value)


def test_what_fails_where_it_counts_is_told_by_its_name() -> None:
    def fails(x: Tensor) -> Tensor:
        return x[:, 7]

    with pytest.raises(RunError, match="what counts 'y' failed: IndexError: index 7 is out of bounds"):
        counts_of({"x": torch.ones(2, 3)}, {"y": Packed(fails)})


def test_counts_in_a_list_of_pythons_are_cut_themselves_or_refused() -> None:
    with pytest.raises(RunError, match=r"each micro-batch would be given all of it; .*{'n': fxpipe.Packed\(1\)}"):
        counts_of({"n": [1, 2]}, {"y": Packed("n")})
    assert counts_of({"n": [1, 2]}, {"y": Packed("n"), "n": Packed(1)}) == {"y": (1, 2)}


class Features(dict[str, Tensor]):
    """As transformers' BatchFeature: a mapping that pytree does not take apart."""


@dataclass(slots=True)
class Slotted:
    x: Any


ONES = torch.ones(3)


def closing_over(tensor: Tensor) -> Any:
    return lambda b, h, q, k: tensor[q] > 0


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (Features(x=ONES), "'b' is or holds a Features, .*{'b': None}"),
        ([Slotted(ONES)], r"'b' is or holds a Slotted, .*{'b': fxpipe.Packed\(1\)}"),
        ({"c": SimpleNamespace(inside={1: [ONES]}, scale=2.0)}, "'b.c' is or holds a SimpleNamespace, .*'b'"),
        (torch.distributions.Normal(ONES.mean(), 1.0), "'b' is or holds a Normal, .*step_microbatches"),
        (closing_over(ONES), "'b' is or holds a function, .*step_microbatches"),
        (partial(torch.add, ONES), "'b' is or holds a partial"),
        (create_block_mask(closing_over(ONES), None, None, 3, 3, device="cpu"), "'b' is or holds a BlockMask"),
        ({"c": [np.ones(2)]}, r"'b.c' is or holds a ndarray, .*torch.as_tensor"),
    ],
)
def test_tensors_in_objects_and_arrays_are_not_given_whole_to_each(value: Any, where: str) -> None:
    with pytest.raises(RunError, match=where):
        check_cut({"b": value}, 0)
    check_cut({"b": value}, {"b": None})
    check_cut({"b": value}, {"b": Packed(1)})  # an entry for each row


def of_rows(*sizes: int) -> Batch:
    return Batch((), True, 0, {}, sum(sizes), sizes)


def test_a_block_mask_is_cut_into_its_rows() -> None:
    """As one that is made for each micro-batch; one for all rows is not split."""
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]])

    def of(rows: Tensor) -> BlockMask:
        mask_mod = lambda b, h, q, k: (q >= k) & (rows[b, q] == rows[b, k])  # noqa: E731
        return create_block_mask(mask_mod, len(rows), None, 4, 4, device="cpu", BLOCK_SIZE=2)

    check_cut({"mask": (whole := of(documents))}, 0)
    for part, rows in zip(of_rows(1, 2).split([{"mask": whole}]), documents.split([1, 2]), strict=True):
        mine, wanted = part["mask"], of(rows)
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            assert torch.equal(getattr(mine, name), getattr(wanted, name)), name
        b, q, k = torch.meshgrid(torch.arange(len(rows)), torch.arange(4), torch.arange(4), indexing="ij")
        assert torch.equal(mine.mask_mod(b, 0, q, k), wanted.mask_mod(b, 0, q, k))
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="cpu")
    check_cut({"mask": causal}, 0)
    assert all(part["mask"] is causal for part in of_rows(1, 2).split([{"mask": causal}]))
    with pytest.raises(RunError, match="'mask' is a BlockMask of 3 rows, and the batch has 4"):
        of_rows(2, 2).split([{"mask": whole}])


def test_objects_without_rows_are_given_whole() -> None:
    image = torch.ones(3)
    vars(image)["mask"] = torch.ones(3)  # a tensor is cut, whatever is noted on it
    config = SimpleNamespace(sizes=[1, 2], layer=nn.Linear(2, 2), scale=Slotted(1.0))
    check_cut({"images": [image], "config": config, "scale": np.float32(2), "names": np.array(["a"])}, 0)


def test_ranks_tell_each_other_what_they_counted_and_must_count_the_same() -> None:
    assert merge_counts([{"x": (1, 2)}, {}, {"y": (3,)}, {"x": (1, 2)}]) == {"x": (1, 2), "y": (3,)}
    with pytest.raises(RunError, match=r"of 'x' differ .*: rank 1 counts \(1, 2\), rank 3 \(2, 1\); all of them"):
        merge_counts([{}, {"x": (1, 2)}, {}, {"x": (2, 1)}])
