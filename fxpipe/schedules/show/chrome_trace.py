"""Chrome trace: a timeline as Trace Event JSON, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from fxpipe.schedules.action_times import ActionTimes, ran
from fxpipe.schedules.in_flight import changes_in_flight
from fxpipe.schedules.show.svg_picture import lanes
from fxpipe.schedules.show.words import headline, numbers, unit_of, waited
from fxpipe.schedules.step_breakdown import BETWEEN, COMPUTE, WAITING

Event = dict[str, Any]

PROCESS = 1
FIRST_THREAD = 1
"""Trace viewers take thread 0 for the idle task, and show it apart from the others."""


def chrome_trace(timeline: ActionTimes) -> str:
    """Returns Trace Event JSON: a thread for each rank, arrows from rank to rank, and counters: micro-batches in
    flight, and bytes.

    A measured step begins at 0, and includes the time around its actions. The format counts in microseconds.
    """
    # Within an instant a viewer keeps the order of the file: a slice precedes the arrows that end in it.
    events = [
        *_metadata(timeline),
        *_slices(timeline),
        *_around(timeline),
        *_bars(timeline),
        *_arrows(timeline),
        *_counters(timeline),
    ]
    begin = _nanoseconds(timeline, min((spell.start for spell in timeline.spells), default=0.0))
    for event in events:
        if "ts" in event and begin < 0:  # a viewer shows nothing before 0
            event["ts"] = (round(event["ts"] * 1000) - begin) / 1000
    what, figures = headline(timeline)
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": what, "figures": figures}},
        separators=(",", ":"),
    )


def _metadata(timeline: ActionTimes) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "pipe group"}}
    schedule = timeline.schedule
    for rank in range(len(schedule.rows)):
        stages = ", ".join(map(schedule.label, schedule.stages_of[rank]))
        yield from _thread(rank, f"rank {rank} ({stages})")


def _thread(number: int, name: str) -> Iterator[Event]:
    thread = {"ph": "M", "pid": PROCESS, "tid": FIRST_THREAD + number}
    yield {**thread, "name": "thread_name", "args": {"name": name}}
    yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}


def _nanoseconds(timeline: ActionTimes, time: float) -> int:
    return round(time * (1e9 if timeline.measured or timeline.costs.source else 1e6))


def _slice(timeline: ActionTimes, thread: int, name: str, category: str, span: Iterable[float]) -> Event:
    start, end = (_nanoseconds(timeline, time) for time in span)
    where = {"pid": PROCESS, "tid": FIRST_THREAD + thread}
    return {"ph": "X", "name": name, "cat": category, **where, "ts": start / 1000, "dur": (end - start) / 1000}


def _slices(timeline: ActionTimes) -> Iterator[Event]:
    unit = unit_of(timeline)
    for rank, row in enumerate(ran(timeline)):
        for action in row:
            args = {
                "stage": timeline.schedule.label(action.stage),
                "op": action.kind.words,
                "microbatch": action.microbatch if action.count == 1 else numbers(action),
                "waited_for": waited(timeline, action, unit),
                "waited_us": _nanoseconds(timeline, timeline.waited(action)) / 1000,
            }
            yield {**_slice(timeline, rank, str(action), action.kind.words, timeline.spans[action]), "args": args}


def _around(timeline: ActionTimes) -> Iterator[Event]:
    """Yields slices for the work of each process outside its actions, on the first rank that the process plays."""
    for spell in timeline.spells:
        if spell.category != COMPUTE:
            name = {WAITING: f"waiting for {spell.what}", BETWEEN: "between actions"}.get(spell.category, spell.what)
            yield _slice(timeline, spell.ranks[0], name, spell.category, (spell.start, spell.end))


def _bars(timeline: ActionTimes) -> Iterator[Event]:
    """Yields the reductions and copies, on threads after the ranks' threads: one for each lane, since slices of a
    thread may not overlap."""
    number = len(timeline.schedule.rows)
    for rank in range(len(timeline.schedule.rows)):
        for lane in lanes(timeline, rank):
            yield from _thread(number, f"rank {rank}: {'copies' if lane[0].kind == 'copy' else 'reductions'}")
            for what, kind, *span in lane:
                yield {**_slice(timeline, number, what, kind, span), "args": {"rank": rank}}
            number += 1


def _arrows(timeline: ActionTimes) -> Iterator[Event]:
    """Yields a flow for each dependency between ranks: from the end of the needed action to the start of its user."""
    rank, number = timeline.schedule.rank, 0
    for action, span in timeline.spans.items():
        for other in timeline.schedule.dependencies.needs(action):
            if other not in timeline.spans or rank(other) == rank(action):
                continue
            began, ended = (_nanoseconds(timeline, time) for time in timeline.spans[other])
            arrival = _nanoseconds(timeline, span.start)
            # An arrow belongs to the slice that is open at the arrow's start: just before that slice's end. Clocks of
            # two ranks may disagree, and an arrow cannot go back in time.
            departure = max(began, min(ended - 1, arrival))
            if departure > arrival:
                continue
            number += 1
            flow = {"name": "dependency", "cat": "dependency", "id": number, "pid": PROCESS}
            source, target = FIRST_THREAD + rank(other), FIRST_THREAD + rank(action)
            yield {"ph": "s", **flow, "tid": source, "ts": departure / 1000}
            yield {"ph": "f", "bp": "e", **flow, "tid": target, "ts": arrival / 1000}


def _counters(timeline: ActionTimes) -> Iterator[Event]:
    """Yields counters: per stage the micro-batches whose forward has run and whose backward has not ended, and the
    measured bytes of each rank."""
    change_after = changes_in_flight(timeline.schedule)
    for rank, row in enumerate(ran(timeline)):
        in_flight = {action.stage: 0 for action in row if timeline.schedule.backward[action.stage]}
        # A counter without a first value would begin only with its first change.
        counts = [(stage, 0.0, 0) for stage in in_flight]
        for action in row:
            if change := change_after(action):
                in_flight[action.stage] += change
                counts.append((action.stage, timeline.spans[action].end, in_flight[action.stage]))
        for stage, time, count in counts:
            name = f"rank {rank}: in flight in stage {timeline.schedule.label(stage)}"
            at = {"pid": PROCESS, "ts": _nanoseconds(timeline, time) / 1000}
            yield {"ph": "C", "name": name, **at, "args": {"microbatches": count}}
        for time, size in timeline.bytes_over_time(rank):
            at = {"pid": PROCESS, "ts": _nanoseconds(timeline, time) / 1000}
            yield {"ph": "C", "name": f"rank {rank}: memory", **at, "args": {"bytes": size}}
