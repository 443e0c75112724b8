"""Imports point one way, and torch.distributed is named where processes really meet, and nowhere else."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fxpipe
from fxpipe import torch_compat

ROOT = Path(__file__).parents[1]

# A file imports only from floors above its own in this list, and from its own. As in the design, from the ground up.
FLOORS = """
    torch_compat
    errors precision progress seeds
    options
    graph schedules
    distributed formats passes trace
    parameters plan
    sharding
    run
    compiler
    __init__ command_line __main__
"""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS.split("\n")) for room in rooms.split()}
NOT_YET = {("schedules", "formats")}
"""What still imports from a floor above its own."""

PASSES_MAY_IMPORT = {"errors", "graph", "torch_compat", "passes"}
MAY_IMPORT_PASSES = {"passes", "plan", "compiler", "__init__"}
MAY_NAME_DISTRIBUTED = {"torch_compat", "distributed", "sharding"}
MAY_NAME_IT_TOO = {"parameters/dtensors.py", "parameters/weight_files.py"}
PYTHONS = set("_replace _fields _getframe _exit _SubParsersAction".split())
"""Private by their form; what Python's documentation names."""


def room_of(path: Path) -> str:
    """fxpipe/errors.py → errors; fxpipe/trace/record/tape.py → trace; passes/split.py → passes."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "passes" else parts[1]


FILES = sorted(
    path
    for folder in ("fxpipe", "passes")
    for path in (ROOT / folder).rglob("*.py")
    if "fxpipe/passes/" not in path.as_posix()  # the link to passes/
)


def module_of(path: Path) -> str:
    """fxpipe/trace/fake.py → fxpipe.trace.fake; passes/__init__.py → fxpipe.passes."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in ("fxpipe", *parts[parts[0] == "fxpipe" :]) if part != "__init__")


MODULES = {module_of(path): path for path in FILES}


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
            names = [f"{module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES or module == "torch" else module for name in names}
    return frozenset(found)


def rooms_imported(path: Path) -> set[str]:
    return {(name + ".__init__").split(".")[1] for name in imported(path) if name.split(".")[0] == "fxpipe"}


def names_distributed(path: Path) -> bool:
    """As an import that runs, or as an attribute: ``torch.distributed.barrier()``."""
    attributes = {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    return any(name.startswith("torch.distributed") for name in imported(path) - under_type_checking(path) | attributes)


def private_names(path: Path) -> set[str]:
    """The private names of torch that a file uses: modules, and attributes that are no module's table or fxpipe's."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "torch"]
    modules = {f"{n.module}.{alias.name}" for n in imports for alias in n.names}
    modules |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    modules |= {
        n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and " " not in n.value
    }
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) not in ("self", "cls")}
    allowed = PYTHONS | set(torch_compat.MODULE_TABLES) | own_names(path)
    return {name for name in modules if re.match(r"torch\.(.*\.)?_(?!_)", name)} | {
        name for name in attributes - allowed if re.match("_(?!_)", name)
    }


def own_names(path: Path) -> set[str]:
    """What a file itself gives a private name: attributes, methods, fields."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return (
        {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("self", "cls")}
        | {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
        | {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    )


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
    assert "graph" in rooms_imported(ROOT / "passes" / "split.py")
    assert names_distributed(ROOT / "fxpipe" / "distributed" / "transport.py")


def each(files: Iterable[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", list(files), ids=lambda path: path.relative_to(ROOT).as_posix())


@each(FILES)
def test_a_room_stands_on_a_floor_and_imports_nothing_from_one_above(path: Path) -> None:
    room = room_of(path)
    above = {(room, other) for other in rooms_imported(path) if FLOOR[other] > FLOOR[room]}
    assert above <= NOT_YET


@each(path for path in FILES if room_of(path) == "passes")
def test_a_pass_imports_only_what_passes_may(path: Path) -> None:
    assert rooms_imported(path) <= PASSES_MAY_IMPORT


@each(path for path in FILES if room_of(path) not in MAY_IMPORT_PASSES)
def test_only_who_wires_them_imports_the_passes(path: Path) -> None:
    assert "passes" not in rooms_imported(path)


@each(
    path
    for path in FILES
    if room_of(path) not in MAY_NAME_DISTRIBUTED and not path.as_posix().endswith(tuple(MAY_NAME_IT_TOO))
)
def test_torch_distributed_is_named_where_processes_meet_and_nowhere_else(path: Path) -> None:
    assert not names_distributed(path)


@each(path for path in FILES if room_of(path) != "torch_compat")
def test_one_file_names_what_is_private_to_torch_and_no_other(path: Path) -> None:
    assert private_names(path) == set()


def test_private_names_are_found(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "from torch._ops import OpOverload\nimport torch.utils._pytree\nx = torch._C.f(y._version, '_a b')\n"
    )
    assert private_names(file) == {"torch._ops.OpOverload", "torch.utils._pytree", "_C", "_version"}


@pytest.mark.parametrize("name", torch_compat.MODULE_TABLES)
def test_a_module_has_the_tables_that_are_used(name: str) -> None:
    assert name in vars(torch.nn.Module())


def test_no_file_imports_in_a_circle() -> None:
    """Rooms of one floor may import each other, files never in a circle."""
    after = {
        name: {
            other
            for other in imported(path) - under_type_checking(path)
            if other in MODULES and (room_of(path), room_of(MODULES[other])) not in NOT_YET
        }
        for name, path in MODULES.items()
    }
    while after:
        free = [name for name, others in after.items() if not others & set(after)]
        assert free, f"a circle among {sorted(after)}"
        after = {name: others for name, others in after.items() if name not in free}


def test_passes_cannot_be_imported_by_a_name_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=r"fxpipe\.passes"):
        __import__("passes")


# --- the package imports what needs torch when it is first used ---


def in_python(code: str) -> str:
    """What a new Python prints that runs this code in the repository."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_does_not_import_torch() -> None:
    assert in_python("import fxpipe, sys; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("room", ["schedules", "formats"])
def test_what_plans_never_imports_torch(room: str) -> None:
    modules = [module_of(path) for path in FILES if room_of(path) == room]
    modules += ["fxpipe.distributed.topology", "fxpipe.graph.boundary", "fxpipe.__main__"]
    imports = "; ".join(f"import {name}" for name in modules)
    assert in_python(f"{imports}; import sys; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("name", fxpipe.__all__)
def test_every_public_name_is_there_listed_and_kept(name: str) -> None:
    assert name in dir(fxpipe)
    value = getattr(fxpipe, name)
    assert vars(fxpipe)[name] is value
    assert getattr(fxpipe, name) is value


def test_the_first_use_of_a_name_imports_it_and_the_next_is_a_plain_look_up() -> None:
    code = """
import fxpipe
assert "stage_boundary" in vars(fxpipe)
assert "compile" in dir(fxpipe) and "compile" not in vars(fxpipe)
from fxpipe import compile
assert vars(fxpipe)["compile"] is compile and compile.__module__ == "fxpipe.compiler"
print(fxpipe.passes.__name__, fxpipe.schedules.build.__name__, fxpipe.TRACERS is fxpipe.trace.TRACERS)
"""
    assert in_python(code) == "fxpipe.passes build True"


@pytest.mark.parametrize("first", ["fxpipe.compile", "fxpipe.passes", "fxpipe.Sum", "fxpipe.init", "fxpipe.StageGraph"])
def test_any_name_may_be_the_first(first: str) -> None:
    assert in_python(f"import fxpipe; {first}; print(fxpipe.compile.__name__, fxpipe.launch.__name__)") == (
        "compile launch"
    )


def test_a_star_import_has_all_of_it() -> None:
    code = "from fxpipe import *; import fxpipe; print([n for n in fxpipe.__all__ if n not in globals()])"
    assert in_python(code) == "[]"


def test_a_submodule_may_be_imported_first() -> None:
    assert in_python("from fxpipe import compiler; import fxpipe; print(fxpipe.compile is compiler.compile)") == "True"


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """Importing fxpipe.compile would put a module in the function's place."""
    files = {path.stem for path in FILES if path.parent.name == "fxpipe"}
    functions = {name for name in fxpipe.__all__ if not isinstance(getattr(fxpipe, name), ModuleType)}
    assert files & functions == set()


@pytest.mark.parametrize(
    ("name", "told"), [("complie", 'did you mean "compile"?'), ("Shedule", 'did you mean "Schedule"?')]
)
def test_a_name_that_is_not_there_is_told_with_the_nearest(name: str, told: str) -> None:
    with pytest.raises(AttributeError, match=rf"module 'fxpipe' has no attribute '{name}'; {re.escape(told)}"):
        getattr(fxpipe, name)


def test_what_is_not_there_is_not_there() -> None:
    assert not hasattr(fxpipe, "nonsense")
    assert not hasattr(fxpipe, "__wrapped__")
    with pytest.raises(ImportError, match="nonsense"):
        from fxpipe import nonsense  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("value", [fxpipe.compile, fxpipe.stage_boundary, fxpipe.Sum, fxpipe.Action(2, fxpipe.Op.F, 0)])
def test_public_things_survive_pickling(value: object) -> None:
    again = pickle.loads(pickle.dumps(value))
    assert again == value


def test_a_schedule_and_a_timeline_survive_pickling() -> None:
    timeline = fxpipe.schedules.build("1f1b", [(0, 1)], 3).simulate()
    again = pickle.loads(pickle.dumps(timeline))
    assert again.schedule == timeline.schedule
    assert again.spans == timeline.spans
