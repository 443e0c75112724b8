"""The choice for each stage: its activations stay, are made again, or wait in the host's memory."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.errors import DoesNotFit
from fxpipe.options import Options
from fxpipe.plan.activations import AGAIN, BY_LAYERS, HOST, Choice, marked, searched_choice
from fxpipe.schedules import build
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.in_flight import peak_bytes
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, WORKED, chain, random_bare
from tests.plan.test_recomputation import Blocks, again, preview


@dataclass
class Case:
    """A bare stage graph at given costs, which answers the search as a model's ``StageGraph`` and ``Staged`` do."""

    name: str
    edges: Sequence[tuple[int, int]]
    microbatches: int
    placement: Sequence[int]
    costs: Costs
    backward: Sequence[bool]
    layered: Costs | None = None
    """The costs of stages whose layers are checkpointed."""

    def __post_init__(self) -> None:
        self.names = [f"stage{stage}" for stage in range(len(self.placement))]
        self.static_bytes = [0.0] * (1 + max(self.placement))
        self.stages = [
            SimpleNamespace(index=index, name=name, has_backward=trained, by_layers=self.layered)
            for index, (name, trained) in enumerate(zip(self.names, self.backward, strict=True))
        ]

    def __iter__(self) -> Any:
        return iter(self.stages)

    def ranks(self, stage: int) -> tuple[int, ...]:
        return (self.placement[stage],)

    def costs_with(self, recomputed: Sequence[bool], by_layers: Sequence[bool] = ()) -> Costs:
        if self.layered is None:
            return self.costs

        def per_stage(name: str) -> list[float]:
            pairs = zip(getattr(self.costs, name), getattr(self.layered, name), by_layers, strict=True)
            return [pair[is_by_layers] for *pair, is_by_layers in pairs]

        names = "backward", "activation_bytes", "again_bytes"
        return replace(self.costs, **{name: tuple(per_stage(name)) for name in names})

    def peaks(self, schedule: Schedule, costs: Costs) -> tuple[float, ...]:
        return peak_bytes(schedule, costs)

    def make(self, choice: Choice, rooms: Sequence[float] | None) -> Schedule:
        return build(
            self.name,  # type: ignore[arg-type]
            self.edges,
            self.microbatches,
            self.placement,
            backward=self.backward,
            costs=self.costs,
            recompute=marked(choice, AGAIN),
            offload=marked(choice, HOST),
            memory=rooms,
        )

    def chosen(self, room: float, recompute: Any = False, offload: Any = False) -> tuple[float, str]:
        """The makespan, and a letter for each stage: K, R or O."""
        options = Options(recompute=recompute, offload=offload, hardware=fxpipe.Hardware(memory=room))
        choice = searched_choice(options, self, self.make, self, room)  # type: ignore[arg-type]
        schedule = self.make(choice, [room] * len(self.static_bytes) if HOST in choice else None)
        costs = self.costs_with(marked(choice, AGAIN), marked(choice, BY_LAYERS))
        assert max(peak_bytes(schedule, costs)) <= room * (1 + 1e-9)
        letters = {AGAIN: "R", HOST: "O", BY_LAYERS: "L"}
        return schedule.simulate(costs).makespan, "".join(letters.get(each, "K") for each in choice)


def case(name: str, edges: Any, placement: list[int], forward: float, copy: float, m: int = 16) -> Case:
    stages = len(placement)
    costs = Costs.of(
        stages, forward, 2 * forward, activation_bytes=forward, input_bytes=0.1 * forward, copy=copy * forward
    )
    return Case(name, edges, m, placement, costs, [True] * stages)


CHAIN = ("1f1b", chain(4), [0, 1, 2, 3], 1.0)
ROUND = ("interleaved_1f1b", chain(8), [0, 1, 2, 3] * 2, 0.5)
TOWERS = ("1f1b", WORKED, [0, 1, 2, 3, 4], 1.0)
CHOICES = [
    # (graph), room, copy / F, and the makespan with recomputation, with offload, and with both
    (CHAIN, 2, 1, 70, 57, 57),
    (CHAIN, 2, 1.5, 70, 62.5, 62.5),
    (CHAIN, 2, 3, 70, 88, 70),
    (CHAIN, 3, 2, 69, 57, 57),
    (CHAIN, 3, 3, 69, 58, 58),
    pytest.param(ROUND, 2, 1, 66, 52.5, 52.5, marks=pytest.mark.long),
    pytest.param(ROUND, 2, 2, 66, 56.5, 56.5, marks=pytest.mark.long),
    pytest.param(ROUND, 2, 3, 66, 77.5, 62, marks=pytest.mark.long),
    (TOWERS, 2, 1, 67, 54, 54),
    (TOWERS, 2, 3, 67, 84, 67),
]


@pytest.mark.parametrize(("graph", "room", "copy", "recomputed", "offloaded", "both"), CHOICES)
def test_auto_takes_the_faster_way(
    graph: Any, room: float, copy: float, recomputed: float, offloaded: float, both: float
) -> None:
    of = case(*graph, copy)
    found = [of.chosen(room, *options)[0] for options in (("auto", False), (False, "auto"), ("auto", "auto"))]
    assert found == [recomputed, offloaded, both]


def test_a_list_beside_auto_marks_no_other_stage() -> None:
    # Each stage whose rank is too full takes the only way that the options leave it, though offload is faster.
    assert case(*CHAIN, 1.0).chosen(2, "auto", ["stage0"]) == (70, "RRKK")
    assert case(*CHAIN, 1.0).chosen(3, "auto", ["stage0"]) == (57, "OKKK")
    assert case(*CHAIN, 1.0).chosen(3, "auto", ["stage1"]) == (69, "RKKK")


def test_only_ranks_that_are_too_full_are_marked() -> None:
    assert case(*CHAIN, 1.0).chosen(2, "auto", "auto") == (57, "OOKK")
    assert case(*CHAIN, 3.0).chosen(2, "auto", "auto") == (70, "RRKK")
    assert case(*CHAIN, 1.0).chosen(4, "auto", "auto") == (57, "KKKK")
    assert case(*CHAIN, 1.0).chosen(2, ["stage0"], "auto")[1] == "ROKK"
    with pytest.raises(DoesNotFit, match=r"rank 0 takes 1 bytes even where all .* recomputed or offloaded"):
        case(*CHAIN, 1.0).chosen(0.5, "auto", "auto")


def test_auto_recomputes_a_stage_whole_or_by_layers() -> None:
    """1F1B holds 4, 3, 2, 1 micro-batches. A whole stage holds one, and the inputs (0.1) of the others. By layers it
    holds the inputs of layers (0.4 of all) of each micro-batch, and in a backward one layer (0.3)."""

    def stages(last: float) -> Case:
        sizes = [1.0, 1.0, 1.0, last]
        costs = Costs.of(4, 1, 2, activation_bytes=sizes, input_bytes=0.1)
        by_layers = [0.4 * size for size in sizes]
        layered = replace(
            costs,
            backward=(3.0,) * 4,
            activation_bytes=tuple(by_layers),
            again_bytes=tuple(0.3 * size for size in sizes),
        )
        zeros = replace(costs, again_bytes=(0.0,) * 4)
        return Case("1f1b", chain(4), 16, [0, 1, 2, 3], zeros, [True] * 4, layered)

    # a whole stage: 1.3, 1.2, 1.1, 1; by layers 1.9, 1.5, 1.1, 0.7
    assert stages(1.0).chosen(1.4, "auto")[1][:2] == "RR"
    # the last stage keeps 2, whole or not, and 1.4 by layers; so neither kind fits alone
    seconds, marks = stages(2.0).chosen(1.45, "auto")
    assert (marks[:2], marks[3]) == ("RR", "L")
    # 1F1B with 1 + 3 for each of 16 micro-batches on the last rank, and one F before and the others' B behind it
    assert seconds == pytest.approx(16 * 4 + 3 * (1 + 3), abs=3.0)
    with pytest.raises(DoesNotFit, match=r"rank 3 takes .* recomputed or recomputed by layers"):
        stages(4.0).chosen(1.45, "auto")


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.long] * (part > 0)) for part in range(5)])
def test_both_are_never_slower_than_recomputation_alone(part: int) -> None:
    tried = 0
    for seed in range(40 * part, 40 * (part + 1)):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 3 == 0, most=5)
        costs = Costs.of(
            graph.stages,
            [draw.choice([1, 1, 3]) for _ in range(graph.stages)],
            [draw.choice([2, 2, 5]) for _ in range(graph.stages)],
            activation_bytes=[draw.choice([1, 2]) for _ in range(graph.stages)],
            input_bytes=0.2,
            copy=draw.choice([0.5, 1, 3]),
        )
        name = draw.choice([name for name in FAMILIES if name != "greedy"])
        of = Case(name, graph.edges, 4, graph.placement, costs, graph.backward)
        room = (
            draw.uniform(0.5, 1)
            * max(
                build(name, graph.edges, 4, graph.placement, backward=graph.backward, costs=costs).planned().peak_bytes
                or (0,)
            )
            + 1e-3
        )  # type: ignore[arg-type]
        try:
            alone = of.chosen(room, "auto")[0]
        except DoesNotFit:
            continue
        tried += 1
        assert of.chosen(room, "auto", "auto")[0] <= alone * (1 + 1e-9), seed
    assert tried > 10


# --- the options, on a model ---

HARDWARE = fxpipe.Hardware(flops=75e12, flops_16=150e12, bandwidth=1.2e12, link=1e15, link_between=1e15, latency=0)


def offloaded(schedule: Schedule) -> list[int]:
    return sorted({stage for stage, _ in schedule.dependencies.offloaded})


def test_options_name_the_stages_that_may_leave() -> None:
    names = preview().graph.names
    assert "offloaded" not in str(preview())
    plan = preview(offload=[names[0], names[1]])
    assert offloaded(plan.schedule) == [0, 1]
    assert f"offloaded: {names[0]}, {names[1]}" in str(plan.graph)
    assert re.search("activations at their peak, MiB: .*\nin the host's memory at their peak, MiB: rank 0", str(plan))
    assert "a copy of a micro-batch to the host, ms: " in str(plan)
    assert "makespan +0.0%" in str(plan)
    assert offloaded(preview(Blocks(frozen=2), offload=True).schedule) == []  # the stages behind hold one micro-batch
    both = preview(offload=[names[0]], recompute=[names[1]])
    assert (offloaded(both.schedule), again(both.schedule)) == ([0], [1])
    rest = preview(offload=[names[0]], recompute=True)
    assert (offloaded(rest.schedule), again(rest.schedule)) == ([0], [1, 2])


def test_what_w_needs_may_leave_too() -> None:
    """No micro-batch waits between F and I on the last rank, and four wait between I and W."""
    plan = preview(schedule="zb_h1", offload=True, hardware=replace(HARDWARE, host_link=1e13))
    assert offloaded(plan.schedule) == [0, 1, 2, 3]
    assert f"offloaded: {', '.join(plan.graph.names)}" in str(plan)
    assert "rank 3 17.0 → 8.500\n" in str(plan)  # two in place of four
    assert plan.ranks[3].host > 0


def test_a_node_s_memory_limits_what_leaves() -> None:
    """Each of a node's 4 ranks has a quarter of the node's memory."""
    most = max(rank.host for rank in preview(offload=True).ranks)
    assert most > 0
    assert most in [rank["host"] for rank in preview(offload=True).as_dict()["ranks"]]
    assert offloaded(preview(offload=True, hardware=fxpipe.Hardware(host_memory=4 * most)).schedule)
    with pytest.raises(fxpipe.ScheduleError, match=r"of rank . in the host's memory, and each of a node's 4 ranks has"):
        preview(offload=True, hardware=fxpipe.Hardware(host_memory=4 * most - 4))


def test_names_need_no_example() -> None:
    names = preview().graph.names
    assert offloaded(preview(offload=[names[0]], example_args=None).schedule) == [0]
    told = preview(offload=["*.0"], recompute=["block[12]"], example_args=None)
    assert offloaded(told.schedule) == [0]
    assert {stage for stage, _ in told.schedule.dependencies.recomputed} == {1, 2}


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"offload": ["block9"]}, fxpipe.PartitionError, "offload names stage 'block9', which does not exist; did"),
        ({"offload": "block1"}, fxpipe.RunError, "offload is 'block1'; it is True, False, \"auto\" or"),
        ({"offload": "auto"}, fxpipe.RunError, "the memory of hardware=, which is not given"),
        ({"offload": True, "recompute": True}, fxpipe.RunError, "both take all stages"),
        ({"offload": ["block1"], "recompute": ["block1"]}, fxpipe.RunError, "'block1' is in recompute= and in offload"),
        ({"offload": ["b*1"], "recompute": ["block1"]}, fxpipe.PartitionError, "'block1' is in recompute= and in offl"),
        (
            {"offload": True, "example_args": None},
            fxpipe.ScheduleError,
            "offload=True needs the stages' costs: pass ex",
        ),
        (
            {"offload": "auto", "hardware": fxpipe.Hardware(memory=1e9), "example_args": None},
            fxpipe.ScheduleError,
            "example_args=",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=re.escape(told)):
        preview(**options)


def test_a_table_says_itself_what_is_offloaded() -> None:
    table = preview(offload=True).schedule
    with pytest.raises(fxpipe.ScheduleError, match="by its cells O and P"):
        preview(schedule=table, offload=True)
    assert offloaded(preview(schedule=table).schedule) == offloaded(table) == [0, 1]  # stage 2 has no time to copy


def test_a_compiled_model_offloads_in_every_kind_of_batch_and_keeps_its_bits() -> None:
    gradients = []
    for offload in (False, True):
        torch.manual_seed(0)
        model, batches = Blocks(), [torch.randn(size, 32) for size in (64, 48, 64)]
        step = fxpipe.compile(
            model, fxpipe.Topology([("pipe", 4)]), microbatches=8, offload=offload, example_args=(batches[0],)
        )
        for batch in batches:
            step(batch)
        step.evaluate(batches[0])
        assert bool(offloaded(step.schedule)) == offload
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
