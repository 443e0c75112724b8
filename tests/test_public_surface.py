"""What users can name: every public name, method, parameter and default, as ``public_surface.txt`` lists them.

A line that goes or changes breaks somebody's script. To add one: ``python -m tests.test_public_surface``, and read what
``git diff`` shows.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fxpipe

LIST = Path(__file__).with_name("public_surface.txt")


def surface() -> Iterator[str]:
    for name in fxpipe.__all__:
        value = getattr(fxpipe, name)
        if inspect.ismodule(value):
            inside = {f"{name}.{inner}": getattr(value, inner) for inner in value.__all__}
        else:
            inside = {name: value}
        for path, public in inside.items():
            yield line(path, public)
            if inspect.isclass(public) and (path == name or public.__name__ not in fxpipe.__all__):
                yield from (line(f"{path}.{inner}", member) for inner, member in members(public).items())


def members(owner: type) -> dict[str, Any]:
    """What a class of fxpipe has and inherits from others of fxpipe, without what is private."""
    ours = [base for base in reversed(owner.__mro__) if base.__module__.split(".")[0] == "fxpipe"]
    return {name: value for base in ours for name, value in vars(base).items() if name[0] != "_"}


def line(name: str, value: Any) -> str:
    """``build(family, edges, microbatches, placement=None)``: a function with its parameters, anything else bare."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if not inspect.isfunction(function) and not is_record(function):
        return name
    parameters = inspect.signature(function).parameters.values()
    return f"{name}{inspect.Signature([one.replace(annotation=one.empty) for one in parameters])}"


def is_record(value: Any) -> bool:
    """Whether a user makes one by calling the class with its fields."""
    return inspect.isclass(value) and (dataclasses.is_dataclass(value) or issubclass(value, tuple))


def test_every_public_name_is_where_it_was_with_the_parameters_it_had() -> None:
    assert sorted(surface()) == LIST.read_text().splitlines()


def names_on_the_page() -> list[str]:
    """Those of the rows of examples/api.md: of classes, of modules, and of ``fxpipe`` itself."""
    page = (LIST.parents[1] / "examples" / "api.md").read_text()
    names = []
    for head, *cells in re.findall(r"^\| (.+?) \| (.*?) ?\| (.*?) ?\|$", page, re.MULTILINE):
        owner = head.strip("`").removeprefix("fxpipe.") if head[0] == "`" else ""
        members = re.findall(r"`(\w+)`", " ".join(cells))
        names += [owner] * (bool(owner) and not inspect.ismodule(getattr(fxpipe, owner, None)))
        names += [f"{owner}.{member}" if owner else member for member in members]
    return names


def test_the_page_says_of_each_public_name_once_whether_it_is_stable() -> None:
    public = [re.sub(r"\(.*", "", entry) for entry in LIST.read_text().splitlines()]
    assert sorted(names_on_the_page()) == sorted(public)


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fxpipe.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", fxpipe.__version__)
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(fxpipe.__version__)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE)


if __name__ == "__main__":
    LIST.write_text("".join(f"{one}\n" for one in sorted(surface())))
