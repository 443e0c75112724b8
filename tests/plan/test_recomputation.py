"""Which stages are recomputed: those named, those that it helps, or as few as fit; and what a preview says of it."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import fxpipe
from fxpipe import Preview, Schedule, Topology, stage_boundary

WIDTH, MICROBATCHES = 32, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """A chain of stages that hold more and more."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512), frozen: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, widths))
        self.blocks[:frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x if place == 0 else stage_boundary(x, name=f"block{place}"))
        return x.square().mean()


def preview(model: nn.Module | None = None, ranks: int = 4, **options: Any) -> Preview:
    defaults = {"microbatches": MICROBATCHES, "example_args": (torch.randn(8192, WIDTH),)}
    return fxpipe.preview(model or Blocks(), Topology([("pipe", ranks)]), **defaults | options)


def again(schedule: Schedule) -> list[int]:
    """The stages that have an R."""
    return sorted({stage for stage, _ in schedule.dependencies.recomputed})


NAMES = preview().graph.names


def test_none_is_recomputed_by_default_or_where_all_fits() -> None:
    assert "recomputed" not in str(preview())
    for options in ({}, {"recompute": ()}, {"recompute": "auto", "hardware": "h100"}):
        assert again(preview(**options).schedule) == []


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_true_leaves_out_where_a_backward_follows_its_forward_at_once(schedule: Any) -> None:
    wanted = [0, 1, 2, 3] if schedule == "gpipe" else [0, 1, 2]
    plan = preview(recompute=True, schedule=schedule)
    assert again(plan.schedule) == wanted
    assert f"recomputed: {', '.join(NAMES[stage] for stage in wanted)}\n" in str(plan.graph)


def test_stages_are_recomputed_by_name_and_those_without_a_backward_have_nothing_to_recompute() -> None:
    assert again(preview(recompute=[NAMES[1], NAMES[3]]).schedule) == [1, 3]
    assert again(preview(Blocks(frozen=2), recompute=list(NAMES)).schedule) == [2, 3]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"recompute": ["block9"]}, fxpipe.PartitionError, "recompute names stage 'block9', which does not exist; did"),
        (
            {"recompute": "block1"},
            fxpipe.RunError,
            'recompute is \'block1\'; it is True, False, "auto", "layers" or',
        ),
        ({"recompute": "auto"}, fxpipe.RunError, "the memory of hardware=, which is not given"),
        ({"recompute": "auto", "hardware": "h100", "example_args": None}, fxpipe.ScheduleError, "example_args="),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=re.escape(told)):
        preview(**options)


def test_where_nothing_fits_the_nearest_plan_is_shown() -> None:
    plan = preview(recompute="auto", hardware=fxpipe.Hardware(memory=1e3))
    assert (plan.fits, plan.memory) == (False, 1e3)
    assert max(most_bytes(plan)) <= max(most_bytes(preview(recompute=())))


def test_a_table_says_itself_what_is_recomputed() -> None:
    table = preview(recompute=True).schedule
    with pytest.raises(fxpipe.ScheduleError, match="by its cells R"):
        preview(schedule=table, recompute=True)
    plan = preview(schedule=table)
    assert again(plan.schedule) == [0, 1, 2]
    assert "recomputed: " in str(plan.graph)


# --- as few as fit ---


def most_bytes(plan: Preview) -> list[float]:
    """What a preview says that each rank's activations are at their peak, in MiB."""
    (line,) = [line for line in str(plan).splitlines() if line.startswith("activations at their peak, MiB")]
    return [float(number) for number in re.findall(r"→ ([\d.]+)", line)]


def static(stages: list[int]) -> float:
    """16 bytes for each parameter of these stages: value, gradient and two moments."""
    return 16.0 * sum(p.numel() for stage in stages for p in Blocks().blocks[stage].parameters())


def test_only_ranks_that_are_too_full_are_recomputed() -> None:
    """1F1B holds 4, 3, 2, 1 micro-batches of equal stages; rank 0 has the batch, which takes less than one of them."""
    model = Blocks((512,) * 4)
    held = most_bytes(preview(model, recompute=()))
    assert held == sorted(held, reverse=True)
    own = 16.0 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    limit = held[2] * 2**20 + own + 4 * 8192 * WIDTH + 2000
    plan = preview(model, recompute="auto", hardware=fxpipe.Hardware(memory=limit))
    assert again(plan.schedule) == [0, 1]


def test_auto_is_no_slower_than_any_choice_that_fits() -> None:
    """Of 2 ranks with 3 stages, against all 8 choices."""
    widths, names = (64, 128, 256), NAMES[:3]
    options: dict[str, Any] = {"ranks": 2, "schedule": "gpipe", "placement": dict(zip(names, [0, 0, 1], strict=True))}
    every = [
        preview(Blocks(widths), recompute=[name for name, flag in zip(names, flags, strict=True) if flag], **options)
        for flags in itertools.product([False, True], repeat=3)
    ]
    base = [static([0, 1]), static([2])]

    def peak(plan: Preview) -> float:
        return max(held * 2**20 + own for held, own in zip(most_bytes(plan), base, strict=True))

    least, most = peak(every[-1]), peak(every[0])
    room = least + 0.35 * (most - least)
    fitting = [again(plan.schedule) for plan in every if peak(plan) <= room]
    chosen = preview(Blocks(widths), recompute="auto", hardware=fxpipe.Hardware(memory=room + 2000), **options)
    assert peak(chosen) <= room + 2000
    assert len(chosen.graph.recomputed | chosen.graph.by_layers) <= min(map(len, fitting))
    assert all(makespan(chosen) <= makespan(plan) * 1.001 for plan in every if again(plan.schedule) in fitting)


def makespan(plan: Preview) -> float:
    """What a preview says that recomputation costs, as a part of the step without."""
    (found,) = re.findall(r"makespan ([+-][\d.]+)%", str(plan))
    return 1 + float(found) / 100


def test_a_placement_that_fits_only_with_recomputation_is_found() -> None:
    options: dict[str, Any] = {"ranks": 2, "schedule": "gpipe", "boundaries": "auto"}
    model = Blocks((256,) * 4)
    own = 16.0 * sum(parameter.numel() for parameter in model.parameters()) / 2
    most = max(most_bytes(preview(model, recompute=(), **options))) * 2**20
    room = own + most / 2
    assert preview(model, hardware=fxpipe.Hardware(memory=room), **options).fits is False
    plan = preview(model, hardware=fxpipe.Hardware(memory=room), recompute="auto", **options)
    assert again(plan.schedule)
    assert max(most_bytes(plan)) * 2**20 + own <= room * 1.01


def test_later_plans_recompute_the_same_stages() -> None:
    forward_backward = fxpipe.compile(
        Blocks(), Topology([("pipe", 4)]), microbatches=4, recompute=[NAMES[2]], schedule="gpipe"
    )
    forward_backward(torch.randn(8, WIDTH))
    forward_backward.record_timeline()
    forward_backward.step_microbatches([((torch.randn(2, WIDTH),), {}) for _ in range(3)])
    assert {a.stage for a in forward_backward.timeline().spans if a.kind is fxpipe.Kind.R} == {2}
    assert again(forward_backward.reschedule("greedy")) == [2]
    assert torch.isfinite(forward_backward(torch.randn(8, WIDTH)))


def test_what_the_model_checkpoints_is_reckoned_with_as_it_runs() -> None:
    """In an R a checkpointed part keeps what is inside: its peak is that of the part without the checkpoint."""

    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model = Blocks()
    model.blocks[1] = Checkpointed(128)
    options: dict[str, Any] = {"schedule": "gpipe", "tracer": "record"}
    held = most_bytes(preview(model, recompute=[NAMES[1]], **options))
    assert held[1] == most_bytes(preview(Blocks(), recompute=[NAMES[1]], **options))[1]
    assert most_bytes(preview(model, recompute=(), **options))[1] < most_bytes(preview(recompute=(), **options))[1]
