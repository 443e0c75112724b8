"""Imports point one way, and torch.distributed is named where processes really meet, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A file imports only from rows above its own, and from its own row. Rows as in the design, top to bottom.
ROWS = """
    errors marker wire seeds
    topology action callables
    ir dependency lower
    schedule verify simulate show schedules trace pipeline
    passes
    placement loss batch ownership world
    transport strict connect reduce exchange outcome
    checkpoint plan run
    agreement
    engine
    compiler
    __init__ __main__
"""
ROW = {room: row for row, rooms in enumerate(ROWS.split("\n")) for room in rooms.split()}

PASSES_MAY_IMPORT = {"errors", "ir", "pipeline", "callables", "passes"}
MAY_IMPORT_PASSES = {"passes", "plan", "compiler"}
MAY_NAME_DISTRIBUTED = {"topology", "transport", "connect", "world", "engine"}


def room_of(path: Path) -> str:
    """fxpipe/ir.py → ir; fxpipe/trace/guard.py → trace; passes/split.py → passes."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "passes" else parts[1]


FILES = sorted(
    path
    for folder in ("fxpipe", "passes")
    for path in (ROOT / folder).rglob("*.py")
    if "fxpipe/passes/" not in path.as_posix()  # the link to passes/
)


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports, wherever it does; ``from fxpipe import passes`` imports fxpipe.passes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module in ("fxpipe", "torch") else {module}
    return frozenset(found)


def rooms_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.startswith("fxpipe.")}


def names_distributed(path: Path) -> bool:
    """As an import that runs, or as an attribute: ``torch.distributed.barrier()``."""
    attributes = {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    return any(name.startswith("torch.distributed") for name in imported(path) - under_type_checking(path) | attributes)


def under_type_checking(path: Path) -> set[str]:
    """What is imported for annotations alone, which no program runs."""
    blocks = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {n.module or "" for block in blocks for n in ast.walk(block) if isinstance(n, ast.ImportFrom)}


def test_there_is_something_to_walk() -> None:
    assert len(FILES) > 30
    assert "ir" in rooms_imported(ROOT / "passes" / "split.py")
    assert names_distributed(ROOT / "fxpipe" / "world.py")


def each(files: Iterable[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", list(files), ids=lambda path: path.relative_to(ROOT).as_posix())


@each(FILES)
def test_a_file_stands_in_a_row_of_the_table_and_imports_nothing_from_further_down(path: Path) -> None:
    annotations = {name.split(".")[1] for name in under_type_checking(path) if name.startswith("fxpipe.")}
    below = {room for room in rooms_imported(path) if ROW[room] > ROW[room_of(path)]}
    assert below - annotations == set()


@each(path for path in FILES if room_of(path) == "passes")
def test_a_pass_imports_only_what_passes_may(path: Path) -> None:
    assert rooms_imported(path) <= PASSES_MAY_IMPORT


@each(path for path in FILES if room_of(path) not in MAY_IMPORT_PASSES)
def test_only_who_wires_them_imports_the_passes(path: Path) -> None:
    assert "passes" not in rooms_imported(path)


@each(path for path in FILES if room_of(path) not in MAY_NAME_DISTRIBUTED)
def test_torch_distributed_is_named_where_processes_meet_and_nowhere_else(path: Path) -> None:
    assert not names_distributed(path)


def test_no_file_imports_in_a_circle() -> None:
    """Rooms of one row may import each other, files never in a circle."""
    files = {
        "fxpipe." + ".".join(p.relative_to(ROOT / "fxpipe").with_suffix("").parts): p
        for p in FILES
        if "fxpipe" in p.parts[len(ROOT.parts)]
    }
    files |= {f"fxpipe.passes.{p.stem}": p for p in FILES if p.parent.name == "passes"}
    after = {
        name: {other for other in imported(path) - under_type_checking(path) if other in files}
        for name, path in files.items()
    }
    while after:
        free = [name for name, others in after.items() if not others & set(after)]
        assert free, f"a circle among {sorted(after)}"
        after = {name: others for name, others in after.items() if name not in free}


def test_passes_cannot_be_imported_by_a_name_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=r"fxpipe\.passes"):
        __import__("passes")
