"""Virtual time: a step on simulated GPUs takes exactly what ``schedule.simulate`` says, where stages alone take time.

Messages take ``comm``, from none to twice a forward. What waits for what it need not, by a forward or by a message,
would show as a whole unit of time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.gpus import Gpus
from tests.virtual_work import Setting, Sources, chain, slowest, steps_of

ALIKE = (1.0,) * 4
TOWERS: Sources = ((), (0,), (), (1, 2))
ENCODER: Sources = ((), (0,), (1,), (2,), (3,))
EVERYWHERE = ((0, 1, 2, 3), 0, 1, 2, 3)
FOLDED = (0, 1, 2, 3, 3, 2, 1, 0)


def on_a_chain(schedule: str, forward: tuple[float, ...], m: int = 6, **more: object) -> Setting:
    placement = FOLDED if schedule == "zb_v" else tuple(stage % 4 for stage in range(len(forward)))
    return Setting(schedule, m, forward, chain(len(forward)), placement, **more)  # type: ignore[arg-type]


def towers(schedule: str, tower: float, other: float, join: float, **more: object) -> Setting:
    return Setting(schedule, 6, (tower, tower, other, join), TOWERS, (0, 1, 2, 3), **more)  # type: ignore[arg-type]


def encoder(schedule: str, seconds: float) -> Setting:
    return Setting(schedule, 8, (seconds, *ALIKE), ENCODER, EVERYWHERE)


def with_skips(seed: int) -> Setting:
    """A random chain whose stages also read others, on four ranks, a stage or two each."""
    draw = random.Random(seed)
    stages = 4 * draw.choice([1, 1, 2])
    also = [draw.randrange(stage) for stage in range(1, stages)]
    reads = [
        sorted({stage, *([other] if draw.random() < 0.4 else [])}, reverse=True) for stage, other in enumerate(also)
    ]
    forward = tuple(draw.choice([0.2, 0.5, 1, 1, 1.5]) for _ in range(stages))
    name = draw.choice(["1f1b", "gpipe", "zb_h1", "greedy", "interleaved_1f1b"])
    return Setting(name, draw.choice([4, 6, 8]), forward, ((), *map(tuple, reads)), tuple(s % 4 for s in range(stages)))


FEW = [
    on_a_chain("gpipe", ALIKE),
    on_a_chain("1f1b", (0.2, 1, 1, 0.4)),
    on_a_chain("zb_h1", ALIKE),
    on_a_chain("interleaved_1f1b", ALIKE * 2, m=4),
    on_a_chain("gpipe", ALIKE, frozen=1),
    encoder("1f1b", 0.5),
    towers("1f1b", 1, 0.5, 0.3),
    towers("store_all", 1, 0.5, 3, gather="batch"),
    with_skips(5),
    on_a_chain("1f1b", ALIKE, 8, rows=(3, 1, 6, 2, 9, 1, 4, 2), in_flight="2x"),
]
ALL = [
    *(on_a_chain(name, ALIKE, 8, rows=(5, 1, 2, 8, 1, 1, 4, 3)) for name in ("gpipe", "1f1b", "greedy")),
    towers("1f1b", 1, 0.5, 0.3, rows=(2, 7, 1, 1, 4, 3), in_flight="2x"),
    *(on_a_chain(name, ALIKE, m) for name in ("gpipe", "1f1b", "zb_h1", "greedy") for m in (4, 16)),
    *(on_a_chain(name, (1, 0.1, 1, 0.1)) for name in ("gpipe", "1f1b", "zb_h1", "greedy")),
    on_a_chain("interleaved_1f1b", ALIKE * 2, 8),
    on_a_chain("interleaved_1f1b", (0.1, *(1.0,) * 6, 0.3)),
    on_a_chain("zb_v", ALIKE * 2, 8),
    *(encoder(name, seconds) for name in ("1f1b", "greedy") for seconds in (1, 2)),
    *(
        on_a_chain(name, fs, 8, frozen=1)
        for name in ("1f1b", "gpipe", "zb_h1")
        for fs in (ALIKE, (0.3, 1, 1, 1), (2, 1, 1, 1))
    ),
    *(on_a_chain(name, (0.3, 0.3, 1, 1), 8, frozen=2) for name in ("1f1b", "gpipe")),
    *(on_a_chain(name, ALIKE, 8, recompute=True) for name in ("1f1b", "gpipe")),
    *(towers(name, *fs) for name in ("1f1b", "gpipe", "zb_h1") for fs in ((1, 1, 1), (1, 0.5, 0.3), (0.3, 1, 2))),
    *(towers(name, 1, 0.5, 3, gather="batch") for name in ("1f1b", "store_all", "group_interleaved", "cached")),
    *map(with_skips, range(12)),
]


def differing(gpus: Gpus, settings: Sequence[Setting], comms: Sequence[float]) -> list[tuple[str, float, float, float]]:
    """The steps whose virtual time is not the plan's: (setting, comm, planned, virtual)."""
    rows = slowest(gpus.run(steps_of, settings, comms, ranks=4, seconds=100 + 20 * len(settings)))
    assert len(rows) == len(settings) * len(comms)
    return [row for row in rows if row[3] != pytest.approx(row[2], rel=1e-9)]


def test_a_step_takes_what_its_plan_says(gpus: Gpus) -> None:
    assert differing(gpus, FEW, (0, 0.5, 1.2, 2)) == []


@pytest.mark.parametrize("part", range(4))
def test_each_family_and_shape_takes_what_its_plan_says(part: int, gpus: Gpus) -> None:
    assert differing(gpus, ALL[part::4], (0, 0.2, 0.5, 1.2, 2)) == []
