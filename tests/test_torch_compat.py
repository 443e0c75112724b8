"""A torch that is newer than fxpipe: one line where nothing is gone, and otherwise an error that names what is."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from fxpipe import compiler, torch_compat
from tests.test_imports import FILES, ROOT

NOT_LOOKED_UP = {
    "of the state that FSDP2 keeps for a module": "_fsdp_param_groups _lazy_init "
    "_root_post_backward_final_callback _state_ctx",
    "public, with the form of a private name": "_check",
}


def imported_anew(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as a program gets it that imports it now, beside the other."""
    name = f"{module.__name__}_anew"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    another = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, another)
    spec.loader.exec_module(another)
    return another


def test_this_torch_has_all_names() -> None:
    assert torch_compat.lacking(torch_compat.PRIVATE) == []


def test_every_private_name_is_looked_up() -> None:
    listed = set(re.split(r"[ .]", " ".join([*torch_compat.PRIVATE, *torch_compat.PRIVATE.values()])))
    listed |= {f"{module}.{name}" for module, names in torch_compat.PRIVATE.items() for name in names.split()}
    left_out = {name for names in NOT_LOOKED_UP.values() for name in names.split()}
    used = set().union(*(file.private_names for file in FILES if file.package == "torch_compat"))
    prefixes = {name for name in used if any(module.startswith(name) for module in torch_compat.PRIVATE)}
    assert used - listed - prefixes == left_out


GONE = "torch._C._set_mkldnn_enabled", "torch.amp.autocast_mode._exit_autocast"


@pytest.mark.parametrize(
    ("version", "gone"),
    [("2.13.0+cpu", GONE), ("2.99.0.dev20280101", (*GONE, "torch._dynamo.source.LocalSource"))],
)
def test_all_names_that_are_gone_are_named(version: str, gone: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In an untested torch also those that are imported at their first use."""
    monkeypatch.setattr(torch, "__version__", version)
    for name in gone:
        monkeypatch.delattr(name)
    with pytest.raises(ImportError) as caught:
        imported_anew(torch_compat, monkeypatch)
    assert str(caught.value) == (
        f"torch {version} no longer has {', '.join(gone)}, which fxpipe uses; "
        "install torch 2.13 to 2.15, or a newer fxpipe"
    )


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_an_untested_torch_is_told_by_rank_0(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(torch_compat, "IS_TESTED", imported_anew(torch_compat, monkeypatch).IS_TESTED)
    imported_anew(compiler, monkeypatch)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    if lines:
        assert told[0].startswith("fxpipe: torch 2.99.0 is not among the tested versions, 2.13 to 2.15")


def test_a_tested_torch_is_not_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    imported_anew(compiler, monkeypatch)
    assert capsys.readouterr().err == ""


def test_the_tested_versions_are_those_that_the_script_runs() -> None:
    script = (ROOT / ".ci" / "versions").read_text()
    assert f"set -- {' '.join(torch_compat.TESTED)}\n" in script
