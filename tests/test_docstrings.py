"""What a docstring shows is what happens: its ``>>>`` lines run, and print what stands below them."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import fxpipe

ROOT = Path(fxpipe.__file__).parents[1]


def module_name(path: Path) -> str:
    """fxpipe/schedules/__init__.py → fxpipe.schedules; passes/split.py → fxpipe.passes.split."""
    parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
    return ".".join(parts if parts[0] == "fxpipe" else ["fxpipe", *parts])


WITH_EXAMPLES = sorted(
    module_name(path)
    for folder in ("fxpipe", "passes")
    for path in (ROOT / folder).rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_print_what_they_show(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0
    assert result.failed == 0  # what differs is printed
