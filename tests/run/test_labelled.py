"""Labels of a profile: every action of the table, by its name there, while torch.profiler runs; and else none."""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fxpipe
from fxpipe import labels
from fxpipe.run.actions.actions import Bound
from tests.harness import compiled
from tests.models import CASES
from tests.pool import Pool

NAME = "two towers on 2 ranks"


def profiled(forward_backward: fxpipe.ForwardBackward, **batch: Any) -> Counter[str]:
    """The labels of a step."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        forward_backward(**batch)
    names = [event.name for event in found.events() or []]
    return Counter(name.removeprefix("fxpipe ") for name in names if name.startswith("fxpipe "))


def actions_of(forward_backward: fxpipe.ForwardBackward, *ranks: int) -> Counter[str]:
    schedule = forward_backward.schedule
    rows = [schedule.rows[rank] for rank in ranks or range(len(schedule.rows))]
    return Counter(f"{action} {schedule.name_of(action.stage)}" for row in rows for action in row)


def without_others(told: Counter[str]) -> Counter[str]:
    return Counter({name: count for name, count in told.items() if name[0].isdigit()})


@pytest.mark.parametrize("options", [{"schedule": "zb_h1"}, {"recompute": True}], ids=str)
def test_each_action_of_the_table_has_a_region_in_the_middle_of_a_run(options: dict[str, Any]) -> None:
    forward_backward, batch = compiled(CASES[NAME], **options), CASES[NAME].batch()
    forward_backward(**batch)
    told = profiled(forward_backward, **batch)
    assert without_others(told) == actions_of(forward_backward)
    assert told["settle"] == told["loss"] == 1
    sent = {tuple(name.split()[1:]) for name in told if name.startswith("send ")}
    assert sent
    ran = {name[:1] + name[2:] for name in actions_of(forward_backward)}  # a gradient is B's or, in halves, I's
    assert {f"{name[:1]}{name[2:]}" for name in map(" ".join, sent)} <= ran
    forward_backward(**batch)
    assert profiled(forward_backward, **batch) == told


def test_without_a_profiler_nothing_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> NoReturn:
        raise AssertionError(args)

    forward_backward, batch = compiled(CASES[NAME]), CASES[NAME].batch()
    profiled(forward_backward, **batch)
    monkeypatch.setattr(labels, "record_function", fail)
    monkeypatch.setattr(Bound, "_labelled", fail)
    forward_backward(**batch)
    with pytest.raises(AssertionError), profile(activities=[ProfilerActivity.CPU]):
        forward_backward(**batch)


def test_an_action_that_is_left_out_has_none() -> None:
    """Of a micro-batch without weight no backward is run."""
    forward_backward = compiled(CASES[NAME], loss_weight=lambda *inputs: float(not torch.any(inputs[0] == 7.0)))
    batch = CASES[NAME].batch()
    first = next(iter(batch))
    batch[first] = batch[first].clone()
    batch[first][0] = 7.0
    told = without_others(profiled(forward_backward, **batch))
    left_out = actions_of(forward_backward) - told
    assert {name[1:3] for name in left_out} == {"B0"}
    assert not told - actions_of(forward_backward)


def of_replicas() -> tuple[Counter[str], Counter[str], Counter[str]]:
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    forward_backward = compiled(CASES[NAME], topology=topology, checks=fxpipe.Checks(batches=False))
    batch = CASES[NAME].batch()
    first, second = (profiled(forward_backward, **batch) for _ in range(2))
    return first, second, actions_of(forward_backward, topology.coordinate(torch.distributed.get_rank())["pipe"])


def test_each_rank_labels_its_own_actions_and_its_reductions(pool: Pool) -> None:
    for first, second, wanted in pool.run(of_replicas, ranks=4):
        assert without_others(first) == without_others(second) == wanted
        assert any(name.startswith("reduce ") for name in second)
        assert second["wait for a reduction"] > 0
