"""What a preview tells: bytes of edges and ranks, time, utilisation and bytes between nodes, in print and as data."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import Hardware, Preview, RunError, Topology, stage_boundary
from fxpipe.capture.capturing import Capturing
from fxpipe.search.choose import Balanced
from fxpipe.trace import NEED_SHAPES, TRACERS
from tests.activations import counted as activations_counted
from tests.pool import Pool
from tests.thinned import every

WIDTH, ROWS, MICROBATCHES = 32, 64, 8
SIMPLE = Hardware(flops=1e9, flops_16=2e9, bandwidth=1e30, launch=0.0, link=1e30, link_between=1e6, latency=0.0)
"""On which products and what goes between nodes take time, and all else none."""
ALONE = Topology([("pipe", 2)])


class Layers(nn.Module):
    """A stage of one layer, and one of two, which is sent whole numbers, too, that get no gradient."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        h, count = stage_boundary((h, (h > 0).sum(1)), name="last")
        return (self.layers[2](self.layers[1](h)).sum(1) * count).mean()


def preview(topology: Topology = ALONE, model: nn.Module | None = None, **options: Any) -> Preview:
    defaults = {"microbatches": MICROBATCHES, "example_args": (torch.randn(ROWS, WIDTH),)}
    return fxpipe.preview(model or Layers(), topology, **defaults | options)


# --- sizes ---


def test_edges_have_the_bytes_that_the_first_step_finds() -> None:
    forward_backward = fxpipe.compile(Layers(), ALONE, microbatches=MICROBATCHES)
    forward_backward(torch.randn(ROWS, WIDTH))
    assert forward_backward.stages.bytes_of == preview().graph.bytes_of
    assert sum(preview().graph.bytes_of.values()) == ROWS // MICROBATCHES * (4 * WIDTH + 8)


def test_a_frozen_stage_holds_two_micro_batches_of_what_it_sends() -> None:
    value = ROWS // MICROBATCHES * (4 * WIDTH + 8)
    assert preview(model=Layers(frozen=True)).ranks[0].messages == 2 * value


def test_without_a_batch_what_needs_its_shapes_is_left_open() -> None:
    told = preview(example_args=None)
    assert [rank.activations for rank in told.ranks] == [None, None]
    assert told.ranks[0].parameters == 4 * WIDTH * WIDTH
    assert (told.fits, told.seconds, told.between_nodes) == (None, None, None)
    assert "need a batch's shapes: pass example_args=" in str(told)


def test_stages_of_the_users_own_tell_what_is_known_of_them() -> None:
    stages = {"one": nn.Linear(8, 8, bias=False), "two": nn.MSELoss()}
    graph = fxpipe.StageGraph.from_callables(stages, [("one", "two")], {"one": ["x"], "two": ["y"]})
    told = fxpipe.preview(graph, Topology([("pipe", 2), ("data", 4)]), zero=3, hardware="h100")
    assert [rank.parameters for rank in told.ranks] == [64, 0]
    assert (told.ranks[0].whole, told.ranks[0].activations, told.seconds) == (2 * 4 * 64, None, None)


def test_zero_2_says_why_it_takes_more_than_zero_1() -> None:
    # Of n float32 elements over 2 ranks: 4 n, and 2 n of gradients and 4 n of state with zero=2, which collects 12 n;
    # zero=1 has 4 n + 2 n of gradients.
    topology, mib = Topology([("pipe", 2), ("data", 2)]), 2**20
    n = 2 * WIDTH * WIDTH
    text = f"{preview(topology, zero=2)}"
    assert f"zero=1 takes less than zero=2: {14 * n / mib:.3f} in place of {22 * n / mib:.3f} MiB" in text
    assert f"two buckets: {12 * n / mib:.3f} MiB" in text
    assert "takes less" not in f"{preview(topology, zero=1)}"


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (3, 2), (fxpipe.Zero(3, bucket_mb=1e-6), 3)])
def test_replicas_without_a_pipeline_sum_their_gradients(zero: Any, times: int) -> None:
    """Sums begin with the last backwards, behind 3 F, and take 2 (D-1)/D w; or half of it, and what is gathered: once,
    or for forward and backward if there are several blocks."""
    slow = Hardware(**{**vars(SIMPLE), "link": 1e6})
    told = preview(Topology([("data", 4)]), microbatches=1, zero=zero, hardware=slow)
    layer = 2 * ROWS * WIDTH * WIDTH / 1e9
    size = 3 * 4 * WIDTH * WIDTH
    assert told.seconds == pytest.approx(3 * layer + times * 3 / 4 * size / 1e6)


@pytest.mark.parametrize(("share", "fits"), [(1.01, True), (0.99, False)])
def test_what_fits_is_told_against_the_memory_of_hardware(share: float, fits: bool) -> None:
    most = max(rank.total for rank in preview(placement={"layers.0": 0, "last": 1}).ranks)
    told = preview(placement={"layers.0": 0, "last": 1}, hardware=Hardware(memory=share * most))
    assert told.fits is fits
    assert f"{round(100 / share)}%" in str(told)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("adamw", 2),
        ("sgd", 0),
        (functools.partial(torch.optim.SGD, momentum=0.9), 1),
        (torch.optim.Adagrad, 1),
    ],
)
def test_the_optimizers_state_is_counted(optimizer: Any, states: int) -> None:
    assert preview(optimizer=optimizer).ranks[0].optimizer == states * 4 * WIDTH * WIDTH


def test_a_limit_counts_zero_and_precision_too() -> None:
    """Of three layers a rank has two: 16 bytes a parameter, or 4 + 4 + 4/8 + 8/8 sharded over 8 ranks."""
    topology, layer = Topology([("pipe", 2), ("data", 8)]), WIDTH * WIDTH
    options: dict[str, Any] = {"boundaries": "auto", "example_args": (torch.randn(8, WIDTH),)}
    limit = 2 * 12 * layer
    assert preview(topology, zero=1, hardware=Hardware(memory=limit), **options).fits
    for data, zero in ((8, 0), (1, 1)):  # 16 bytes a parameter
        plan = preview(Topology([("pipe", 2), ("data", data)]), zero=zero, hardware=Hardware(memory=limit), **options)
        assert (plan.fits, plan.memory) == (False, limit)
        assert max(rank.parameters + rank.gradients + rank.optimizer for rank in plan.ranks) == 2 * 16 * layer
        assert f"{max(rank.total for rank in plan.ranks) / limit:.0%}" in str(plan)


def test_where_nothing_fits_compile_raises_and_preview_shows_the_nearest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"boundaries": "auto", "microbatches": 2, "hardware": Hardware(memory=1000)}
    with pytest.raises(fxpipe.PartitionError, match=r"no balance fits into 1,000 bytes a rank; .* is [\d,]+ bytes"):
        fxpipe.compile(Layers(), ALONE, example_args=(torch.randn(ROWS, WIDTH),), **options)
    captured = []
    capture = Capturing._capture
    monkeypatch.setattr(Capturing, "_capture", lambda *args: captured.append(args) or capture(*args))
    plan = preview(**options)
    assert len(captured) == 1  # the search goes on to the nearest plan with the same capture
    unlimited = preview(**options | {"hardware": None})
    most, fewest = (max(rank.total for rank in each.ranks) for each in (unlimited, plan))
    assert plan.fits is False
    assert fewest <= most


def test_the_memory_of_a_gpu_that_is_named_is_the_limit() -> None:
    """Of three layers a rank has two: 16 bytes a parameter, 34 GB, of 24 on an L4 and of 48 on an L40S."""
    wide, width = Layers(), 2**15
    for layer in wide.layers:
        layer.weight = nn.Parameter(torch.empty(width, width, device="meta"))
    options: dict[str, Any] = {"boundaries": "auto", "microbatches": 2}
    example = (torch.empty(2, width, device="meta"),)
    small, large = (preview(model=wide, hardware=name, example_args=example, **options) for name in ("l4", "l40s"))
    assert [(each.fits, each.memory) for each in (small, large)] == [(False, 24e9), (True, 48e9)]
    assert 2 * 16 * width**2 <= max(rank.total for rank in small.ranks) < 1.01 * 2 * 16 * width**2
    assert "costs by shapes on l4" in str(small)  # of the nearest plan, too
    with pytest.raises(fxpipe.PartitionError, match="no balance fits into 24,000,000,000 bytes a rank"):
        fxpipe.compile(wide, ALONE, hardware="l4", example_args=example, **options)


def test_a_limit_alone_gives_no_speeds() -> None:
    """Cuts are those without hardware=, at the reference's speeds; the time of a step is of no device of the user's."""
    plain, limited = (preview(boundaries="auto", hardware=each) for each in (None, Hardware(memory=80e9)))
    assert limited.graph.names == plain.graph.names
    assert limited.schedule == plain.schedule
    assert (limited.fits, limited.seconds, limited.flops, limited.utilisation) == (True, None, None, None)
    assert "costs by shapes on an A100 (hardware= has no speeds)" in str(limited)
    assert 'the time of a step needs the speeds of hardware=, such as hardware="h100"' in str(limited)


def test_a_figure_that_is_not_given_is_named_with_the_time_of_a_step() -> None:
    told = preview(hardware=Hardware(flops=1e9))
    assert told.seconds
    assert "the hardware given (flops_16, bandwidth, link, link_between of an A100)" in str(told)


class Buffered(Layers):
    """With a buffer in each half, and an input that both read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("early", torch.ones(WIDTH))
        self.register_buffer("late", torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(self.layers[0](x) * self.early, name="last")
        return (self.layers[2](stage_boundary(self.layers[1](h), name="end") @ self.late) * x).square().mean()


PLACED: dict[str, tuple[int, dict[str, Any]]] = {
    "cut and placed": (2, {"boundaries": "auto"}),
    "placed": (2, {}),
    "a stage a rank": (3, {}),
}


@pytest.mark.parametrize(
    ("how", "zero", "precision"),
    every(5, list(itertools.product(PLACED, [0, 1, 2, 3], [None, fxpipe.Precision()]))),
)
def test_searches_count_what_a_preview_does(
    how: str, zero: Any, precision: fxpipe.Precision | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, options = PLACED[how]
    found: list[Balanced] = []
    made = Balanced.from_search
    monkeypatch.setattr(Balanced, "from_search", lambda *args: found.append(made(*args)) or found[-1])
    topology = Topology([("pipe", ranks), ("data", 4)])
    told = preview(topology, Buffered(), zero=zero, precision=precision, hardware=Hardware(memory=1e9), **options)
    counted = [rank.total - rank.messages for rank in told.ranks]
    assert found[-1].outcome.peak_bytes == pytest.approx(counted)
    assert {rank.batch for rank in told.ranks} >= {(4 if precision is None else 4 + 2) * ROWS * WIDTH}


def compiled(ranks: int, **options: Any) -> None:
    defaults: dict[str, Any] = {"microbatches": MICROBATCHES, "example_args": (torch.randn(ROWS, WIDTH),)}
    fxpipe.compile(
        Buffered(), Topology([("pipe", ranks)]), **{"hardware": Hardware(memory=1000.0)} | defaults | options
    )


def test_a_limit_is_kept_where_each_rank_has_a_stage() -> None:
    with pytest.raises(fxpipe.PartitionError, match="fits into 1,000 bytes a rank"):
        compiled(3)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"placement": {"layers.0": 0, "last": 1, "end": 2}}, r"rank 2 of a pipeline takes [\d,]+ bytes"),
        ({"example_args": None, "hardware": "h100"}, "the memory of hardware=, 80,000,000,000 bytes, is not checked"),
        ({"example_args": None}, r"takes [\d,]+ bytes without activations, and the memory of hardware= is 1,000 bytes"),
    ],
)
def test_a_line_tells_of_a_limit_that_nothing_keeps(
    options: dict[str, Any], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled(3, **options)
    assert re.search(line, capfd.readouterr().err)


def test_a_limit_needs_no_figure_that_only_time_does() -> None:
    across = Topology([("data", 2), ("pipe", 2)], ranks_per_node=2)
    options = {"microbatches": MICROBATCHES, "example_args": (torch.randn(ROWS, WIDTH),)}
    with pytest.warns(UserWarning, match="data 2 of the topology is left out"):
        fxpipe.compile(Layers(), across, hardware="l40s", **options)


@pytest.mark.parametrize("zero", [1, 2])
def test_an_optimizer_of_whole_parameters_leaves_the_largest_with_one_rank(zero: Any) -> None:
    """Three layers on four ranks: one has a layer, one more none."""
    layer, topology = 4 * WIDTH * WIDTH, Topology([("data", 4)])
    told = preview(topology, microbatches=1, zero=zero, precision=fxpipe.Precision(), optimizer="adafactor")
    factors = 4 * 2 * WIDTH  # of a row and of a column, reckoned by a larger matrix
    assert told.ranks[0].optimizer == pytest.approx(layer + factors, rel=0.05)
    assert told.ranks[0].gradients == {1: 3 + 1, 2: 1}[zero] * layer


class Checkpointed(nn.Module):
    """Layers that are computed again one at a time, and a head behind them that is large."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.head, self.reentrant = nn.Linear(WIDTH, 32 * WIDTH), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, stage_boundary(x) if number == 2 else x, use_reentrant=self.reentrant)
        return self.head(x).logsumexp(-1).mean()


def test_what_a_checkpoint_computes_again_is_held_while_it_does() -> None:
    """Counted where it is reentrant, whose tensors are saved in sight."""
    batch, options = torch.randn(ROWS, WIDTH), {"microbatches": 4}
    told = [preview(ALONE, Checkpointed(flag), **options, hardware=SIMPLE) for flag in (True, False)]
    forward_backward = fxpipe.compile(Checkpointed(True), ALONE, **options, example_args=(batch,))
    with activations_counted(forward_backward, {"x": batch}) as held:
        forward_backward(batch)
    for one in told:
        assert [rank.activations for rank in one.ranks] == pytest.approx(list(held.peak.values()), rel=0.15)
    assert told[0].flops == told[1].flops
    assert told[0].seconds == told[1].seconds


# --- time ---


def test_a_checkpoint_takes_its_forward_again_and_adds_no_flops() -> None:
    """Of products of 16 · 32 · 256: 2 in each of 5 calls, 4 of which again, and a head of 4; the input needs no
    gradient."""
    product = 2 * 16 * WIDTH * 8 * WIDTH
    told = preview(Topology([("pipe", 1)]), Checkpointed(False), microbatches=4, hardware=SIMPLE)
    assert told.flops == 4 * (3 * (2 * 5 + 4) - 1) * product
    assert told.seconds == pytest.approx(4 * (3 * (2 * 5 + 4) - 1 + 2 * 4) * product / 1e9)


def test_a_recurrent_layer_takes_its_products() -> None:
    """Of each step: four gates from the input, and, but for the first, from the step before."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cells = nn.Linear(WIDTH, WIDTH, bias=False), nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cells(self.first(x))[0].square().mean()

    batch = (torch.randn(8, 6, WIDTH),)
    told = preview(Topology([("pipe", 1)]), Recurrent(), microbatches=1, example_args=batch, hardware=SIMPLE)
    gates = 2 * 8 * 6 * WIDTH * 4 * WIDTH
    assert told.flops == pytest.approx(2 * gates / 4 + 3 * 2 * gates, rel=0.05)


def test_a_step_takes_what_its_products_take() -> None:
    """Of 1 layer and of 2; forward F, backward 2 F, less the first layer's input gradient, which nobody needs."""
    layer = 2 * ROWS / MICROBATCHES * WIDTH * WIDTH / 1e9
    told = preview(hardware=SIMPLE)
    assert told.timeline.costs.forward == pytest.approx((layer, 2 * layer))
    assert told.timeline.costs.backward == pytest.approx((layer, 4 * layer))
    assert told.seconds == pytest.approx(layer + MICROBATCHES * 6 * layer + layer)
    assert told.bubble == pytest.approx(1 - MICROBATCHES * 8 * layer / 2 / told.seconds)
    assert told.flops == pytest.approx(MICROBATCHES * 8 * layer * 1e9)
    assert told.utilisation == pytest.approx(1 - told.bubble)


def test_what_goes_between_nodes_goes_over_their_links() -> None:
    """The pipeline's two ranks in two nodes: hops take bytes / link_between."""
    inside, across = preview(hardware=SIMPLE), preview(Topology([("pipe", 2)], ranks_per_node=1), hardware=SIMPLE)
    hop = ROWS // MICROBATCHES * (4 * WIDTH + 8) / 1e6
    assert across.timeline.costs.comm == pytest.approx(hop)
    assert inside.between_nodes == 0
    gradient = ROWS * 4 * WIDTH
    assert across.between_nodes == ROWS * (4 * WIDTH + 8) + gradient


class Contrasted(nn.Module):
    """A loss of all rows, behind two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(stage_boundary(self.one(x), gather="batch", name="loss")).square().mean()


def test_a_gathered_stage_takes_the_time_of_its_group_at_once() -> None:
    layer = 2 * ROWS * WIDTH * WIDTH / 1e9
    told = preview(model=Contrasted(), hardware=SIMPLE)
    assert told.timeline.costs.forward == pytest.approx((layer / MICROBATCHES, layer))
    assert told.seconds == pytest.approx(layer + 3 * layer + layer)


class Similarities(Contrasted):
    """A loss of the products of all rows with each other."""

    def forward(self, x: Tensor) -> Tensor:
        rows = stage_boundary(self.one(x), gather="batch", name="loss")
        return (rows @ rows.T).square().mean()


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_gathered_stage_computes_between_all_rows_of_its_group(tracer: str, microbatches: int) -> None:
    told = preview(model=Similarities(), hardware=SIMPLE, tracer=tracer, microbatches=microbatches)
    all_pairs = 2 * ROWS * ROWS * WIDTH / 1e9
    # Another tracer's program is of a micro-batch's rows, and says nothing of pairs in two of them.
    pairs = all_pairs / microbatches if tracer in NEED_SHAPES else all_pairs
    assert told.timeline.costs.forward[1] == pytest.approx(pairs)
    words = "what loss computes between rows of several micro-batches counts as within each"
    assert (words in str(told)) == (tracer in NEED_SHAPES)


class Launched(Contrasted):
    """What its loss takes is the launch of its kernels, one of which makes what depends on no input."""

    def forward(self, x: Tensor) -> Tensor:
        rows = stage_boundary(self.one(x), gather="batch", name="loss")
        return (rows.mean() * torch.ones(1).square()).sum()


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("tracer", TRACERS)
def test_the_kernels_of_a_gathered_stage_are_launched_once_for_its_group(tracer: str, microbatches: int) -> None:
    launches = Hardware(flops=1e30, bandwidth=1e30, launch=1e-3, link=1e30, latency=0.0)
    told = preview(model=Launched(), hardware=launches, tracer=tracer, microbatches=microbatches)
    few = preview(model=Launched(), hardware=launches, tracer=tracer, microbatches=1)
    assert told.timeline.costs.forward[1] == pytest.approx(few.timeline.costs.forward[1])


class ManyResults(Layers):
    """The loss is put together with what an early stage makes."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        kept = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return {"loss": x.square().mean(), "kept": kept}


class Scaled(Layers):
    """Each stage has its own copy of what depends on parameters alone, and takes time for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale @ self.scale @ self.scale
        for layer in self.layers:
            x = layer(x) @ scale
        return x.square().mean()


@pytest.mark.parametrize(("model", "options"), [(ManyResults, {"recompute": True}), (Scaled, {"schedule": "greedy"})])
def test_the_bubble_of_the_search_is_that_of_the_table(
    model: type[nn.Module],
    options: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fxpipe.search.moves.MORE_ACTIONS", 2000)
    told = preview(model=model(), boundaries="auto", **options)
    assert f"bubble {told.bubble:.1%}" in str(told)
    (chosen,) = re.findall(r"^chosen .*?([\d.]+%)", capfd.readouterr().err, re.MULTILINE)
    assert chosen == f"{told.bubble:.1%}"


# --- between nodes, counted ---

TOPOLOGIES = {
    "the pipeline crosses": Topology([("pipe", 2), ("data", 2)], ranks_per_node=2),
    "the replicas cross": Topology([("data", 2), ("pipe", 2)], ranks_per_node=2),
}


def sent(name: str, zero: Any) -> float:
    """The bytes of values, gradients and parameters that leave this rank's node for another in its second step."""
    fxpipe.init()
    topology = TOPOLOGIES[name]
    torch.manual_seed(topology.data_rank)
    options = {"zero": fxpipe.Zero(zero, scope="data"), "microbatches": MICROBATCHES}
    forward_backward = fxpipe.compile(Layers(), topology, **options)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        forward_backward(torch.randn(ROWS, WIDTH))
        optimizer.step()
    rows = forward_backward.traffic().rows
    return sum(r.bytes for r in rows if r.between_nodes and r.scope not in ("flags", "pipe", "data", "all"))


@pytest.mark.parametrize(("name", "zero"), [("the pipeline crosses", 0), ("the replicas cross", 1)])
def test_bytes_between_nodes_are_those_of_a_run(name: str, zero: Any, pool: Pool) -> None:
    told = preview(TOPOLOGIES[name], zero=fxpipe.Zero(zero, scope="data"))
    assert told.between_nodes == pytest.approx(sum(pool.run(sent, name, zero)), rel=0.05)
    assert told.between_nodes


def test_more_messages_ask_the_topology_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes between nodes is counted for a pair of ranks, and not for each message in each pipeline."""
    asked: Counter[int] = Counter()
    groups = Topology.groups_over

    def counted(topology: Topology, axes: Iterable[str]) -> list[list[int]]:
        asked[microbatches] += 1
        return groups(topology, axes)

    monkeypatch.setattr(Topology, "groups_over", counted)
    for microbatches in (2, 32):
        told = preview(Topology([("pipe", 2), ("data", 4)], ranks_per_node=4), microbatches=microbatches)
        assert told.between_nodes == 4 * ROWS * (4 * WIDTH + 8 + 4 * WIDTH)
    assert asked[2] == asked[32]


# --- forms ---


def test_the_figures_are_plain_data_in_whole_bytes(tmp_path: Path) -> None:
    told = preview(hardware=Hardware.named("h100", memory=np.float32(1e9)))
    told.to_json(tmp_path / "told.json")
    found = json.loads((tmp_path / "told.json").read_text())
    assert found == json.loads(json.dumps(told.as_dict()))
    assert (found["fits"], found["seconds"], found["memory"]) == (True, told.seconds, 10**9)
    assert found["stages"][0]["sends"] == {"last": sum(told.graph.bytes_of.values())}
    for rank, whole in zip(told.ranks, found["ranks"], strict=True):
        sizes = {name: size for name, size in whole.items() if name != "stages"}
        assert {type(size) for size in sizes.values()} == {int}
        assert sizes.pop("host") == 0
        assert sizes.pop("total") == sum(sizes.values()) == pytest.approx(rank.total, abs=len(sizes))


def test_one_table_and_a_line_for_each_rank_are_printed() -> None:
    text = str(preview(hardware="h100"))
    assert text.count("bubble") == 1
    head = next(line for line in text.splitlines() if "parameters    gradients" in line)
    columns = "rank parameters gradients optimizer activations messages batch sum, KiB of 78,125,000"
    assert head.split() == columns.split()
    assert "a step takes" in text


# --- what cannot be meant ---


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hardware": "h1000"}, "hardware is 'h1000'; write one of"),
        ({"optimizer": "adamv"}, "optimizer is 'adamv', which torch.optim has not; did you mean"),
        ({"optimizer": "lbfgs"}, "torch.optim.LBFGS takes the parameters of the whole model as one vector"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(RunError, match=re.escape(told)):
        preview(**options)


def test_options_that_change_no_plan_are_taken_and_do_nothing() -> None:
    never: Any = pytest.fail
    others: dict[str, Any] = {"checkpoint": "nowhere", "init_fn": never, "loss_weight": never, "stage_compiler": never}
    told = preview(**others, checks=fxpipe.Checks(timeout=1))
    assert str(told) == str(preview())


def test_an_optimizer_of_whole_parameters_has_no_shards_of_rows_to_step() -> None:
    with pytest.raises(RunError, match="'adafactor' steps whole parameters, which zero=3 shards; write zero=2"):
        preview(Topology([("data", 2)]), microbatches=1, optimizer="adafactor", zero=3)
    assert preview(ALONE, optimizer="adafactor", zero=3).ranks[0].optimizer


@pytest.mark.parametrize("hardware", ["l40s", Hardware(link=1e9)])
def test_a_link_between_nodes_is_needed_where_a_pipeline_crosses_them(hardware: Any) -> None:
    with pytest.raises(RunError, match="hardware has no link_between, bytes a second, which a message between nodes"):
        preview(Topology([("pipe", 2)], ranks_per_node=1), hardware=hardware)


# --- the stages' seconds ---


def row_of(stages: Any, name: str) -> dict[str, str]:
    """A row of the printed table of stages, by its headers."""
    head, rule, *rows = str(stages).splitlines()
    ends = [match.span() for match in re.finditer("-+", rule)]
    (row,) = (row for row in rows if row.startswith(f"{name} "))
    return {head[start:end].strip(): row[start:end].strip() for start, end in ends[:-1]}


def test_each_stage_has_its_forward_and_backward_in_ms_and_on_which_hardware() -> None:
    """A product of 8 rows with a square takes 2 · 8 · width² operations; a backward one for each of two gradients."""
    told = preview(hardware=SIMPLE)
    product = 2 * (ROWS // MICROBATCHES) * WIDTH**2 / 1e9 * 1e3
    first, last = (row_of(told.graph, name) for name in ("layers.0", "last"))
    assert first["F, ms"] == first["B, ms"] == f"{product:.3g}"  # the input needs no gradient
    assert last["F, ms"] == f"{2 * product:.3g}"
    assert last["B, ms"] == f"{4 * product:.3g}"
    assert "F and B of a micro-batch: costs by shapes on the hardware given" in str(told)
    assert "costs by shapes on h100" in str(preview(hardware="h100"))
    assert "costs by shapes on an A100 (no hardware= given)" in str(preview())


def test_a_rank_that_is_nearly_idle_is_named() -> None:
    """Layer 0 is frozen and a 24th of the work on 2 ranks: one product of 1 + 2 · 4 · 3 = 25."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
            self.small.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = stage_boundary(self.small(x))
            for _ in range(8):
                x = self.large(x)
            return x.square().mean()

    # the first of eight products has one gradient, the others two
    assert f"rank 0 has {1 / (1 + 8 + 15):.0%} of the work" in str(preview(model=Uneven(), hardware=SIMPLE))
    assert "of the work" not in str(preview(hardware=SIMPLE))


def test_a_stages_share_of_its_rank_is_told_where_a_rank_has_several() -> None:
    """Stages of 2, 6 and 0 products on one rank."""
    told = preview(Topology([("pipe", 1)]), hardware=SIMPLE)
    assert row_of(told.graph, "layers.0")["of its rank"] == "25%"
    assert row_of(told.graph, "last")["of its rank"] == "75%"
    assert "of its rank" not in str(preview(hardware=SIMPLE))


def test_compiled_stages_show_bytes_and_seconds_where_the_example_has_the_shapes() -> None:
    example = (torch.randn(ROWS, WIDTH),)
    known = fxpipe.compile(Layers(), ALONE, microbatches=MICROBATCHES, example_args=example, hardware=SIMPLE).stages
    told = preview(hardware=SIMPLE).graph
    assert [row_of(known, stage.name) for stage in told] == [row_of(told, stage.name) for stage in told]
    unknown = fxpipe.compile(Layers(), ALONE, microbatches=MICROBATCHES).stages
    assert row_of(unknown, "last")["bytes in"] == "after 1st step"
    assert "F, ms" not in str(unknown)


class Repeated(nn.Module):
    """Two layers a stage, checkpointed by the model itself if ``own``."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.own, self.layers = own, nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.own else layer(x)
        return x.square().mean()


def repeated(own: bool = False, **options: Any) -> Preview:
    x = torch.randn(ROWS, 64)
    cuts = {"boundaries": ["layers.2"], "tracer": "record", "example_args": (x,)}
    return preview(model=Repeated(own), hardware=Hardware.named("h100", memory=None), **cuts, **options)


def test_the_time_that_checkpointed_layers_cost_is_the_difference_of_two_previews() -> None:
    plain, layers = repeated(), repeated(recompute="layers")
    longer = layers.timeline.makespan / plain.timeline.makespan - 1
    assert longer > 0.1
    assert f"makespan {longer:+.1%}, at costs by shapes" in layers.saving


def test_a_recomputed_stage_computes_what_the_model_checkpoints_no_second_time() -> None:
    plain, own = (repeated(own, recompute=True).timeline for own in (False, True))
    again = {stage for stage, _ in own.schedule.dependencies.recomputed}
    assert again == {0}
    assert own.costs.backward[0] == pytest.approx(plain.costs.backward[0])
    assert own.costs.backward[1] > plain.costs.backward[1]  # the last stage has its own checkpoints, and no R
