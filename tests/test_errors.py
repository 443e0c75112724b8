"""The error types, and the ends of their messages."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from fxpipe import errors

PAGE = Path(__file__).parents[1] / "examples" / "errors.md"


def test_every_error_is_shown_on_the_page_which_is_run() -> None:
    shown = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    kinds = {kind.__name__ for kind in errors.FxpipeError.__subclasses__() if kind.__module__ == errors.__name__}
    assert kinds <= set(re.findall(r"^(\w+): ", shown, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("1f1", ["gpipe", "1f1b"], '; did you mean "1f1b"?'),
        ("zigzag", ["gpipe", "1f1b"], '; known: "gpipe", "1f1b"'),
        ("zigzag", [], ""),
    ],
)
def test_nearest_names_the_likeliest_or_else_the_first(name: str, known: list[str], end: str) -> None:
    assert errors.nearest(name, known) == end


def test_of_many_names_the_first_are_listed_and_the_rest_counted() -> None:
    told = errors.nearest("zigzag", (f"layer.{number}" for number in range(100_000)))
    assert told.startswith('; known: "layer.0", "layer.1", ')
    assert told.endswith(" more")
    assert len(told) < 1000
    assert errors.nearest("z" * 10**6, ["gpipe"]) == '; known: "gpipe"'


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    cls = errors.ScheduleError
    told = str(cls("begin " + "x" * 10**6 + " end"))
    assert len(told) < errors.MOST_TOLD + 1
    assert told.startswith("begin xxx")
    assert told.endswith("xxx end")
    assert "980,070 characters left out" in told
    assert str(cls("as it is")) == "as it is"
    assert str(pickle.loads(pickle.dumps(cls(told)))) == str(cls(told))


def test_what_is_told_of_any_error_is_bounded_with_its_notes() -> None:
    error = ValueError("x" * 10**6)
    error.add_note("y" * 10**6)
    assert len(errors.describe_error(error)) < errors.MOST_TOLD + 1
