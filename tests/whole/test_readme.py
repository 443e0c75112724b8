"""README and the pages say what happens: their code runs as it stands, and prints what they show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*.md"))]
README = PAGES[0].read_text()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def run(arguments: list[str], folder: Path) -> str:
    """What Python prints."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@every_page
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    printed = run(["page.py"], tmp_path)
    for shown in blocks(page, "text"):
        assert shown in printed


def test_the_first_thing_that_the_readme_prints_is_its_table(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(blocks(PAGES[0], "python")[0])
    assert run(["first.py"], tmp_path).startswith(blocks(PAGES[0], "text")[0])


@every_page
def test_a_command_of_a_page_prints_what_stands_below_it(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "console"):
        for command, shown in re.findall(r"^\$ python (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE):
            arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command)]
            assert run(arguments, tmp_path).startswith(shown), command


def test_the_picture_is_what_the_command_line_draws(tmp_path: Path) -> None:
    run(shlex.split("-m fxpipe show 1f1b --edges 0-1,1-4,2-3,3-4 -m 8 --svg drawn.svg"), tmp_path)
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / "examples" / "worked_example.svg").read_text()


@every_page
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    missing = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert missing == []


def test_the_readme_names_every_room() -> None:
    tour = README[README.index("## The rooms") :]
    rooms = {f"fxpipe/{path.parent.name}/" for path in (ROOT / "fxpipe").glob("*/__init__.py")} - {"fxpipe/passes/"}
    assert set(re.findall(r"^\| `([\w/]+/)`", tour, re.MULTILINE)) == rooms | {"passes/"}
