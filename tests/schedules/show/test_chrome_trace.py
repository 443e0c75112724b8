"""The trace: what the Trace Event Format asks for, at the right times, and arrows that begin and end in slices.

Its whole text is in test_golden's files.
"""

from __future__ import annotations

import functools
import json
import random
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import Span
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Timeline
from fxpipe.schedules.show.chrome_trace import chrome_trace
from tests.graphs import FAMILIES, chain, random_bare
from tests.thinned import seeds

Event = dict[str, Any]


def events(timeline: Timeline, *phases: str) -> list[Event]:
    trace = json.loads(chrome_trace(timeline))
    return [event for event in trace["traceEvents"] if not phases or event["ph"] in phases]


def slices(timeline: Timeline) -> dict[str, Event]:
    listed = events(timeline, "X")
    found = {event["name"]: event for event in listed}
    assert len(found) == len(listed)
    return found


@functools.cache
def random_timelines(name: str) -> list[Timeline]:
    made = []
    for seed in seeds(24):
        draw = random.Random(seed)
        graph = random_bare(seed, frozen=seed % 2 == 0)
        forward = [draw.choice([0.5, 1, 1 / 3]) for _ in range(graph.stages)]
        timeline = graph.build(name, draw.randint(1, 12)).simulate(forward, backward=draw.choice([1, 2]), comm=0.25)
        made.append(replace(timeline, measured=seed % 3 == 0))
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_each_action_is_a_slice_of_its_ranks_thread_in_microseconds(name: str) -> None:
    for timeline in random_timelines(name):
        microseconds = 1e6 if timeline.measured else 1e3
        found = slices(timeline)
        assert set(found) == {str(action) for action in timeline.spans}
        for action, (start, end) in timeline.spans.items():
            event = found[str(action)]
            assert event["ts"] == pytest.approx(start * microseconds, abs=0.001)
            assert event["ts"] + event["dur"] == pytest.approx(end * microseconds, abs=0.001)
            assert event["tid"] == 1 + timeline.schedule.placement[action.stage]
            assert event["args"]["microbatch"] == action.microbatch


@pytest.mark.parametrize("name", FAMILIES)
def test_slices_of_a_thread_do_not_overlap(name: str) -> None:
    """To the nanosecond: a viewer would take two that do for nested ones."""
    for timeline in random_timelines(name):
        threads = defaultdict(list)
        for event in events(timeline, "X"):
            start = round(event["ts"] * 1000)
            threads[event["tid"]].append((start, start + round(event["dur"] * 1000)))
        for spans in threads.values():
            spans.sort()
            assert all(first[1] <= second[0] for first, second in pairwise(spans))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_arrow_for_each_dependency_between_ranks(name: str) -> None:
    for seed, timeline in enumerate(random_timelines(name)):
        graph = random_bare(seed, frozen=seed % 2 == 0)
        expected: Counter[tuple[str, str]] = Counter()
        for action in timeline.spans:
            # A gradient is the work of the target's B or, where that is split, of its I.
            forward = action.kind is Kind.F
            others = graph.sources(action.stage) if forward else graph.targets(action.stage)
            for other in () if action.kind is Kind.W else others:
                if graph.placement[other] != graph.placement[action.stage]:
                    ops = "F" if forward else "BI"
                    before = (f"{other}{op}{action.microbatch}" for op in ops)
                    source = next((text for text in before if Action.parse(text) in timeline.spans), None)
                    if source is not None:
                        expected[source, str(action)] += 1
        assert Counter(arrows(timeline)) == expected


def arrows(timeline: Timeline) -> list[tuple[str, str]]:
    """The slices that each arrow leads from and to, as a viewer binds them: by thread and time."""
    everything = events(timeline)
    ends = {event["id"]: event for event in everything if event["ph"] == "f"}
    begins = {event["id"]: event for event in everything if event["ph"] == "s"}
    counted = Counter(event["ph"] for event in everything)
    assert len(begins) == len(ends) == counted["s"] == counted["f"]
    assert set(begins) == set(ends)
    threads = defaultdict(list)
    for event in everything:
        if event["ph"] == "X":
            threads[event["tid"]].append(event)
    found = []
    for number, begin in begins.items():
        end = ends[number]
        assert (begin["name"], begin["cat"], begin["pid"]) == (end["name"], end["cat"], end["pid"])
        assert begin["ts"] <= end["ts"]
        assert end["bp"] == "e"
        found.append((open_at(threads[begin["tid"]], begin["ts"]), open_at(threads[end["tid"]], end["ts"])))
    return found


def open_at(thread: list[Event], time: float) -> str:
    """The slice that is open then; one that ends just then is not."""
    tiny = 1e-4  # a tenth of a nanosecond
    (name,) = (e["name"] for e in thread if e["ts"] - tiny < time < e["ts"] + e["dur"] - tiny)
    return str(name)


def test_an_action_without_length_keeps_its_arrows() -> None:
    timeline = build("1f1b", chain(2), 1).simulate(forward=0, backward=0)
    assert [(e["ph"], e["tid"], e["ts"]) for e in events(timeline, "s", "f")] == [
        ("s", 1, 0), ("f", 2, 0), ("s", 2, 0), ("f", 1, 0),
    ]  # fmt: skip


def test_clocks_that_disagree_bend_an_arrow_but_never_back_in_time() -> None:
    """Rank 1 began 1F0 before rank 0 says that 0F0 had ended; and 0B0 ran, it seems, before 1B0."""
    schedule = build("1f1b", chain(2), 1)
    times = {"0F0": (0.0, 0.010), "1F0": (0.008, 0.018), "1B0": (0.030, 0.040), "0B0": (0.020, 0.030)}
    spans = {Action.parse(name): Span(*span) for name, span in times.items()}
    timeline = Timeline(schedule, spans, {}, Costs.of(2, 0.01, 0.01), measured=True)
    assert [(e["ph"], e["tid"], e["ts"]) for e in events(timeline, "s", "f")] == [("s", 1, 8000), ("f", 2, 8000)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_counters_peak_at_the_peaks_in_flight(name: str) -> None:
    for timeline in random_timelines(name):
        schedule = timeline.schedule
        peaks: dict[str, int] = defaultdict(int)
        last: dict[str, Event] = {}
        for event in events(timeline, "C"):
            peaks[event["name"]] = max(peaks[event["name"]], event["args"]["microbatches"])
            assert event["ts"] >= last.get(event["name"], event)["ts"]
            last[event["name"]] = event
        assert peaks == {
            f"rank {schedule.placement[stage]}: in flight in stage {stage}": peak
            for stage, peak in enumerate(timeline.peak_in_flight)
            if schedule.backward[stage]
        }
        assert {event["args"]["microbatches"] for event in last.values()} <= {0}
