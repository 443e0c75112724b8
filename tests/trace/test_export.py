"""The export tracer: what its programs return, what their nodes know, and what it asks of sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe import TraceError, passes, stage_boundary
from fxpipe.graph.program import where
from fxpipe.passes.chain import chain
from fxpipe.specs import ObjectSpec, TensorSpec
from fxpipe.stage.modes import Modes
from fxpipe.torch_compat.sizes import known_truth
from fxpipe.trace.export.operators import guards_of
from tests.capturing import capture_by, run_stages, staged
from tests.device import DEVICE
from tests.trace.test_small_models import WIDTH, InPlaceBehind, Two, vectors

exported = partial(capture_by, "export")


class Cached(Two):
    """Returns an object that no graph can hold."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.a(x)
        return {"loss": self.loss(h, y), "cache": TensorSpec.from_tensor(h), "rows": h, "norm": h.norm()}


def test_in_training_the_loss_and_the_scalars_beside_it_are_returned() -> None:
    batch = vectors(0)
    trained = run_stages(staged(exported(Cached(), batch)), batch)
    assert list(trained) == ["loss", "cache", "rows", "norm"]
    assert trained["cache"] is None
    assert trained["rows"] is None
    evaluated = run_stages(staged(exported(Cached(), batch, training=False)), batch)
    assert list(evaluated) == ["loss", "cache", "rows", "norm"]
    assert evaluated["cache"] is None


def test_parameters_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = InPlaceBehind()
    program = exported(model, vectors(0), device=torch.device(DEVICE))
    assert all(parameter.is_meta for parameter in model.parameters())
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "call_function"]
    assert {value.device.type for value in values if isinstance(value, Tensor)} == {DEVICE}


def test_every_node_has_a_value_a_line_and_the_submodules_it_is_in() -> None:
    program = exported(InPlaceBehind(), vectors(0))
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    assert all("val" in node.meta for node in nodes)
    linear = next(node for node in nodes if node.name == "linear")
    assert linear.meta["val"].shape == (4, WIDTH)
    assert [path for path, _ in linear.meta["nn_module_stack"].values()] == ["", "a"]
    assert where(linear).endswith("h = self.relu(stage_boundary(self.norm(self.a(x)))))")


def test_nodes_know_the_modes_that_forward_has_changed() -> None:
    class Regions(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                x = x.sin()
                with torch.no_grad():
                    x = x.cos()
                x = x.tan()
            with torch.autocast(DEVICE, torch.bfloat16):
                x = x.exp()
            return x.sum()

    program = exported(Regions(), vectors(0))
    found = {node.name: node.meta.get("modes") for node in program.graph.nodes if node.op == "call_function"}
    region = (DEVICE, True, torch.bfloat16, True)
    assert found == {
        "sin": Modes(None, (region,), 1),
        "cos": Modes(False, (region,), 2),
        "tan": Modes(None, (region,), 1),
        "exp": Modes(None, (region,), 3),
        "sum_1": None,
    }


def test_numbers_in_the_result_are_those_of_the_call() -> None:
    class Counts(Two):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {"loss": self.loss(self.a(x), y), "positive": (x > 0).sum().item(), "half": x.sum().item() / 2}

    graph, batch = staged(exported(Counts(), vectors(0))), vectors(1)
    result = run_stages(graph, batch)
    assert result["positive"] == (batch["x"] > 0).sum().item()
    assert result["half"] == batch["x"].sum().item() / 2


def test_a_module_under_two_names_has_one_place() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.blocks[1](self.blocks[0](x)), y)

    nodes = [node for node in exported(Shared(), vectors(0)).graph.nodes if node.name.startswith("linear")]
    assert [list(node.meta["nn_module_stack"].values())[-1][0] for node in nodes] == ["blocks.0", "blocks.1"]
    assert {node.all_input_nodes[1].target for node in nodes} == {"blocks.0.weight"}


def test_a_count_of_calls_runs_with_its_submodule() -> None:
    class Counter(Two):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = stage_boundary(self.norm(self.a(x)))
            self.calls += 1
            return self.loss(h, y)

    program = chain(passes.default(), exported(Counter(), vectors(0)))
    counts = [node for node in program.graph.nodes if node.name.startswith("add_")]
    stage_of = {str(node.all_input_nodes[0]): program.stage_of[node.name] for node in counts}
    assert stage_of == {"norm_num_batches_tracked": 0, "calls": 1}
    assert len(set(program.stage_of.values())) == 2


def test_an_object_among_the_inputs_is_refused() -> None:
    with pytest.raises(TraceError, match="input 'y' holds a Snapshot, which is neither a tensor nor a plain value"):
        exported(Two(), {"x": torch.randn(4, WIDTH), "y": [ObjectSpec("Snapshot")]})


def test_what_ranges_decide_of_a_size_that_values_decide_is_known() -> None:
    """How many places there are is never negative, and inputs decide whether they are three."""
    found: list[bool | None] = []

    class Counts(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            size = mask.nonzero().shape[0]
            found.extend([known_truth(size < 0), known_truth(size >= 0), known_truth(size == 3)])
            return mask + 1

    torch.export.export(Counts(), (torch.ones(4),), strict=False)
    assert found[:3] == [False, True, None]


def test_how_a_tensor_lies_in_memory_is_no_clause_of_what_a_region_returns() -> None:
    """torch asks for strides to choose a kernel: those of the inputs beside the sizes of what a region returns, too."""
    sizes, strides = "L['t1'].size()[0] == L['t0'].size()[0]", "L['t1'].size()[0] <= L['t0'].stride()[0]"
    (guard,) = guards_of([sizes, strides], [("region", range(1, 2))])
    assert guard.clauses == (sizes,)
