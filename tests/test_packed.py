"""Packed and Offsets: what may be written, and what would count other rows is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fxpipe import Offsets, Packed, RunError
from fxpipe.options import Options
from fxpipe.packed import check_names, counted, read_by, read_for, written

PATCHES = Packed(lambda grid: grid.prod(1), of="grid")
GRID = Packed(lambda ids: (ids == 1).sum(1))


def test_what_is_counted_stands_behind_that_whose_rows_it_is_counted_for() -> None:
    rules = {"patches": PATCHES, "words": 1, "batch": {"grid": Offsets(), "whole": None}, "grid": GRID}
    assert list(counted(rules)) == ["batch.grid", "grid", "patches"]
    assert counted(1) == {}


def test_counts_are_read_from_the_parameters_that_a_function_has() -> None:
    assert read_by(Packed(lambda ids, start=5, mask=None: ids)) == {"ids": True, "start": False, "mask": False}
    assert read_by(Packed("lengths")) == {"lengths": True}
    assert read_by(Packed(2)) == {}
    assert read_by(Packed(functools.partial(lambda ids, start: ids, start=1))) == {"ids": True, "start": False}


def test_what_is_needed_to_cut_an_input_are_all_inputs_that_counts_on_the_way_are_read_from() -> None:
    rules = {"patches": PATCHES, "grid": GRID, "boxes": Packed("numbers"), "cu": Offsets()}
    assert read_for(["patches"], rules, ()) == {"grid", "ids"}
    assert read_for(["boxes", "cu"], rules, ()) == {"numbers"}
    assert read_for(["ids"], rules, ()) == set()
    masked = {"x": Packed(lambda ids, mask=None, start=1: ids)}
    assert read_for(["x"], masked, ["ids", "mask"]) == {"ids", "mask"}
    assert read_for(["x"], masked, ["ids"]) == {"ids"}


def test_a_rule_is_written_as_a_user_would_for_what_is_in_a_dict() -> None:
    assert written("batch.images", "0") == "batch_dim={'batch': {'images': 0}}"


def test_a_whole_number_of_numpys_is_one_of_pythons() -> None:
    assert type(Packed(np.int64(2)).counts) is int  # type: ignore[arg-type]


def test_options_are_told_alike_on_all_ranks_though_each_has_a_function_of_its_own() -> None:
    def rules() -> Any:
        return {"boxes": Packed(lambda ids: ids.sum(1), dim=1), "cu": Offsets()}

    mine, its, other = (Options(batch_dim=one) for one in (rules(), rules(), {"boxes": Packed(lambda ids: ids[0])}))
    assert mine.facts == its.facts
    assert mine.facts["batch_dim"] != other.facts["batch_dim"]
    assert "dim: 1" in mine.facts["batch_dim"].replace("'", "")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "zero": (lambda: Packed(0), "counts is 0; each row has at least 1"),
    "a flag": (lambda: Packed(True), "counts is True; it is a whole number, the name of an input, or a function"),
    "of": (lambda: Packed(1, of=2), "of is 2; it is the name of a packed input"),  # type: ignore[arg-type]
    "dim": (lambda: Packed(1, dim="0"), "dim is '0'; it is a dimension"),  # type: ignore[arg-type]
    "no names": (lambda: Packed(lambda *values: values), "whose parameters are no names of inputs"),
    "for all inputs": (lambda: Options(batch_dim=Packed(1)), "it is a dimension, or a dict"),  # type: ignore[arg-type]
    "in a dict": (lambda: Options(batch_dim={"x": {"y": "0"}}), "it is a dimension, or a dict"),
    "in a circle": (
        lambda: Options(batch_dim={"a": Packed("x", of="b"), "b": Packed("x", of="a")}),
        "in a circle: 'a' of 'b', 'b' of 'a'",
    ),
    "of what is whole": (
        lambda: Options(batch_dim={"a": Packed("x", of="b"), "b": None}),
        "'a' is counted of='b', which is not cut into rows",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_refused_with_what_to_write(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(RunError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"pixels": 0}, "batch_dim names 'pixels', which is no input; did you mean"),
        ({"x": Packed(lambda idz: idz)}, "batch_dim, in what counts 'x', names 'idz', which is no input; did you"),
    ],
)
def test_names_that_no_input_has_are_refused(rules: Any, message: str) -> None:
    with pytest.raises(RunError) as caught:
        check_names(rules, ("x", "ids", "lengths", "pixel"))
    assert message in str(caught.value)
    check_names({"x": Packed("ids", of="batch.lengths"), "ids": Packed(lambda x, start=3: x)}, ("x", "ids", "batch"))
