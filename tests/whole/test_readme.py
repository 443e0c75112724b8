"""README and the pages say what happens: their code runs as it stands, and prints what they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.scripts import Scripts

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*.md"))]
README = PAGES[0].read_text()
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
complete = [
    page for page in PAGES if not page.with_suffix(".py").exists()
]  # others show pieces of a script, test_loops


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def test_a_page_that_fails_is_told(tmp_path: Path, scripts: Scripts) -> None:
    (tmp_path / "page.py").write_text("print(1 / 0)")
    with pytest.raises(AssertionError, match=r'exit status 1\n(.|\n)*page.py", line 1(.|\n)*ZeroDivisionError'):
        scripts.run(["page.py"], tmp_path)


@pytest.mark.parametrize("page", complete, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, scripts: Scripts) -> None:
    (tmp_path / "page.py").write_text("\n".join(blocks(page, "python")))
    printed = scripts.run(["page.py"], tmp_path)
    for shown in blocks(page, "text"):
        assert shown in printed
    if page.name == "README.md":
        assert printed.startswith(blocks(page, "text")[0])


@every_page
def test_a_command_of_a_page_prints_what_stands_below_it(page: Path, tmp_path: Path, scripts: Scripts) -> None:
    for block in blocks(page, "console"):
        for command, shown in re.findall(r"^\$ python (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE):
            arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command)]
            assert scripts.run(arguments, tmp_path).startswith(shown), command


def test_the_picture_is_what_the_command_line_draws(tmp_path: Path, scripts: Scripts) -> None:
    scripts.run(shlex.split("-m fxpipe show 1f1b --edges 0-1,1-4,2-3,3-4 -m 8 --svg drawn.svg"), tmp_path)
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / "examples" / "worked_example.svg").read_text()


def anchors(page: Path) -> set[str]:
    """What a link may name of a page: its headings, as they are written there."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@every_page
def test_what_a_page_links_to_is_there(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith("http")]
    missing = []
    for link in links:
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            missing.append(link)
    assert missing == []


def test_the_readme_fits_three_screens_and_links_every_page() -> None:
    assert README.count("\n") <= 130
    linked = set(re.findall(r"\]\(examples/([\w.]+)", README))
    assert linked == {page.name for page in PAGES if page.parent.name == "examples"}


def test_contributing_names_every_package() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    tour = contributing[contributing.index("## The packages") :]
    packages = {f"fxpipe/{path.parent.name}/" for path in (ROOT / "fxpipe").glob("*/__init__.py")} - {"fxpipe/passes/"}
    assert set(re.findall(r"^\| `([\w/]+/)`", tour, re.MULTILINE)) == packages | {"passes/"}
