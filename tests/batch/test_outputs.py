"""Outputs of micro-batches, put together: a list is of rows, or a container of tensors that each have all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe import RunError
from fxpipe.batch.outputs import OutputRows, without_entries

LISTS = OutputRows((2, 2), (), in_lists=True)
TENSORS = OutputRows((2, 2), (0,))
SINGLE = OutputRows((1, 1), (), in_lists=True)


def of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.rand(shape) for shape in shapes]


def put_together(parts: Sequence[Any], rows: OutputRows) -> Any:
    return without_entries(rows.join(parts, [0.5] * len(parts)))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_container_whose_tensors_have_the_rows_is_no_list_of_rows(kind: Callable[..., Any]) -> None:
    one, other = kind(of((2, 4), (2, 6))), kind(of((2, 4), (2, 6)))
    found = put_together([one, other], LISTS)
    assert isinstance(found, kind)
    assert len(found) == 2
    for place in range(2):
        assert torch.equal(found[place], torch.cat([one[place], other[place]]))


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        (of((5, 4), (2, 4)), of((1, 4), (3, 4)), LISTS),
        (of((5, 4), (2, 4)), of((3, 4), (2, 4)), LISTS),  # two boxes of the second in both
        (of((100, 4), (100, 4)), of((100, 4), (100, 4)), LISTS),
        (of((2, 4), (2, 4)), of((2, 4)), OutputRows((2, 1), (), in_lists=True)),
        (["a", "b"], ["c", "d"], LISTS),
        ([{"boxes": torch.rand(5, 4)}] * 2, [{"boxes": torch.rand(2, 4)}] * 2, TENSORS),
        ([{"boxes": torch.rand(1, 4)}], [{"boxes": torch.rand(1, 4)}], SINGLE),
    ],
)
def test_a_list_that_can_only_be_of_rows_is_of_rows(one: list[Any], other: list[Any], rows: OutputRows) -> None:
    found = put_together([one, other], rows)
    assert len(found) == sum(rows.sizes)
    assert all(mine is its for mine, its in zip(found, [*one, *other], strict=True))


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        (of((2, 4), (2, 4)), of((2, 4), (2, 4)), LISTS),
        (of((2, 4), (100, 4)), of((2, 4), (100, 4)), LISTS),
        (of((1, 8, 8)), of((1, 8, 8)), SINGLE),
        (of((), ()), of((), ()), LISTS),
        ([{"logits": torch.rand(2, 4)}] * 2, [{"logits": torch.rand(2, 4)}] * 2, LISTS),
        ([{"logits": torch.rand(2, 4)}] * 2, [{"logits": torch.rand(2, 4)}] * 2, TENSORS),
    ],
)
def test_a_list_that_could_be_either_is_refused(one: list[Any], other: list[Any], rows: OutputRows) -> None:
    with pytest.raises(RunError, match="could have an entry for each row, or all rows in each of its tensors"):
        put_together([one, other], rows)


def test_a_list_of_tensors_is_a_container_where_inputs_are_tensors() -> None:
    parts = [of((2, 4), (2, 4)), of((2, 4), (2, 4))]
    assert [tuple(one.shape) for one in put_together(parts, TENSORS)] == [(4, 4), (4, 4)]


def test_a_single_micro_batchs_output_is_as_it_came() -> None:
    part = of((2, 4), (7, 4))
    assert put_together([part], OutputRows((2,), (), in_lists=True)) == part
    tokens = {"logits": torch.rand(6, 4), "h": torch.rand(1, 2, 8)}
    assert put_together([tokens], TENSORS) == tokens


LSTM = OutputRows((3, 3), (1,))
SEQUENCES = OutputRows((2, 2), (0,), packed=[(1, (7, 9))])


@pytest.mark.parametrize(
    ("shapes", "rows", "along"),
    [
        (((2, 4), (2, 4)), TENSORS, 0),
        (((5, 3, 4), (5, 3, 4)), LSTM, 1),  # inputs are times × rows
        (((3, 5), (3, 5)), LSTM, 0),
        (((2, 4), (2, 4)), SEQUENCES, 0),
        (((1, 7, 4), (1, 9, 4)), SEQUENCES, 1),  # tokens
    ],
)
def test_rows_are_in_dimension_0_or_the_inputs(shapes: Any, rows: OutputRows, along: int) -> None:
    parts = of(*shapes)
    assert torch.equal(put_together(parts, rows), torch.cat(parts, along))


@pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        (((6, 4), (5, 4)), TENSORS),
        (((6, 4), (6, 4)), TENSORS),  # rows × tokens in one dimension: which of them comes first is not known
        (((6, 2), (6, 2)), TENSORS),
        (((1, 2, 8), (1, 2, 8)), TENSORS),  # an LSTM's h, of batches with rows first
    ],
)
def test_an_output_without_its_rows_there_is_a_list(
    shapes: Any, rows: OutputRows, capfd: pytest.CaptureFixture[str]
) -> None:
    parts, rows = of(*shapes), replace(rows, logged=set())
    for _ in range(2):
        tensors = put_together([{"images": part} for part in parts], rows)["images"]
        assert list(map(id, tensors)) == list(map(id, parts))
    assert capfd.readouterr().err.count("evaluate gives output 'images' as a list") == 1


def test_an_output_with_its_rows_in_two_dimensions_is_refused_by_its_key() -> None:
    parts = [{"scores": part} for part in of((3, 3), (3, 3))]
    with pytest.raises(RunError, match=r"output 'scores' has shapes .* dimensions 1 and 0 could both be"):
        put_together(parts, LSTM)
