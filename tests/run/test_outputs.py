"""Outputs of micro-batches, put together: a list is of rows, or a container of tensors that each have all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe import RunError
from fxpipe.run.step.outputs import Joining, OutputRows, RowsOf, without_entries

LISTS = RowsOf((2, 2), (), in_lists=True)
TENSORS = RowsOf((2, 2), (0,))
SINGLE = RowsOf((1, 1), (), in_lists=True)


def of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.rand(shape) for shape in shapes]


def put_together(parts: Sequence[Any], rows: RowsOf, places: OutputRows | None = None) -> Any:
    return without_entries(Joining([0.5] * len(parts), rows, places or OutputRows()).join(parts))


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
        (of((2, 4), (2, 4)), of((2, 4)), RowsOf((2, 1), (), in_lists=True)),
        (["a", "b"], ["c", "d"], LISTS),
        ([{"boxes": torch.rand(5, 4)}] * 2, [{"boxes": torch.rand(2, 4)}] * 2, TENSORS),
        ([{"boxes": torch.rand(1, 4)}], [{"boxes": torch.rand(1, 4)}], SINGLE),
    ],
)
def test_a_list_that_can_only_be_of_rows_is_of_rows(one: list[Any], other: list[Any], rows: RowsOf) -> None:
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
def test_a_list_that_could_be_either_is_refused(one: list[Any], other: list[Any], rows: RowsOf) -> None:
    with pytest.raises(RunError, match="could have an entry for each row, or all rows in each of its tensors"):
        put_together([one, other], rows)


def test_what_an_earlier_batch_has_shown_is_known() -> None:
    places = OutputRows()
    put_together([of((3, 4), (3, 4)), of((3, 4), (3, 4))], RowsOf((3, 3), (), in_lists=True), places)
    parts = [of((2, 4), (2, 4)), of((2, 4), (2, 4))]
    found = put_together(parts, LISTS, places)
    assert torch.equal(found[1], torch.cat([parts[0][1], parts[1][1]]))


def test_a_list_of_tensors_is_a_container_where_inputs_are_tensors() -> None:
    parts = [of((2, 4), (2, 4)), of((2, 4), (2, 4))]
    assert [tuple(one.shape) for one in put_together(parts, TENSORS)] == [(4, 4), (4, 4)]


def test_a_single_micro_batchs_list_is_as_it_came() -> None:
    part = of((2, 4), (7, 4))
    assert put_together([part], RowsOf((2,), (), in_lists=True)) == part


@pytest.mark.parametrize(("shapes", "sizes"), [(((6, 4), (6, 4)), (2, 2)), (((6, 5), (3, 5)), (2, 1))])
def test_as_many_for_each_row_everywhere_go_below_each_other(shapes: Any, sizes: tuple[int, int]) -> None:
    parts = of(*shapes)
    assert torch.equal(put_together(parts, RowsOf(sizes, (0,))), torch.cat(parts))


@pytest.mark.parametrize("shapes", [((6, 4), (5, 4)), ((6, 4), (4, 4))])
def test_what_is_not_as_many_for_each_row_is_a_list_from_then_on(
    shapes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    parts, places, even = of(*shapes), OutputRows(), of((6, 4), (6, 4))
    for outputs in (parts, even, parts):
        found = put_together([{"images": one} for one in outputs], TENSORS, places)["images"]
        assert [id(one) for one in found] == list(map(id, outputs))
    assert capfd.readouterr().err.count("evaluate gives output 'images' as a list") == 1


def test_what_has_the_rows_elsewhere_is_refused_by_its_key() -> None:
    parts = [{"logits": one} for one in of((6, 2), (6, 2))]
    with pytest.raises(RunError, match=r"output 'logits' of shapes .* as many in dimension 1 as there are rows"):
        put_together(parts, TENSORS)
