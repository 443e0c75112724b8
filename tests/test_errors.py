"""The error types, and the ends of their messages."""

from __future__ import annotations

import pytest

from fxpipe import errors


@pytest.mark.parametrize(
    "name",
    ["TraceError", "PartitionError", "ScheduleError", "TopologyError", "RunError", "CheckpointError"],
)
def test_every_error_is_an_fxpipe_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.FxpipeError)


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("1f1", ["gpipe", "1f1b"], '; did you mean "1f1b"?'),
        ("GPipe", ["gpipe", "1f1b"], '; did you mean "gpipe"?'),
        ("zigzag", ["gpipe", "1f1b"], '; known: "gpipe", "1f1b"'),
        ("zigzag", ("b", "a", "b"), '; known: "b", "a"'),
        ("zigzag", [], ""),
    ],
)
def test_nearest_names_the_likeliest_or_else_all(name: str, known: list[str], end: str) -> None:
    assert errors.nearest(name, known) == end
