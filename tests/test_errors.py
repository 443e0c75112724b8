"""The error types, and the ends of their messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxpipe import errors

PAGE = Path(__file__).parents[1] / "examples" / "errors.md"


@pytest.mark.parametrize(
    "name",
    ["TraceError", "PartitionError", "ScheduleError", "TopologyError", "RunError", "CheckpointError"],
)
def test_every_error_is_an_fxpipe_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.FxpipeError)


def test_every_error_is_shown_on_the_page_which_is_run() -> None:
    shown = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    kinds = {kind.__name__ for kind in errors.FxpipeError.__subclasses__() if kind.__module__ == errors.__name__}
    assert kinds <= set(re.findall(r"^(\w+): ", shown, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("1f1", ["gpipe", "1f1b"], '; did you mean "1f1b"?'),
        ("GPipe", ["gpipe", "1f1b"], '; did you mean "gpipe"?'),
        ("zigzag", ["gpipe", "1f1b"], '; known: "gpipe", "1f1b"'),
        ("zigzag", ("b", "a", "b"), '; known: "b", "a"'),
        ("zigzag", [], ""),
        (3, ["a", 1], '; known: "a", "1"'),
    ],
)
def test_nearest_names_the_likeliest_or_else_all(name: str, known: list[str], end: str) -> None:
    assert errors.nearest(name, known) == end
