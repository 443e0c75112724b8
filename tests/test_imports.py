"""Imports point one way, and torch.distributed is named where processes really meet, and nowhere else."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fxpipe
from fxpipe.torch_compat.modules import MODULE_TABLES
from tests.scripts import Scripts

ROOT = Path(__file__).parents[1]

GROUND = set(
    "dealing device errors hardware labels no_gc notebook packed patches plain_data policies precision "
    "progress seeds small_file snapshots specs tensors torch_compat user_line validation".split()
)
"""What every package may import; nothing in it imports another package."""
PACKAGES = (
    "stage graph schedules passes distributed batch checkpoint trace parameters options search numerics capture "
    "sharding plan forecast run compiler choosing __init__ loops doctor __main__".split()
)
"""Each imports the ground and packages before it."""

PASSES_MAY_IMPORT = {"errors", "graph", "plain_data", "stage", "torch_compat", "passes"}
MAY_IMPORT_PASSES = {"passes", "search", "capture", "plan", "compiler", "__init__"}
MAY_PICKLE = {
    "fxpipe/distributed/processes.py": "over pipes between a process and its own children",
    "fxpipe/checkpoint/files/reader.py": "torch's .metadata, of which no class is looked up",
}
"""And nobody else: what SECURITY.md says of files and of other ranks."""
MAY_NAME_DISTRIBUTED = {"torch_compat", "distributed", "sharding", "checkpoint", "tensors"}
MAY_NAME_CUDA = {
    "fxpipe/device.py": "it owns the device",
    "fxpipe/run/forward_backward.py": "a method of modules, which it has not",
    "passes/effects.py": "methods and attributes of tensors",
}
"""And nobody else: torch.accelerator, torch.Stream and torch.Event serve every accelerator."""
PYTHONS = set("_replace _fields _getframe _current_frames _exit _SubParsersAction _Unpickler".split())
"""Private by their form; what Python's documentation names, and pickle's class in Python (PEP 399)."""


class File:
    """A file of the source, parsed once, when a test first asks: every process of the suite imports this module."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        parts = Path(self.path).with_suffix("").parts
        self.package = parts[0] if parts[0] == "passes" else parts[-1] if len(parts) < 2 else parts[1]
        """fxpipe/errors.py → errors; fxpipe/trace/record/tape.py → trace; passes/split.py → passes."""
        self.module = ".".join(part for part in ("fxpipe", *parts[parts[0] == "fxpipe" :]) if part != "__init__")
        """fxpipe/trace/fake.py → fxpipe.trace.fake; passes/__init__.py → fxpipe.passes."""
        self._text = path.read_text()

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self._text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self._tree))

    @cached_property
    def _for_annotations(self) -> set[ast.AST]:
        blocks = [n for n in self._tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        return {inner for block in blocks for inner in ast.walk(block)}

    @cached_property
    def imported(self) -> set[str]:
        """The modules that it imports, wherever it does."""
        return modules_in(self.nodes)

    @cached_property
    def for_annotations(self) -> set[str]:
        """What it imports for annotations alone, which no program runs."""
        return modules_in(self._for_annotations)

    @cached_property
    def built_on(self) -> set[str]:
        """Modules of fxpipe that it imports, also in functions and for annotations."""
        return self.imported & set(BY_MODULE)

    @cached_property
    def packages_imported(self) -> set[str]:
        return {BY_MODULE[name].package for name in self.built_on}

    @cached_property
    def names_distributed(self) -> bool:
        """As an import that runs, or as an attribute: ``torch.distributed.barrier()``."""
        return any(name.startswith("torch.distributed") for name in self.imported - self.for_annotations) or any(
            n.attr == "distributed" and isinstance(n.value, ast.Name) and n.value.id == "torch"
            for n in self.nodes
            if isinstance(n, ast.Attribute)
        )

    @cached_property
    def names_of_cuda(self) -> set[str]:
        """Its attributes and texts that name CUDA or NCCL; not its docstrings."""
        docs = {id(n.value) for n in self.nodes if isinstance(n, ast.Expr)}
        texts = {n.value for n in self.nodes if isinstance(n, ast.Constant) and id(n) not in docs}
        names = {n.attr for n in self.nodes if isinstance(n, ast.Attribute)}
        return {name for name in names | self.imported | texts if re.search("cuda|nccl", str(name), re.IGNORECASE)}

    @cached_property
    def private_names(self) -> set[str]:
        """The private names of torch that it uses: modules, and attributes that are no module's table or fxpipe's."""
        froms = [n for n in self.nodes if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "torch"]
        modules = {f"{n.module}.{alias.name}" for n in froms for alias in n.names}
        modules |= {alias.name for n in self.nodes if isinstance(n, ast.Import) for alias in n.names}
        texts = {n.value for n in self.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        modules |= {text for text in texts if " " not in text}
        attributes = [n for n in self.nodes if isinstance(n, ast.Attribute)]
        own = {n.attr for n in attributes if is_own(n)}
        own |= {n.name for n in self.nodes if isinstance(n, ast.FunctionDef)}
        own |= {n.target.id for n in self.nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        used = {n.attr for n in attributes if not is_own(n)} - own - PYTHONS - set(MODULE_TABLES)
        return {name for name in modules if re.match(r"torch\.(.*\.)?_(?!_)", name)} | {
            name for name in used if re.match("_(?!_)", name)
        }

    @cached_property
    def classes(self) -> set[str]:
        """Their names, without the underscore of the private ones."""
        return {n.name.lstrip("_") for n in self.nodes if isinstance(n, ast.ClassDef)}


def modules_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules that these import; ``from fxpipe import passes`` imports fxpipe.passes."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            found |= {name if name in BY_MODULE or module == "torch" else module for name in names}
    return found


def is_own(attribute: ast.Attribute) -> bool:
    """Whether it is an attribute of self or cls."""
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


FILES = [
    File(path)
    for folder in ("fxpipe", "passes")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "fxpipe/passes/" not in path.as_posix()  # the link to passes/
]
BY_MODULE = {file.module: file for file in FILES}
BY_PATH = {file.path: file for file in FILES}


def test_there_is_something_to_walk() -> None:
    assert len(FILES) > 30
    assert "graph" in BY_PATH["passes/split.py"].packages_imported
    assert any(file.names_distributed for file in FILES if file.package == "distributed")


def test_a_package_imports_the_ground_and_packages_before_it() -> None:
    order = {**dict.fromkeys(GROUND, 0), **{name: number for number, name in enumerate(PACKAGES, start=1)}}
    built_on = ((file, name) for file in FILES for name in file.built_on)
    assert {(f.path, name) for f, name in built_on if order[BY_MODULE[name].package] > order[f.package]} == set()


@pytest.mark.parametrize("of", ["module", "package"])
def test_no_imports_form_a_circle(of: str) -> None:
    """Neither of files nor of packages, the ground's among them, be it for annotations alone."""
    after: dict[str, set[str]] = {}
    for file in FILES:
        own = getattr(file, of)
        after.setdefault(own, set()).update({getattr(BY_MODULE[name], of) for name in file.built_on} - {own})
    while after:
        free = [name for name, others in after.items() if not others & set(after)]
        assert free, f"a circle among {sorted(after)}"
        after = {name: others for name, others in after.items() if name not in free}


def test_a_pass_imports_only_what_passes_may() -> None:
    others = {file.path: file.packages_imported - PASSES_MAY_IMPORT for file in FILES if file.package == "passes"}
    assert not any(others.values()), others


def test_only_who_wires_them_imports_the_passes() -> None:
    importing = [file for file in FILES if "passes" in file.packages_imported]
    assert {file.path for file in importing if file.package not in MAY_IMPORT_PASSES} == set()


def test_torch_distributed_is_named_where_processes_meet_and_nowhere_else() -> None:
    assert {file.package for file in FILES if file.names_distributed} == MAY_NAME_DISTRIBUTED


def test_one_package_names_what_is_private_to_torch_and_no_other() -> None:
    private = {file.path: file.private_names for file in FILES if file.private_names and file.package != "torch_compat"}
    assert private == {}


def test_nobody_unpickles_what_comes_from_files_or_other_ranks() -> None:
    picklers = {"pickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "copyreg"}
    assert {file.path for file in FILES if file.imported & picklers} == set(MAY_PICKLE)
    calls = [(file.path, n) for file in FILES for n in file.nodes if isinstance(n, ast.Call)]
    named = [(path, n, ast.unparse(n.func)) for path, n in calls]
    assert [path for path, _, name in named if re.search(r"_object(_list)?$", name) and "dist" in name] == []
    loads = [(path, n) for path, n, name in named if name == "torch.load"]
    assert loads
    for path, call in loads:
        assert "weights_only=True" in ast.unparse(call), path


def test_private_names_are_found(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "from torch._ops import OpOverload\nimport torch.utils._pytree\nx = torch._C.f(y._version, '_a b')\n"
    )
    assert File(path).private_names == {"torch._ops.OpOverload", "torch.utils._pytree", "_C", "_version"}


def test_one_file_names_an_accelerator() -> None:
    named = {file.path: file.names_of_cuda for file in FILES if file.names_of_cuda}
    assert named.keys() == MAY_NAME_CUDA.keys(), named


@pytest.mark.parametrize("name", MODULE_TABLES)
def test_a_module_has_the_tables_that_are_used(name: str) -> None:
    assert name in vars(torch.nn.Module())


def test_a_class_has_a_name_of_its_own() -> None:
    """Whoever looks for a name finds one class, public or private."""
    files: dict[str, list[str]] = {}
    for file in FILES:
        for name in file.classes:
            files.setdefault(name, []).append(file.path)
    shared = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert shared == {}


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


def test_what_plans_never_imports_torch() -> None:
    modules = [file.module for file in FILES if file.package == "schedules"]
    modules += ["fxpipe.distributed.topology", "fxpipe.graph.boundary", "fxpipe.__main__"]
    imports = "; ".join(f"import {name}" for name in modules)
    assert in_python(f"{imports}; import sys; print('torch' in sys.modules)") == "False"


def test_every_public_name_is_there_listed_and_kept() -> None:
    for name in fxpipe.__all__:
        assert name in dir(fxpipe)
        value = getattr(fxpipe, name)
        assert vars(fxpipe)[name] is value


FIRST_USES = """
import sys

def new():
    for name in [name for name in sys.modules if name.split(".")[0] == "fxpipe"]:
        del sys.modules[name]
    import fxpipe
    return fxpipe

fxpipe = new()
assert "stage_boundary" in vars(fxpipe)
assert "compile" in dir(fxpipe) and "compile" not in vars(fxpipe)
from fxpipe import compile
assert vars(fxpipe)["compile"] is compile and compile.__module__ == "fxpipe.compiler"
assert (fxpipe.passes.__name__, fxpipe.schedules.build.__name__) == ("fxpipe.passes", "build")
assert fxpipe.TRACERS is fxpipe.trace.TRACERS

for first in ("passes", "Sum", "init"):  # a package, a class, a function; each is an import of everything
    fxpipe = new()
    getattr(fxpipe, first)
    assert (fxpipe.compile.__name__, fxpipe.launch.__name__) == ("compile", "launch"), first

new()
from fxpipe import *
import fxpipe
assert [name for name in fxpipe.__all__ if name not in globals()] == []

new()
from fxpipe import compiler
import fxpipe
assert fxpipe.compile is compiler.compile
print("all of it")
"""


def test_any_name_may_be_the_first_and_is_then_a_plain_look_up(tmp_path: Path, scripts: Scripts) -> None:
    """So may ``import *`` and a submodule. Each time fxpipe is imported anew, torch has been."""
    (tmp_path / "first_uses.py").write_text(FIRST_USES)
    assert scripts.run(["first_uses.py"], tmp_path).strip() == "all of it"


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """Importing fxpipe.compile would put a module in the function's place."""
    files = {file.package for file in FILES if file.module == f"fxpipe.{file.package}"}
    functions = {name for name in fxpipe.__all__ if not isinstance(getattr(fxpipe, name), ModuleType)}
    assert files & functions == set()


def test_a_name_that_is_not_there_is_told_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"module 'fxpipe' has no attribute 'complie'; did you mean \"compile\"\?"):
        fxpipe.complie  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="nonsense"):
        from fxpipe import nonsense  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("value", [fxpipe.compile, fxpipe.Sum, fxpipe.schedules.build("1f1b", [(0, 1)], 3)])
def test_public_things_survive_pickling(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_the_short_form_for_other_torches_names_tests_that_are_there() -> None:
    text = (ROOT / ".ci" / "versions").read_text()
    for name, path in re.findall(r"^(\w+)='(tests/.*)'$", text, re.MULTILINE):
        text = text.replace(f"${{{name}}}", path)
    named = re.findall(r"^ +\"?(tests/[\w/]+\.py)(?:::(\w+))?\"?$", text, re.MULTILINE)
    assert len(named) > 40
    assert [one for one in named if f"def {one[1]}(" not in (ROOT / one[0]).read_text() and one[1]] == []
