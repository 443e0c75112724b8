from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fxpipe.trace.user_line import only_tells

NAMES: dict[str, Any] = {
    "table": defaultdict(int),
    "check": lambda *args, **kwargs: None,
    "x": SimpleNamespace(add=lambda *args: None),
}


class Size:
    """Notes, where it is written, whether that was for a reader alone."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def __repr__(self) -> str:
        self.told.append(only_tells(sys._getframe(1)))
        return "7"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('check(True, f"no {size}")', True),
        ('check(\n    True,\n    "none, "\n    f"no {size}",\n)', True),
        ('check(True, message=f"no {size}")', True),
        ('check(True, "of %s" % size)', True),
        ('x.add(table[f"at {size}"])', False),
        ("x.add(table[str(size)])", False),
        ('x.add(table["at {}".format(size)])', False),
        ('x.add(table["at %s" % size])', False),
        ('x.add(table["".join(map(str, [size]))])', False),
        ('check(table[f"at {size}"], f"no {size}")', False),
        ('key = f"at {size}"', False),
        ('check(f"{size}") if f"{size}" == "7" else None', False),
        ('if f"{size}" == "7": check(True)', False),
        ('key = check(True, f"no {size}")', False),
    ],
)
def test_a_line_only_tells_where_nobody_takes_what_its_call_makes_of_the_text(
    line: str, wanted: bool, tmp_path: Path
) -> None:
    source = tmp_path / "users.py"
    source.write_text(line + "\n")
    exec(compile(line, str(source), "exec"), NAMES | {"size": (size := Size())})
    assert size.told
    assert set(size.told) == {wanted}


def test_a_file_that_is_no_python_any_more_tells_nothing(tmp_path: Path) -> None:
    source = tmp_path / "users.py"
    source.write_text('check(True, f"no {')
    exec(compile('check(True, f"no {size}")', str(source), "exec"), NAMES | {"size": (size := Size())})
    assert size.told == [False]
