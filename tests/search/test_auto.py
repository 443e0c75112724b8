"""``boundaries="auto"`` and ``placement=None`` through compile: what is found runs as plain PyTorch does."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import PartitionError, RunError, ScheduleError, stage_boundary
from fxpipe.graph.ranks import ranks_of
from tests.harness import assert_same, engine_of, gradients_of
from tests.thinned import ALL, every

TRACERS = ["symbolic", "export", "record"]


def layers(width: int, depth: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts)


class Lopsided(nn.Module):
    """A deep image tower beside a tiny text tower; a boundary that auto does not heed."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.join = layers(64, 6), layers(8, 1), nn.Linear(8, 64)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        v = self.image(image)
        t = F.dropout(self.join(stage_boundary(self.text(text))), 0.0, self.training)
        return {"loss": F.mse_loss(v, t), "image": v}


def model() -> Lopsided:
    torch.manual_seed(0)
    return Lopsided()


def batch(rows: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"image": torch.randn(rows, 64, generator=generator), "text": torch.randn(rows, 8, generator=generator)}


def compiled(tracer: str, ranks: int, **options: Any) -> fxpipe.ForwardBackward:
    topology = fxpipe.Topology([("pipe", ranks)])
    defaults: dict[str, Any] = {"boundaries": "auto", "microbatches": 4, "example_kwargs": batch()}
    return fxpipe.compile(model(), topology, tracer=tracer, **defaults | options)


def steps(
    tracer: str, count: int
) -> tuple[list[Tensor], list[dict[str, Tensor | None]], Any, tuple[int, ...], tuple[str, ...]]:
    forward_backward = compiled(tracer, count)
    losses, gradients = [], []
    for rows in (16, 10):
        forward_backward.zero_grad()
        losses.append(forward_backward(**batch(rows)))
        gradients.append(gradients_of(forward_backward.named_parameters()))
    output = forward_backward.evaluate(**batch(), outputs="all")
    stages = forward_backward.stages
    return losses, gradients, output["image"], stages.placement, stages.names


@pytest.mark.parametrize(("engine", "tracer"), every(8, list(product(["local", "strict 1", "distributed"], TRACERS))))
def test_it_trains_and_evaluates_as_plain_pytorch(engine: str, tracer: str, request: pytest.FixtureRequest) -> None:
    count = 4 if ALL else 2
    ranks = engine_of(engine, lambda: request.getfixturevalue("pool"))(count, steps, tracer, count)
    for step, rows in enumerate((16, 10)):
        plain, total = model(), torch.zeros(())
        for image, text in zip(*(part.tensor_split(4) for part in batch(rows).values()), strict=True):
            (loss := plain(image, text)["loss"] * (len(image) / rows)).backward()
            total = total + loss.detach()
        wanted = gradients_of(plain.named_parameters())
        for losses, gradients, _, placement, _ in ranks:
            assert_same(losses[step], total, "loss")
            tolerance = 1e-6 if any(len(ranks_of(place)) > 1 for place in placement) else 0.0  # sums over ranks
            for name, gradient in gradients[step].items():
                assert_same(gradient, wanted[name], name, tolerance)
    plain = model().eval()
    with torch.no_grad():
        parts = zip(*(tensor.chunk(4) for tensor in batch().values()), strict=True)
        wanted_output = torch.cat([plain(*part)["image"] for part in parts])
    for _, _, output, placement, _ in ranks:
        assert_same(output, wanted_output, "output")
        assert {rank for place in placement for rank in ranks_of(place)} == set(range(count))


class Chain(nn.Module):
    """Six marked stages, of which the first is as costly as the rest together, though it has no more parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(5):
            h = torch.tanh(self.parts[0](h))
        for part in list(self.parts)[1:]:
            h = part(stage_boundary(h))
        return h.square().mean()


def test_marked_stages_are_placed_by_what_simulates_best_where_shapes_are_known() -> None:
    topology = fxpipe.Topology([("pipe", 2)])
    x = torch.randn(64, 32)
    by_costs = fxpipe.compile(Chain(), topology, microbatches=4, example_args=(x,)).stages.placement
    by_parameters = fxpipe.compile(Chain(), topology, microbatches=4).stages.placement
    assert by_parameters == (0, 0, 0, 1, 1, 1)
    first = by_costs[0]
    assert sum(rank == first for rank in by_costs) < 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"placement": {"image": 0}}, "leave placement= out"),
        ({"passes": fxpipe.passes.default()}, "leave passes= out"),
        ({"example_kwargs": None}, "needs the shapes of a batch"),
        ({"schedule": fxpipe.schedules.build("1f1b", [(0, 1)], 4)}, "leave schedule= out"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(RunError, match=told):
        compiled("symbolic", 2, **options)


# --- cuts that were found, as a value ---


@pytest.mark.parametrize("tracer", every(2, TRACERS))
def test_cuts_that_were_found_give_the_same_stages_and_table_without_a_search(
    tracer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiled(tracer, 2)
    assert found.cuts is not None
    found.cuts.to_json(tmp_path / "cuts.json")
    cuts = fxpipe.Cuts.read(tmp_path / "cuts.json")
    assert cuts == found.cuts
    assert all(name in str(cuts) for name in found.stages.names)
    monkeypatch.delattr("fxpipe.search.choose.search")  # which would find them again
    again = compiled(tracer, 2, boundaries=cuts)
    assert (again.schedule, again.stages.names, again.cuts) == (found.schedule, found.stages.names, cuts)
    previewed = fxpipe.preview(
        model(), again.topology, boundaries={"*": cuts}, microbatches=4, tracer=tracer, example_kwargs=batch()
    )
    assert previewed.cuts == cuts
    moved = dict(zip(found.stages.names, [1 - ranks_of(place)[0] for place in cuts.placement], strict=True))
    other = compiled(tracer, 2, boundaries=cuts, placement=moved)
    assert other.stages.placement == tuple(moved.values())
    losses = [each(**batch()) for each in (found, again, other)]
    gradients = [gradients_of(each.named_parameters()) for each in (found, again, other)]
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        assert_same(loss, losses[0], "loss")
        for name, value in gradient.items():
            assert_same(value, gradients[0][name], name)


def test_cuts_of_another_program_are_refused(tmp_path: Path) -> None:
    cuts = compiled("symbolic", 2).cuts
    with pytest.raises(PartitionError, match="another program: symbolic captured the model for them, export now"):
        compiled("export", 2, boundaries=cuts)
    with pytest.raises(PartitionError, match="gives cuts for 2 pipe ranks, and the topology has 3; give placement="):
        compiled("symbolic", 3, boundaries=cuts)
    (tmp_path / "cuts.json").write_text('{"stages": []}')
    with pytest.raises(PartitionError, match="holds no cuts of fxpipe"):
        fxpipe.Cuts.read(tmp_path / "cuts.json")
    assert fxpipe.compile(Chain(), fxpipe.Topology([("pipe", 1)])).cuts is None


def test_reschedule_leaves_stages_on_their_ranks() -> None:
    """Their parameters and optimizer state do not move."""
    forward_backward = compiled("symbolic", 2)
    forward_backward.record_timeline()
    forward_backward(**batch())
    stages = forward_backward.stages
    there = dict(zip(stages.names, stages.placement, strict=True))
    assert forward_backward.reschedule(placement=there).placement == stages.placement
    elsewhere = dict.fromkeys(stages.names, "all")
    with pytest.raises(RunError, match=r"compile the model with boundaries=forward_backward.cuts, placement=\{"):
        forward_backward.reschedule(placement=elsewhere)


# --- families that need a placement ---


@pytest.mark.parametrize("shaped", [False, True], ids=["no example", "example"])
@pytest.mark.parametrize(
    ("family", "placement"), [("interleaved_1f1b", (0, 1, 0, 1)), ("zb_v", (0, 1, 1, 0)), ("v_min", (0, 1, 1, 0))]
)
def test_a_family_that_needs_a_placement_gets_it(family: Any, placement: tuple[int, ...], shaped: bool) -> None:
    chain, topology = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), fxpipe.Topology([("pipe", 2)])
    options: dict[str, Any] = {"loss_fn": lambda y: y.square().mean(), "boundaries": ["1", "2", "3"], "microbatches": 8}
    example = (torch.randn(16, 8),) if shaped else None
    plan = fxpipe.preview(chain, topology, schedule=family, example_args=example, **options)
    assert (plan.schedule.placement, plan.schedule.name) == (placement, family)
    assert plan.schedule.simulate(1, 2).bubble < 1 / 9  # 1F1B on (0, 0, 1, 1): (p − 1) / (m + p − 1)


@pytest.mark.parametrize(
    ("stages", "advice"), [(2, "make it 4 stages"), (3, "an even number"), (6, "make it 4 stages")]
)
def test_a_number_of_stages_that_does_not_fold_over_the_ranks_is_refused(stages: int, advice: str) -> None:
    chain, names = nn.Sequential(*(nn.Linear(8, 8) for _ in range(stages))), [str(n) for n in range(1, stages)]
    options: dict[str, Any] = {"loss_fn": lambda y: y.square().mean(), "boundaries": names, "microbatches": 8}
    with pytest.raises(ScheduleError, match=advice):
        fxpipe.preview(
            chain, fxpipe.Topology([("pipe", 2)]), schedule="zb_v", example_args=(torch.randn(16, 8),), **options
        )


def test_a_table_whose_form_is_1f1b_says_so_in_its_title() -> None:
    edges = [(0, 1), (1, 2), (2, 3)]
    names = [
        fxpipe.schedules.build("interleaved_1f1b", edges, 8, placement).name
        for placement in ([0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 0, 1])
    ]
    assert names == ["interleaved_1f1b (1f1b)", "interleaved_1f1b (1f1b)", "interleaved_1f1b"]
