"""Packed inputs and lists: a step is plain PyTorch's over micro-batches that are cut by hand, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import FxpipeError, Packed, RunError, Topology
from fxpipe.plan.inputs.rows import split_rows
from tests import packed_models as packed
from tests.harness import accumulate, assert_same, current_seat, engine_of, gradients_of, replica_of, strict
from tests.packed_models import SIX
from tests.thinned import every

Found = list[tuple[Tensor, dict[str, Tensor | None]]]


class Case(NamedTuple):
    """``batch(rows, seed)``, ``cut(batch, rows, sizes)``: ``rows`` is what each row has. ``batches``: three of them."""

    model: Callable[[], nn.Module]
    stages: int
    rules: Mapping[str, Any]
    batch: Callable[..., dict[str, Any]]
    cut: Callable[..., list[dict[str, Any]]]
    batches: Sequence[Any]


ROWS_OF_IMAGES = [SIX, [[(1, 1, 2)], [(1, 2, 2), (1, 2, 1)], [], []], [[], [], [], [(1, 2, 2)] * 2, [(1, 1, 1)]]]
BOXES = [[2, 1, 3, 2, 4], [1, 2, 1, 2], [3] * 6]
CASES = {
    "images": Case(packed.Seeing, 3, packed.IMAGES, packed.seen_batch, packed.cut_images, ROWS_OF_IMAGES),
    "sum": Case(packed.Summed, 3, packed.IMAGES, packed.seen_batch, packed.cut_images, ROWS_OF_IMAGES),
    "documents": Case(
        packed.Documents,
        3,
        packed.DOCUMENTS,
        packed.documents,
        packed.cut_documents,
        [packed.LENGTHS, [4, 1, 1, 6], [2, 9, 3, 3, 5, 2, 1]],
    ),
    "lists": Case(packed.Detecting, 2, packed.LISTS, packed.pictures, packed.cut_pictures, BOXES),
}


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def compiled(case: Case, microbatches: int, topology: Topology | None = None, **options: Any) -> fxpipe.ForwardBackward:
    """Captured by what takes sizes that vary, or lists."""
    options = {"batch_dim": case.rules, "check_batches": False, "example_kwargs": case.batch(case.batches[0])} | options
    topology = topology or Topology([("pipe", case.stages)])
    return fxpipe.compile(built(case), topology, microbatches=microbatches, **options)


def wanted(case: Case, microbatches: int, seed: int = 0) -> Found:
    """Loss and gradients of a step for each of the batches, in plain PyTorch."""
    found = []
    for place, rows in enumerate(case.batches):
        model, sizes = built(case), split_rows(len(rows), microbatches)
        parts = case.cut(case.batch(rows, seed + place), rows, sizes)
        if case.model is packed.Summed:
            totals = [model(**part) for part in parts]
            count = sum(one.count for one in totals)
            for one in totals:
                (one.total / count).backward()
            loss = torch.stack([one.total.detach() for one in totals]).sum() / count
        else:
            loss, _ = accumulate(lambda _, part, model=model: model(**part), parts, [float(size) for size in sizes])
        found.append((loss, gradients_of(model.named_parameters())))
    return found


def ran(name: str, microbatches: int, options: dict[str, Any]) -> Found:
    """The same on this engine, where each rank is given what it needs, and nothing else."""
    case = CASES[name]
    forward_backward = compiled(case, microbatches, **options)
    found = []
    for place, rows in enumerate(case.batches):
        forward_backward.zero_grad()
        needed = forward_backward.required_inputs
        batch = {name: value if name in needed else None for name, value in case.batch(rows, place).items()}
        loss = forward_backward(**batch)
        found.append((loss, gradients_of(forward_backward.named_parameters())))
    return found


def check(runs: Sequence[Found], name: str, microbatches: int) -> None:
    tolerance = 1e-6 if name == "sum" else 0.0
    for place, (loss, gradients) in enumerate(wanted(CASES[name], microbatches)):
        assert any(gradient is not None and gradient.any() for gradient in gradients.values())
        for run in runs:
            assert_same(run[place][0], loss, f"loss of batch {place}", tolerance)
            for parameter, gradient in run[place][1].items():
                assert_same(gradient, gradients[parameter], f"{parameter} of batch {place}", tolerance)


@pytest.mark.parametrize(
    ("name", "microbatches"),
    every(2, [*product(["images", "documents"], [1, 2, 3, 4]), ("sum", 3), ("lists", 2), ("lists", 4)]),
)
def test_a_step_is_that_of_micro_batches_cut_by_hand(name: str, microbatches: int) -> None:
    check([ran(name, microbatches, {})], name, microbatches)


@pytest.mark.parametrize(
    ("name", "engine"),
    [("images", "strict 0"), ("documents", "strict 1"), ("images", "distributed"), ("lists", "distributed")],
)
def test_so_it_is_on_ranks_of_which_each_is_given_what_it_needs(
    name: str, engine: str, request: pytest.FixtureRequest
) -> None:
    some = engine_of(engine, lambda: request.getfixturevalue("pool"))
    check(some(CASES[name].stages, ran, name, 4, {}), name, 4)


# --- the whole batch in one go


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_sum_over_packed_inputs_is_the_whole_batchs(microbatches: int) -> None:
    plain, batch = built(CASES["sum"]), packed.seen_batch(SIX)
    whole = plain(**batch)
    loss = whole.total / whole.count
    loss.backward()
    forward_backward = compiled(CASES["sum"], microbatches)
    assert_same(forward_backward(**batch), loss.detach(), "loss", 1e-6)
    for name, parameter in forward_backward.named_parameters():
        assert_same(parameter.grad, plain.get_parameter(name).grad, name, 1e-5)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_evaluate_gives_rows_tokens_and_lists_as_the_whole_batch_has_them(microbatches: int) -> None:
    for name, rows in [("images", SIX), ("documents", packed.LENGTHS), ("lists", [2, 1, 3, 2, 4]), ("lists", [1] * 4)]:
        case = CASES[name]
        batch = {key: value for key, value in case.batch(rows).items() if key not in ("labels", "targets")}
        with torch.no_grad():
            plain = built(case).eval()(**batch)
        output = compiled(case, microbatches).evaluate(**batch)
        if name == "lists":
            assert [list(one) for one in output] == [["boxes", "score"]] * len(rows)
            for mine, its in zip(output, plain, strict=True):
                assert_same(mine["boxes"], its["boxes"], "boxes", 1e-6)
                assert_same(mine["score"], its["score"], "score", 1e-6)
        else:
            assert_same(output, plain, name, 1e-6)


def scores() -> tuple[list[Tensor], list[Tensor]]:
    """Of this replica's images: those evaluated, and plain PyTorch's."""
    topology, case = Topology([("pipe", 2), ("data", 2)]), CASES["lists"]
    forward_backward = compiled(case, 2, topology)
    batch = case.batch([2, 1, 3, 2], replica_of(topology))
    del batch["targets"]
    output = forward_backward.evaluate(**batch, outputs="all")
    with torch.no_grad():
        plain = built(case).eval()(**batch)
    return [one["score"] for one in output], [one["score"] for one in plain]


def test_a_number_of_one_row_is_not_summed_over_replicas() -> None:
    runs = strict(0)(4, scores)
    assert len({tuple(map(float, wanted)) for _, wanted in runs}) == 2
    for found, wanted in runs:
        assert all(one.dim() == 0 for one in found)
        torch.testing.assert_close(found, wanted)


def test_tokens_of_micro_batches_of_one_document_are_no_rows_of_one() -> None:
    """(1, tokens) of each: as many everywhere, they would go on top of each other, too."""
    batch = packed.documents([3, 3, 3, 3])
    del batch["labels"]
    with torch.no_grad():
        plain = built(CASES["documents"]).eval()(**batch)
    assert_same(compiled(CASES["documents"], 4).evaluate(**batch), plain, "logits", 1e-6)


# --- other ways in


def stepped(name: str) -> Found:
    """A step of micro-batches that are split already, of other shapes each."""
    case = CASES[name]
    forward_backward = compiled(case, 4)
    parts = [case.batch(rows, place) for place, rows in enumerate(case.batches)]
    loss = forward_backward.step_microbatches([((), part) for part in parts])
    return [(loss, gradients_of(forward_backward.named_parameters()))]


@pytest.mark.parametrize("name", ["images", "documents", "lists"])
def test_micro_batches_that_are_split_already_need_no_cutting(name: str) -> None:
    case = CASES[name]
    model, parts = built(case), [case.batch(rows, place) for place, rows in enumerate(case.batches)]
    loss, _ = accumulate(lambda _, part: model(**part), parts, [float(len(rows)) for rows in case.batches])
    for ((got, gradients),) in strict(0)(case.stages, stepped, name):
        assert_same(got, loss, "loss")
        for parameter, gradient in gradients.items():
            assert_same(gradient, model.get_parameter(parameter).grad, parameter)


def test_a_dict_input_is_cut_by_rules_for_its_values() -> None:
    batch, case = packed.seen_batch(SIX), CASES["images"]
    rules = {
        "batch": {
            "image_grid_thw": Packed(lambda batch: (batch["input_ids"] == packed.START).sum(1)),
            "pixel_values": Packed(lambda batch: batch["image_grid_thw"].prod(1), of="batch.image_grid_thw"),
        }
    }
    forward_backward = compiled(case._replace(model=packed.Dicts), 4, batch_dim=rules, example_kwargs={"batch": batch})
    loss = forward_backward(batch)
    assert_same(loss, wanted(case, 4)[0][0], "loss")


def test_random_images_and_lengths_take_few_captures(captured: list[Any]) -> None:
    """With sizes of 0, 1 and more of rows, images and patches apart."""
    case, draw = CASES["images"], random.Random(0)
    forward_backward = compiled(case, 4, tracer="export")
    made = []
    for step in range(18):
        rows = [[(1, draw.randint(1, 3), 2)] * draw.choice([0, 0, 1, 2]) for _ in range(draw.randint(4, 8))]
        if any(rows):
            forward_backward(**packed.seen_batch(rows, step))
            made.append(len(captured))
    assert made[-1] < 14
    assert made[-1] < made[8] + 2


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
def test_packed_inputs_of_a_stage_that_gathers_are_put_in_a_row(tracer: str) -> None:
    torch.manual_seed(0)
    plain, batch = packed.Contrasting(), packed.documents(packed.LENGTHS)
    del batch["labels"]
    loss = plain(**batch)
    loss.backward()
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(
        packed.Contrasting(),
        Topology([("pipe", 2)]),
        microbatches=3,
        batch_dim={name: rule for name, rule in packed.DOCUMENTS.items() if name in batch},
        example_kwargs=batch,
        tracer=tracer,
    )
    assert_same(forward_backward(**batch), loss.detach(), "loss", 1e-6)
    for name, parameter in forward_backward.named_parameters():
        assert_same(parameter.grad, plain.get_parameter(name).grad, name, 1e-5)


def gathered_over_replicas(tracer: str) -> None:
    topology, batch = Topology([("pipe", 2), ("data", 2)]), packed.documents(packed.LENGTHS)
    del batch["labels"]
    rules = {name: rule for name, rule in packed.DOCUMENTS.items() if name in batch}
    model = packed.Contrasting("global")
    options: Any = {"microbatches": 2, "batch_dim": rules, "example_kwargs": batch, "tracer": tracer}
    forward_backward = fxpipe.compile(model, topology, **options, check_batches=False)
    forward_backward(**batch)


@pytest.mark.parametrize(
    ("tracer", "message"),
    [
        ("symbolic", "'cu_seqlens' is packed, and is given to a stage that gathers the rows of all replicas"),
        ("record", 'capture it for all rows: write tracer="symbolic", or gather="batch"'),
    ],
)
def test_packed_inputs_of_a_stage_that_gathers_over_replicas_are_refused(tracer: str, message: str) -> None:
    with pytest.raises(FxpipeError) as caught:
        strict(0)(4, gathered_over_replicas, tracer)
    assert message in str(caught.value)


# --- on a data axis

REPLICAS = [SIX, [[(1, 2, 2)] * 3, [], [(1, 1, 2)], []]]
"""Of other numbers of rows and images."""


def on_replicas(zero: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Two steps, each with the parameters after it."""
    topology, case = Topology([("pipe", 2), ("data", 2)]), CASES["images"]
    forward_backward = compiled(case, 4, topology, zero=zero)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        replica = replica_of(topology)
        loss = forward_backward(**packed.seen_batch(REPLICAS[replica], 10 * step + replica))
        optimizer.step()
        found.append((loss, {name: value.clone() for name, value in forward_backward.state_dict(full=True).items()}))
    return found


@pytest.mark.parametrize(("zero", "engine"), [(0, "strict 0"), (1, "distributed")])
def test_replicas_may_have_other_numbers_of_images(zero: int, engine: str, request: pytest.FixtureRequest) -> None:
    model = built(CASES["images"])
    optimizer, wanted_of = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        optimizer.zero_grad()
        parts, weights = [], []
        for replica, rows in enumerate(REPLICAS):
            sizes = split_rows(len(rows), 4)
            parts += packed.cut_images(packed.seen_batch(rows, 10 * step + replica), rows, sizes)
            weights += map(float, sizes)
        loss, _ = accumulate(lambda _, part: model(**part), parts, weights)
        optimizer.step()
        wanted_of.append((loss, {name: value.clone() for name, value in model.state_dict().items()}))
    for run in engine_of(engine, lambda: request.getfixturevalue("pool"))(4, on_replicas, zero):
        for (mine, state), (its, its_state) in zip(run, wanted_of, strict=True):
            assert_same(mine, its, "loss", 1e-6)
            for name, value in its_state.items():
                assert_same(state[name], value, name, 1e-5)


# --- what is refused, on all ranks, before anything is sent


def refusals() -> list[str]:
    """What each of these calls is refused with; and a good one behind each works."""
    case = CASES["images"]
    forward_backward, seat = compiled(case, 4), current_seat()
    rank = torch.distributed.get_rank() if seat is None else seat.rank
    good = case.batch(SIX)
    bad = [
        {"pixel_values": good["pixel_values"][:-1]},
        {"image_grid_thw": good["image_grid_thw"][1:]},
        {"image_grid_thw": -good["image_grid_thw"]},
        {"image_grid_thw": good["image_grid_thw"].float()},
        {"image_grid_thw": good["image_grid_thw"][:, 0]},
        {"image_grid_thw": None},
        {"input_ids": good["input_ids"].flip(0) if rank == 1 else good["input_ids"]},
    ]
    found = []
    for each in bad:
        with pytest.raises(RunError) as caught:
            forward_backward(**good | each)
        found.append(str(caught.value))
        forward_backward(**good)
    return found


REFUSED = [
    "the counts of 'pixel_values' sum to 22 for the 5 rows of 'image_grid_thw', and it has 21 rows; they are [4, 6,",
    "the counts of 'image_grid_thw' sum to 5 for the 6 rows of the batch, and it has 4 rows; they are [1, 0, 2, 1, 0",
    "the counts of 'pixel_values' are (-4, -6, -2, -4, -6); no count is below 0",
    "the counts of 'pixel_values' are float32 [5]; they are whole numbers in one dimension, one for each row",
    "what counts 'pixel_values' failed: IndexError: Dimension out of range",
    "input 'pixel_values' is counted for the rows of 'image_grid_thw', which no rank was given",
    "the counts of 'image_grid_thw' differ between the ranks of a pipe group: rank 0 counts (1, 0, 2, 1, 0, 1), rank 1",
]


@pytest.mark.parametrize("engine", ["strict 0", "distributed"])
def test_counts_that_do_not_fit_are_refused_on_all_ranks_alike(engine: str, request: pytest.FixtureRequest) -> None:
    for found in engine_of(engine, lambda: request.getfixturevalue("pool"))(3, refusals):
        for message, wanted_message in zip(found, REFUSED, strict=True):
            assert wanted_message in message


class Levels(nn.Module):
    """A list of two maps, each of which has all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        h = self.first(torch.stack(images))
        return [h, self.second(fxpipe.stage_boundary(h))]


class OneEach(nn.Module):
    """A list of a dict for each row, with as many boxes in each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, several: int) -> list[dict[str, Tensor]]:
        h = self.second(fxpipe.stage_boundary(self.first(x)))
        return [{"boxes": h[row].expand(several, 4)} for row in range(x.shape[0])]


class Turned(OneEach):
    """Its rows, or those of what is packed, are in the second dimension."""

    def forward(self, x: Tensor, several: int) -> Any:
        return self.second(fxpipe.stage_boundary(self.first(x))).T


@pytest.mark.parametrize("tracer", ["export", "record"])
def test_a_list_in_an_output_is_put_together_as_the_whole_batchs_or_refused(tracer: str) -> None:
    for model, batch, rules, microbatches, told in [
        (Levels, {"images": list(torch.randn(3, 4))}, {"images": Packed(1)}, 2, ""),
        (Levels, {"images": list(torch.randn(4, 4))}, {"images": Packed(1)}, 2, ""),
        (OneEach, {"x": torch.randn(4, 4), "several": 3}, 0, 2, ""),
        (OneEach, {"x": torch.randn(4, 4), "several": 2}, 0, 2, "a list of 2 for a micro-batch of 2"),
        (OneEach, {"x": torch.randn(4, 4), "several": 1}, 0, 4, "a list of 1 for a micro-batch of 1"),
        (Turned, {"x": torch.randn(4, 4), "several": 1}, 0, 2, "as many in dimension 1 as there are rows"),
    ]:
        plain = model()
        options: Any = {"batch_dim": rules, "microbatches": microbatches, "tracer": tracer, "example_kwargs": batch}
        forward_backward = fxpipe.compile(plain, Topology([("pipe", 2)]), check_capture=False, **options)
        if told:
            with pytest.raises(RunError, match=told):
                forward_backward.evaluate(**batch)
            continue
        output, wanted = forward_backward.evaluate(**batch), plain(**batch)
        leaves, spec = torch.utils._pytree.tree_flatten(wanted)
        mine, structure = torch.utils._pytree.tree_flatten(output)
        assert structure == spec
        for one, other in zip(mine, leaves, strict=True):
            assert_same(one, other.detach(), "output", 1e-6)


# --- objects beside tensors, which cannot be told to other ranks


class Held:
    """No plain data, and no container that pytree knows."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, boxes: list[dict[str, Any]]) -> Tensor:
        return self.linear(torch.stack([box["in"].held * box["by"] for box in boxes]))


class Beside(nn.Module):
    def forward(self, target: Tensor, targets: Any, y: Tensor) -> Tensor:
        return (y - target).square().mean() + (0 if targets is None else sum(one["by"].sum() for one in targets))


def boxes() -> list[dict[str, Any]]:
    torch.manual_seed(3)
    return [{"in": Held(torch.randn(4)), "by": torch.randn(1)} for _ in range(4)]


def of_objects(rules: dict[str, Any]) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    graph = fxpipe.StageGraph.from_callables(
        {"a": Holding(), "loss": Beside()}, [("a", "loss")], {"a": ["boxes"], "loss": ["target", "targets"]}
    )
    return fxpipe.compile(graph, Topology([("pipe", 2)]), microbatches=2, batch_dim=rules)


def stepped_with_objects(*rules: dict[str, Any]) -> list[str | float]:
    """The loss, twice, or what it is refused with; rank 0 alone has the boxes, the last one the targets."""
    found: list[str | float] = []
    seat = current_seat()
    rank = None if seat is None else seat.rank
    for rule in rules:
        forward_backward = of_objects(rule)
        for _ in range(2):
            try:
                given = (boxes() if rank != 1 else None, torch.ones(4, 4), boxes() if rank != 0 else None)
                found.append(float(forward_backward(*given)))
            except RunError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_lists_of_objects_are_cut_or_refused_on_all_ranks_alike(ranks: int) -> None:
    one = {"boxes": Packed(1)}
    rules: Any = one | {"targets": Packed(1)}, one | {"targets": None}, {"targets": Packed(1)}
    runs = strict(0)(2, stepped_with_objects, *rules) if ranks == 2 else [stepped_with_objects(*rules)]
    torch.manual_seed(0)
    plain, beside = Holding(), sum(float(box["by"]) for box in boxes())
    loss = float((plain(boxes()).detach() - 1).square().mean())
    for found in runs:
        assert found[:4] == pytest.approx([loss + beside / 2] * 2 + [loss + beside] * 2)
        for message in found[4:]:
            assert "input 'boxes' is or holds a Held, which is not cut" in str(message)
    assert all(found == runs[0] for found in runs)
