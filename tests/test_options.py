"""Options: every option stands in one place, and in the signatures that an editor shows."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import fxpipe
from fxpipe.options import Options

FIELDS = {field.name: field.default for field in dataclasses.fields(Options)}


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword parameters of a function, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def test_compile_takes_the_options_with_their_defaults_and_in_their_order() -> None:
    assert list(options_of(fxpipe.compile).items()) == list(FIELDS.items())


def test_preview_takes_some_of_them() -> None:
    assert options_of(fxpipe.preview).items() <= FIELDS.items()


def test_each_option_is_told_of_by_the_docstring_of_compile() -> None:
    told = inspect.getdoc(fxpipe.compile) or ""
    assert [name for name in FIELDS if name not in told] == []


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().zero = 2  # type: ignore[misc]


def test_what_compile_alone_needs_is_not_held_beyond_it() -> None:
    options = Options.of({"model": None, "zero": 1, "example_args": [1], "init_fn": print, "checkpoint": "here"})
    assert options.has_example
    after = options.for_calls()
    assert (after.has_example, after.init_fn, after.checkpoint, after.zero) == (False, None, None, 1)


@pytest.mark.parametrize(("asked", "ranks", "count"), [(None, 1, 1), (None, 4, 16), (3, 4, 3)])
def test_a_batch_is_cut_into_as_many_as_asked_for_or_four_a_rank(asked: int | None, ranks: int, count: int) -> None:
    assert Options(microbatches=asked).microbatches_on(ranks) == count
