"""A kind of action that this test adds, by one row of the table and one runner, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Action, Schedule, Topology
from fxpipe.run.actions.actions import RUNNERS, BoundAction
from fxpipe.schedules.kinds import KINDS, Kind, Times, Tone
from fxpipe.schedules.lower import Compute
from fxpipe.schedules.verify import prove


def three(costs: Times) -> tuple[float, ...]:
    return (3.0,) * len(costs.forward)


NOTHING = Kind("N", "nothing", Tone(0.8, 0.0), times=three, change=lambda held: 0.0, is_optional=True, after="F")
ROWS = "0F0 0N0 0F1 0B0 0B1", "1F0 1B0 1N0 1F1 1B1"
RAN: list[str] = []


class Nothing(BoundAction):
    """Does nothing, and says when."""

    def run(self, arrived: list[Any]) -> None:
        RAN.append(str(self.action))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(fxpipe.stage_boundary(self.below(x))).square().mean()


@pytest.fixture(autouse=True)
def a_kind_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "N", NOTHING)
    monkeypatch.setitem(RUNNERS, NOTHING, Nothing)
    RAN.clear()


def table(rows: tuple[str, str] = ROWS) -> Schedule:
    cells = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    return Schedule(cells, edges=((0, 1),), placement=(0, 1), backward=(True, True), microbatches=2, name="own")


def test_it_is_verified_simulated_and_printed() -> None:
    schedule = table()
    schedule.verify()
    steps = prove(schedule, schedule.instructions, schedule.links)
    assert [str(step.action) for _, step in steps if isinstance(step, Compute)].count("0N0") == 1
    timeline = schedule.simulate(forward=1, backward=2)
    spans = {str(action): (span.start, span.end) for action, span in timeline.spans.items()}
    # Rank 0: F 0-1, N 1-4, F 4-5. Rank 1: F 1-2, B 2-4, N 4-7, F 7-8, B 8-10. Rank 0: B 5-7, and B 10-12.
    assert spans["0N0"] == (1, 4)
    assert spans["1N0"] == (4, 7)
    assert timeline.makespan == 12
    assert timeline.lower_bound <= 12
    assert timeline.peak_in_flight == (2, 1)  # as without it
    assert "0N0" in str(schedule)
    with pytest.raises(fxpipe.ScheduleError, match="deadlocks"):
        table(("0N0 0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")).verify()  # N waits for its forward


def test_it_is_drawn_and_written_and_read(tmp_path: Path) -> None:
    schedule = table()
    schedule.to_csv(tmp_path / "own.csv")
    assert Schedule.from_csv(tmp_path / "own.csv").rows == schedule.rows
    for write, name in ((schedule.to_svg, "own.svg"), (schedule.to_html, "own.html"), (schedule.to_trace, "own.json")):
        write(tmp_path / name)
        assert "nothing" in (tmp_path / name).read_text()
    assert "nothing of micro-batch 0 in stage 0" in (tmp_path / "own.svg").read_text()


def test_it_runs_and_the_timeline_shows_it() -> None:
    torch.manual_seed(0)
    model, batch = Two(), torch.randn(8, 4)
    schedules = {"with": table(), "without": "gpipe"}
    losses, gradients = {}, {}
    for name, schedule in schedules.items():
        model.zero_grad()
        step = fxpipe.compile(model, Topology([("pipe", 2)]), microbatches=2, schedule=schedule)
        step.record_timeline()
        losses[name] = step(batch)
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        spans = {str(action) for action in step.timeline().spans}
        assert ({"0N0", "1N0"} <= spans) == (name == "with")
        evaluated = step.evaluate(batch)
        assert torch.allclose(evaluated, losses[name])
    assert RAN == ["0N0", "1N0"]  # in the step, and not in evaluate
    assert losses["with"] == losses["without"]
    assert all(map(torch.equal, gradients["with"], gradients["without"]))
