"""The page names all that is replaced while a model is traced, and all of it is put back when a capture fails."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import patches
from fxpipe.graph import boundary
from fxpipe.specs import TensorSpec
from fxpipe.torch_compat.autograd import CHECKPOINT_GENERATOR
from fxpipe.trace import TRACERS, Request
from fxpipe.trace.opaque.observed import declared
from fxpipe.trace.opaque.regions import Region
from fxpipe.trace.record.recorder import Recorder

PAGE = Path(__file__).parents[2] / "examples" / "tracing_replaces.md"
tracers = pytest.mark.parametrize("tracer", [name for name in TRACERS if name != "auto"])
Replaced = dict[tuple[int, str], tuple[Any, str, Any]]
MISSING = object()


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Model(nn.Module):
    """Cut by name, with an opaque part; with ``fails``, forward raises as soon as a tracer runs it."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.first, self.part, self.second, self.fails = nn.Linear(8, 8), Part(), nn.Linear(8, 8), fails

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.part(self.first(x)))
        if self.fails and type(x) is not Tensor:
            raise KeyError("mine")
        return x.mean()


def captured(model: Model, tracer: str) -> fxpipe.graph.program.Program:
    """A capture that needs all that a tracer may replace: sizes that vary, numbers that forward may ask for, a region
    that sets an attribute."""
    region = Region("part", "part", returns=torch.empty(4, 8))
    example = {"x": TensorSpec.from_tensor(torch.empty(4, 8))}
    request = Request(model, ("x",), example=example, cuts={"second": "before"}, whole=(region,), asks_numbers=True)
    seen = {key: replace(call, sets=frozenset({("part", "calls")})) for key, call in declared(request).items()}
    return TRACERS[tracer](replace(request, seen=seen, varying=frozenset({("x", 0, 0)})))


def own(owner: Any, name: str) -> Any:
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, MISSING)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Replaced:
    """(id of an owner, name) → the owner, the name and the original of each thing that is replaced from now on."""
    seen, put = Replaced(), patches.put

    def spy(owner: Any, name: str, value: Any) -> None:
        # fxpipe's own state: is a recorder paused, in which submodule; what records boundaries
        if not isinstance(owner, (Recorder, type(boundary._here))):
            seen.setdefault((id(owner), name), (owner, name, own(owner, name)))
        put(owner, name, value)

    monkeypatch.setattr(patches, "put", spy)
    return seen


def called(owner: Any, name: str) -> str:
    """The words by which the page calls a replaced thing."""
    if isinstance(owner, dict):
        return "len" if name == "len" else "parameters and buffers"
    if isinstance(owner, type) and issubclass(owner, nn.Module) and owner is not nn.Module:
        return f"a class of the model: {name}"
    if name == CHECKPOINT_GENERATOR:
        return "the generator of checkpoint"
    owner = type(owner) if isinstance(owner, logging.Logger) else owner
    return ".".join(f"{owner.__name__}.{name}".split(".")[-2:])


def on_the_page(tracer: str) -> set[str]:
    """The last two parts of each name in a row of a table for this tracer."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", PAGE.read_text(), re.MULTILINE)]
    cells = [what for what, *which in rows if which and (tracer in which[0] or which[0] == "all")]
    return {".".join(name.split(".")[-2:]) for cell in cells for name in cell.replace("`", "").split(", ")}


@tracers
def test_the_page_names_all_that_is_replaced(tracer: str, spied: Replaced) -> None:
    captured(Model(fails=False), tracer)
    assert {called(owner, name) for owner, name, _ in spied.values()} == on_the_page(tracer)


@tracers
def test_all_is_put_back_when_a_capture_fails(tracer: str, spied: Replaced) -> None:
    model = Model(fails=True)
    before = torch.is_grad_enabled(), torch.get_rng_state().tolist()
    with pytest.raises(fxpipe.TraceError, match="mine"):
        captured(model, tracer)
    assert len(spied) > 10
    assert [(owner, name) for owner, name, original in spied.values() if own(owner, name) is not original] == []
    assert before == (torch.is_grad_enabled(), torch.get_rng_state().tolist())
    assert boundary._here.recorder is None
    assert torch.overrides._get_current_function_mode_stack() == []
    assert model(torch.ones(2, 8)).shape == ()  # the real parameters
