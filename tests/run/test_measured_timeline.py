"""Measured timelines: marks to laps, laps of many clocks to one timeline; recording on every engine; rescheduling."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
import fxpipe.distributed.stopwatch
import fxpipe.run.timeline_recorder
from fxpipe import Action, RunError, ScheduleError, StageGraph, Timeline, Topology
from fxpipe.distributed.observer import ACTIONS, StepObserver
from fxpipe.distributed.stopwatch import Elapsed, Lap, Reduced, Stopwatch
from fxpipe.run.timeline_recorder import mean_costs, offset_between, timeline_of
from fxpipe.schedules import Costs, Problem, build, with_costs
from fxpipe.schedules.action_times import Reduction
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.stage_times import stage_times
from tests.harness import Engine, assert_run, compiled, engine_of, gradients_of, reference, replica_of, trained
from tests.models import CASES
from tests.pool import Pool
from tests.strict_transport import run_strict
from tests.thinned import ALL, every, in_turn

NAME = "two towers, text first"


@pytest.fixture(params=["local", "strict 0", "distributed"] if ALL else ["local", "distributed"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


@pytest.fixture(params=["strict 1", "distributed"])
def many_ranks(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


one_engine = pytest.mark.parametrize("many_ranks", every(2, ["strict 1", "distributed"]), indirect=True)
"""For tables that all ranks choose from the same costs: what they exchange for that is shown by other tests."""


# --- laps ---


class Ticks:
    """A clock that a test sets: one tick per mark, in tenths of a second."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, marks: Any) -> list[float]:
        return [mark / 10 for mark in marks]


def run(observer: StepObserver, action: Action) -> None:
    stage = StageGraph.from_callables({"a": nn.Identity()}, [], {"a": ["x"]})[0]
    observer.on_start(action, stage, ())
    observer.on_end(action, stage, ())


def test_three_marks_make_a_lap_on_the_clock_that_it_is_told_on() -> None:
    stopwatch = Stopwatch(Ticks())
    first, second = Action(0, Kind.F, 0), Action(0, Kind.B, 0)
    for action in (first, second):
        stopwatch.on_wait(action)
        run(stopwatch, action)
    assert stopwatch.laps() == [Lap(first, 0.1, 0.2, 0.3), Lap(second, 0.4, 0.5, 0.6)]
    assert stopwatch.laps(ahead=0.1)[0][1:] == pytest.approx((0.0, 0.1, 0.2), abs=1e-12)


def test_a_rank_that_is_held_back_stands_ready_from_when_it_begins_to_wait() -> None:
    stopwatch = Stopwatch(clock := Ticks())
    sent, action = Action(0, Kind.F, 0), Action(0, Kind.F, 1)
    for _ in range(2):
        stopwatch.on_wait(sent)
        clock.mark()  # time goes by
        stopwatch.on_wait(sent)  # for another message
        stopwatch.on_wait(action)
        run(stopwatch, action)
    assert [lap[1:] for lap in stopwatch.laps()] == [(0.1, 0.3, 0.4), (0.5, 0.7, 0.8)]


def test_what_is_started_ends_on_any_thread_and_in_any_order() -> None:
    stopwatch = Stopwatch(Ticks())
    ends = [stopwatch.started(f"bucket {number}") for number in range(3)]
    for end in (ends[2], ends[0]):
        assert end is not None
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    assert stopwatch.reductions() == [Reduced("bucket 0", 0.1, 0.5), Reduced("bucket 2", 0.3, 0.4)]
    assert stopwatch.reductions(ahead=0.1)[0][1:] == pytest.approx((0.0, 0.4), abs=1e-12)
    assert stopwatch.laps() == []


def laps_by_hand() -> list[Lap]:
    """Two stages on two ranks and two micro-batches; rank 1 stands waiting for 0F0 from 10.5 on, rank 0 for 1B0."""
    parse = Action.parse
    return [
        Lap(parse("0F0"), 10.0, 10.0, 11.0),
        Lap(parse("0F1"), 11.0, 11.0, 13.0),
        Lap(parse("0B0"), 13.0, 17.5, 19.5),
        Lap(parse("0B1"), 19.5, 24.25, 26.25),
        Lap(parse("1F0"), 10.5, 11.25, 12.25),
        Lap(parse("1B0"), 12.25, 12.5, 17.0),
        Lap(parse("1F1"), 17.0, 17.0, 18.0),
        Lap(parse("1B1"), 18.0, 18.0, 24.0),
    ]


COURSES = [
    [
        Elapsed("", 9.0),
        Elapsed("settling", 9.75),
        Elapsed("preparing", 9.75),
        Elapsed(ACTIONS, 26.25),
        Elapsed("messages", 26.75),
    ],
    [
        Elapsed("", 9.0),
        Elapsed("settling", 10.25),
        Elapsed("preparing", 10.5),
        Elapsed(ACTIONS, 24.25),
        Elapsed("messages", 24.5),
        Elapsed("loss", 26.5),
    ],
]
"""The parts of a step around the laps by hand, of each rank."""


def test_a_timeline_begins_at_its_first_start_and_has_the_medians_for_costs() -> None:
    schedule = build("1f1b", [(0, 1)], 2)
    timeline = timeline_of(schedule, laps_by_hand())
    assert timeline.measured
    assert timeline.spans[Action.parse("1B0")] == (2.5, 7.0)
    assert timeline.since[Action.parse("0B0")] == 3.0
    assert timeline.makespan == 16.25
    assert timeline.costs.forward == (1.5, 1.0)
    assert timeline.costs.backward == (2.0, 5.25)
    # who stood waiting: 1F0 for 0.25 after 0F0, 0B0 for 0.5 after 1B0, 0B1 for 0.25 after 1B1; 1F1's message was there
    assert timeline.costs.comm == 0.25
    # 0: 7 of 16.25 busy; 1: 12.5
    assert timeline.bubbles == pytest.approx((1 - 7 / 16.25, 1 - 12.5 / 16.25))


def test_stages_are_told_with_their_medians_the_plan_and_their_share_of_the_step() -> None:
    """Of 16.25 s stage 0 has computed 7, stage 1 12.5; with two actions of a kind a median is their mean."""
    plan = dataclasses.replace(Costs.of(2, forward=[1, 3], backward=[2, 6]), source="a guess")
    timeline = dataclasses.replace(timeline_of(build("1f1b", [(0, 1)], 2), laps_by_hand()), plan=plan)
    assert [times[1:] for times in stage_times(timeline)] == [
        ({Kind.F: [1.5, 1.0], Kind.B: [2.0, 2.0]}, 7 / 16.25, 7 / 16.25),
        ({Kind.F: [1.0, 3.0], Kind.B: [5.25, 6.0]}, 12.5 / 16.25, 12.5 / 16.25),
    ]
    first, last, source = str(timeline).splitlines()[-3:]
    assert first.split() == ["0", "0", "1,500", "1,000", "2,000", "2,000", "43.1%"]
    assert last.split() == ["1", "1", "1,000", "3,000", "5,250", "6,000", "76.9%", "<-", "slowest"]
    assert source == "planned: a guess"


def test_what_never_ran_is_in_no_span_and_costs_nothing() -> None:
    schedule = build("1f1b", [(0, 1)], 2)
    timeline = timeline_of(schedule, [lap for lap in laps_by_hand() if lap.action.kind is Kind.F])
    assert set(timeline.spans) == {Action.parse(cell) for cell in ("0F0", "0F1", "1F0", "1F1")}
    assert timeline.costs.backward == (0.0, 0.0)
    assert timeline_of(schedule, []).makespan == 0


def reductions_by_hand() -> list[list[Reduced]]:
    """Of the laps by hand: rank 0's last backward ends at 26.25, rank 1's at 24."""
    return [
        [Reduced("bucket 0, 1.0 MB", 9.5, 20.0), Reduced("bucket 1, 25.0 MB", 26.5, 27.0)],
        [Reduced("bucket 0, 1.0 MB", 18.0, 24.5), Reduced("bucket 1, 25.0 MB", 24.25, 25.0)],
    ]


def test_reductions_are_told_by_rank_on_the_clock_of_the_spans_and_change_no_figure() -> None:
    schedule = build("1f1b", [(0, 1)], 2)
    bare = timeline_of(schedule, laps_by_hand())
    timeline = timeline_of(schedule, laps_by_hand(), reductions=reductions_by_hand())
    assert timeline.reductions == (
        Reduction(0, "bucket 0, 1.0 MB", 0.0, 10.0),  # nothing is before the first start, 10.0
        Reduction(0, "bucket 1, 25.0 MB", 16.5, 17.0),
        Reduction(1, "bucket 0, 1.0 MB", 8.0, 14.5),
        Reduction(1, "bucket 1, 25.0 MB", 14.25, 15.0),
    )
    assert timeline.overlapped == (timeline.reductions[0], timeline.reductions[2])
    assert dataclasses.replace(timeline, reductions=()) == bare
    assert timeline.makespan == 16.25
    told = "reductions: 2 of 4 started before the last backward of their rank had ended"
    assert str(timeline) == f"{bare}\n{told}"
    assert pickle.loads(pickle.dumps(timeline)).reductions == timeline.reductions
    assert bare.reductions == bare.overlapped == ()


def test_the_mean_of_replicas_is_taken_stage_by_stage() -> None:
    mean = mean_costs([Costs.of(2, [1, 3], [2, 4], comm=1), Costs.of(2, [3, 3], [4, 8], comm=0)])
    assert mean == Costs.of(2, [2, 3], [3, 6], comm=0.5)


# --- clocks ---


def test_clocks_that_may_be_one_are_taken_for_one() -> None:
    assert offset_between([(1.0, 1.2)], [(1.1, 1.25)]) == 0


@pytest.mark.parametrize("offset", [-40.0, 0.5, 3600.0])
def test_an_offset_lies_within_what_every_collective_call_allows(offset: float) -> None:
    """Rank 0 comes at t and leaves at t + 0.004; the other one comes 1 ms later and leaves 1 ms earlier or later."""
    first = [(t, t + 0.004) for t in (1.0, 2.0, 3.0)]
    other = [(offset + t + 0.001, offset + t + left) for t, left in ((1.0, 0.005), (2.0, 0.003), (3.0, 0.005))]
    # offset ≤ other.left − first.came = offset + 0.003, and ≥ other.came − first.left = offset − 0.003
    assert offset_between(first, other) == pytest.approx(offset, abs=1e-9)


# --- recording ---


def recorded(name: str, steps: int = 2) -> tuple[Timeline, Timeline]:
    """What two recorded steps were like, as this rank sees it."""
    forward_backward = compiled(CASES[name])
    forward_backward(**CASES[name].batch())
    forward_backward.record_timeline()
    timelines = []
    for number in range(steps):
        forward_backward(**CASES[name].batch(number))
        timelines.append(forward_backward.timeline())
    return timelines[0], timelines[1]


def assert_ran(timeline: Timeline) -> None:
    """Every action ran once, in the order of its row, and none before what it needs."""
    schedule = timeline.schedule
    assert set(timeline.spans) == {action for row in schedule.rows for action in row}
    assert min(span.start for span in timeline.spans.values()) == 0
    for row in schedule.rows:
        end = -1e9
        for action in row:
            span = timeline.spans[action]
            assert end <= timeline.since[action] <= span.start <= span.end, action
            end = span.end
            for other in schedule.dependencies.before(action):
                assert timeline.spans[other].end <= span.start, (other, action)


@pytest.mark.parametrize("name", every(2, ["6 stages in turn on 3 ranks", NAME]))
def test_a_recorded_step_is_a_timeline_of_its_schedule_on_every_rank(name: str, engine: Engine) -> None:
    results = engine(CASES[name].ranks, recorded, name)
    for timelines in results:
        for timeline in timelines:
            assert_ran(timeline)
            assert timeline.measured
            assert timeline.makespan > 0
            assert 0 <= timeline.bubble < 1
    assert all(timelines[0].spans == results[0][0].spans for timelines in results)
    assert results[0][0].spans != results[0][1].spans


def recorded_with_skew(seconds: float) -> Timeline:
    """The same where every rank's clock is ahead of the one before it."""
    fxpipe.init()
    skew = seconds * torch.distributed.get_rank()

    class Skewed:
        perf_counter = staticmethod(lambda: time.perf_counter() + skew)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fxpipe.run.timeline_recorder, "time", Skewed)
        patch.setattr(
            fxpipe.distributed.stopwatch.HostClock,
            "mark",
            staticmethod(lambda: time.perf_counter_ns() + int(skew * 1e9)),
        )
        return recorded(NAME)[1]


def test_ranks_whose_clocks_differ_are_put_on_one(pool: Pool) -> None:
    """As exactly as the quickest collective call: in any case to a thousandth of clocks that are days apart."""
    skew = 1e6
    timeline = pool.run(recorded_with_skew, skew, ranks=4)[0]
    assert timeline.makespan < skew / 1000
    for action, span in timeline.spans.items():
        for other in timeline.schedule.dependencies.before(action):
            assert timeline.spans[other].end < span.start + skew / 1000


def train_recorded(name: str) -> Any:
    return trained(CASES[name], [CASES[name].batch(number) for number in range(3)], recorded=True)


def test_recording_changes_no_bit(engine: Engine) -> None:
    case = CASES[NAME]
    runs = engine(case.ranks, train_recorded, NAME)
    assert_run(runs, reference(case, [case.batch(number) for number in range(3)])[0])


def not_recorded(rank_that_forgot: int) -> str:
    """The error of timeline(), and of reschedule(); then one more step."""
    forward_backward = compiled(CASES[NAME])
    if forward_backward._transport.pipe_rank != rank_that_forgot:
        forward_backward.record_timeline()
    forward_backward(**CASES[NAME].batch())
    with pytest.raises(RunError) as error:
        forward_backward.timeline()
    with pytest.raises(RunError, match="no step was recorded"):
        forward_backward.reschedule()
    forward_backward(**CASES[NAME].batch())
    return str(error.value)


@one_engine
def test_a_step_that_not_every_rank_recorded_is_an_error_on_all_and_training_goes_on(many_ranks: Engine) -> None:
    told = many_ranks(4, not_recorded, 2)
    assert set(told) == {"no step was recorded; call record_timeline() before the step, on every rank"}


# --- rescheduling ---


class Slow(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A linear stage that sleeps; the last one returns a loss."""

    def __init__(self, seconds: float, is_last: bool) -> None:
        super().__init__()
        self.linear, self.seconds, self.is_last = nn.Linear(4, 4), seconds, is_last

    def forward(self, *inputs: Tensor) -> Tensor:
        y = Slow.apply(self.linear(sum(inputs)), self.seconds)
        return y.square().mean() if self.is_last else y


SECONDS = {"a": 0.002, "b": 0.012, "c": 0.002, "join": 0.004}
AWAKE = dict.fromkeys(SECONDS, 0.0)
"""Where it matters not what a stage costs."""
EDGES = [("a", "b"), ("b", "join"), ("c", "join")]


def sleepers(ranks: list[int], times: Mapping[str, float] = SECONDS, **options: Any) -> fxpipe.ForwardBackward:
    """a → b → join ← c, with b the slowest."""
    torch.manual_seed(0)
    stages = {name: Sleeper(seconds, name == "join") for name, seconds in times.items()}
    graph = fxpipe.StageGraph.from_callables(stages, EDGES, {"a": ["x"], "c": ["x"]})
    topology = options.pop("topology", Topology([("pipe", 1 + max(ranks))]))
    placement = dict(zip(SECONDS, ranks, strict=True))
    return fxpipe.compile(graph, topology, microbatches=6, placement=placement, **options)


def batch() -> Tensor:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(7))


def rescheduled(ranks: list[int], limits: dict[str, Any], data: int = 1) -> dict[str, Any]:
    """A step at 1F1B, another at the table made from its costs; what came of both."""
    forward_backward = sleepers(ranks, topology=Topology([("pipe", 1 + max(ranks)), ("data", data)]))
    before = forward_backward.schedule
    forward_backward.record_timeline()
    first = forward_backward(batch()), gradients_of(forward_backward.named_parameters())
    costs = forward_backward.timeline().costs
    forward_backward.zero_grad()
    after = forward_backward.reschedule(**limits)
    assert after is forward_backward.schedule
    second = forward_backward(batch()), gradients_of(forward_backward.named_parameters())
    return {
        "before": before,
        "after": after,
        "costs": costs,
        "ran": forward_backward.timeline(),
        "names": forward_backward.stages.names,
        "equal": torch.equal(first[0], second[0])
        and all(torch.equal(first[1][name], second[1][name]) for name in first[1]),
    }


def test_a_measured_stage_costs_what_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on while a stage sleeps, and then only."""
    now = 0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += round(seconds * 1e9)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(fxpipe.distributed.stopwatch.HostClock, "mark", staticmethod(lambda: now))
    result = rescheduled([0, 1, 2, 3], {})
    seconds = [SECONDS[name] for name in result["names"]]
    assert result["costs"].forward == pytest.approx(seconds)
    assert result["costs"].backward == pytest.approx([2 * one for one in seconds])
    assert result["costs"].comm == 0


@one_engine
@pytest.mark.parametrize("ranks", every(2, [[0, 1, 0, 1], [0, 1, 2, 3]]))
def test_a_new_table_is_the_same_on_all_ranks_no_slower_by_simulation_and_changes_no_bit(
    ranks: list[int], many_ranks: Engine
) -> None:
    results = many_ranks(1 + max(ranks), rescheduled, ranks, {})
    for result in results:
        assert result["after"] == results[0]["after"]
        assert result["equal"]
        assert result["ran"].schedule.rows == result["after"].rows
        old, new = (result[table].simulate(result["costs"]).makespan for table in ("before", "after"))
        assert new <= old * (1 + 1e-9)


def rescheduled_at(forwards: dict[str, float], comm: float, limits: dict[str, Any], data: int = 1) -> dict[str, Any]:
    """What reschedule makes of these costs, the replicas' each other ones, in place of measured ones."""
    topology = Topology([("pipe", 4), ("data", data)])
    forward_backward = sleepers([0, 1, 2, 3], AWAKE, topology=topology)
    before, names = forward_backward.schedule, forward_backward.stages.names
    forward_backward.record_timeline()
    forward_backward(batch())
    weight = 1 + (replica_of(topology) if data > 1 else 0)  # replicas measure once and twice as much: 1.5 on average
    forward = [weight * forwards[name] for name in names]
    measured = dataclasses.replace(
        forward_backward.timeline(), costs=Costs.of(4, forward, [2 * f for f in forward], comm=weight * comm)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_backward._steps.recorder, "timeline", lambda: measured)
        after = forward_backward.reschedule(**limits)
    forward_backward(batch())
    mean = [(1.5 if data > 1 else 1) * forwards[name] for name in names]
    costs = Costs.of(4, mean, [2 * f for f in mean], comm=(1.5 if data > 1 else 1) * comm)
    return {"before": before, "after": after, "costs": costs, "stages": forward_backward.stages}


FAR = {"a": 1.0, "b": 1.0, "c": 1.0, "join": 1.0}


def test_far_ranks_get_more_micro_batches_in_flight() -> None:
    """A hop of a whole forward: 1F1B idles, and the table for the mean of the measured costs does so less."""
    for result in run_strict(lambda rank: rescheduled_at(FAR, 1.0, {}, data=2), 8, 0):
        before, after, costs = result["before"], result["after"], result["costs"]
        assert after.rows != before.rows
        assert after.simulate(costs).makespan < 0.95 * before.simulate(costs).makespan
        assert max(after.simulate().peak_in_flight) > max(before.simulate().peak_in_flight)
        stages = result["stages"]
        assert after.rows == build("greedy", stages.stage_edges, 6, stages.placement, costs=costs).rows
        assert after.costs == costs


def test_a_table_that_would_be_faster_by_less_than_a_percent_is_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    barely = {"a": 1.0, "b": 1.002, "c": 1.001, "join": 1.0}
    result = rescheduled_at(barely, 0.005, {})
    assert result["after"] == result["before"]
    assert "fxpipe: kept 1f1b, " in capsys.readouterr().err


def test_stages_are_shown_at_the_costs_that_a_table_was_made_for(capsys: pytest.CaptureFixture[str]) -> None:
    result = rescheduled_at(FAR, 1.0, {})
    (row,) = (line for line in str(result["stages"]).splitlines() if line.startswith("join "))
    assert row.split()[5:7] == ["1,000", "2,000"]  # F and B in ms
    assert "F and B of a micro-batch: costs measured" in str(result["stages"])
    before, after = (result[table].simulate(result["costs"]).makespan * 1e3 for table in ("before", "after"))
    line = f"fxpipe: took greedy, {after:,.0f} ms planned, in place of 1f1b, {before:,.0f} ms"
    assert line in capsys.readouterr().err


def test_memory_limits_what_is_held_at_bytes_that_the_user_tells() -> None:
    result = rescheduled_at(FAR, 1.0, {"memory": 25, "activation_bytes": 10})
    assert result["after"].simulate(activation_bytes=10).peak_bytes == (20, 20, 20, 10)


def test_a_limit_that_compile_was_given_goes_on_until_another_one_is() -> None:
    forward_backward = sleepers([0, 1, 2, 3], AWAKE, schedule=with_costs("greedy", in_flight=1))
    forward_backward.record_timeline()
    forward_backward(batch())
    tables = forward_backward.schedule, forward_backward.reschedule()
    assert [table.simulate().peak_in_flight for table in tables] == [(1, 1, 1, 1)] * 2
    # GPipe's, which is faster than a micro-batch at a time
    assert forward_backward.reschedule("gpipe", in_flight=6).simulate().peak_in_flight == (6, 6, 6, 6)


def test_a_users_table_can_be_rescheduled_and_new_kinds_of_batch_still_come() -> None:
    """Their table puts the stages on ranks; a new one, and what is captured later, leaves them there."""
    table = sleepers([1, 0, 1, 0], AWAKE).schedule
    placement = dict(zip(sleepers([0, 0, 0, 0], AWAKE).stages.names, table.placement, strict=True))
    forward_backward = sleepers([placement[name] for name in SECONDS], AWAKE, schedule=table)
    forward_backward.record_timeline()
    forward_backward(batch())
    before = forward_backward.stages.placement
    forward_backward.reschedule(in_flight=1)
    forward_backward.evaluate(batch())
    forward_backward.step_microbatches([((batch()[:3],), {}), ((batch()[3:],), {})])
    assert forward_backward.stages.placement == before == table.placement


def refused(limits: dict[str, Any]) -> str:
    forward_backward = sleepers([0, 1, 0, 1], AWAKE)
    before = forward_backward.schedule
    forward_backward.record_timeline()
    forward_backward(batch())
    with pytest.raises(ScheduleError) as error:
        forward_backward.reschedule(**limits)
    assert forward_backward.schedule == before
    forward_backward(batch())
    assert forward_backward.timeline().schedule.rows == before.rows
    return str(error.value)


def bad_family(problem: Problem) -> list[list[Action]]:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("refusal", "many_ranks"),
    in_turn(
        [
            ({"schedule": "1f1"}, "unknown schedule '1f1'"),
            ({"schedule": bad_family}, "the family bad_family failed: KeyError: 'oops'"),
            ({"in_flight": 0}, "at least 1 micro-batch must be in flight"),
        ],
        ["strict 1", "distributed"],
    ),
    ids=lambda one: one if isinstance(one, str) else one[1],
    indirect=["many_ranks"],
)
def test_a_table_that_cannot_be_made_is_refused_and_the_present_one_stays(
    refusal: tuple[dict[str, Any], str], many_ranks: Engine
) -> None:
    limits, told = refusal
    messages = many_ranks(2, refused, limits)
    assert len(set(messages)) == 1
    assert told in messages[0]


def different_arguments(limits: list[dict[str, Any]]) -> str:
    """Each rank asks for something else; then training goes on."""
    forward_backward = sleepers([0, 1, 0, 1], AWAKE)
    before = forward_backward.schedule
    forward_backward.record_timeline()
    forward_backward(batch())
    rank = forward_backward._transport.pipe_rank
    with pytest.raises(fxpipe.FxpipeError) as error:
        forward_backward.reschedule(**limits[rank or 0])
    forward_backward(batch())
    forward_backward(batch()[:7])
    assert forward_backward.schedule == before
    return str(error.value)


@one_engine
def test_ranks_that_ask_for_different_tables_all_fail_and_go_on(many_ranks: Engine) -> None:
    for limits in ([{"in_flight": 1}, {"in_flight": 2}], [{"in_flight": 0}, {}]):
        told = many_ranks(2, different_arguments, limits)
        assert all("ask for the same schedule" in text or "at least 1 micro-batch" in text for text in told)


def different_steps() -> str:
    """One rank records the first step, the other one the second."""
    forward_backward = sleepers([0, 1, 0, 1], AWAKE)
    for step in (0, 1):
        forward_backward.record_timeline(forward_backward._transport.pipe_rank == step)
        forward_backward(batch())
    with pytest.raises(RunError) as error:
        forward_backward.timeline()
    forward_backward(batch())
    return str(error.value)


@one_engine
def test_steps_that_are_not_the_same_make_no_timeline(many_ranks: Engine) -> None:
    for told in many_ranks(2, different_steps):
        assert told == "the ranks last recorded different steps, [0, 1]; call record_timeline() on all"


def test_a_step_without_backward_says_nothing_about_costs() -> None:
    forward_backward = sleepers([0, 1, 0, 1], AWAKE, loss_weight=lambda x: 0.0)
    forward_backward.record_timeline()
    forward_backward(batch())
    assert all(action.kind is Kind.F for action in forward_backward.timeline().spans)
    with pytest.raises(RunError, match="no micro-batch of the recorded step had weight"):
        forward_backward.reschedule()


def other_kinds_of_batch() -> list[Tensor]:
    """Losses and outputs for batches of other sizes, before and after a new table."""
    forward_backward = sleepers([0, 1, 0, 1], AWAKE)
    forward_backward.record_timeline()
    results = []
    for _ in range(2):
        results += [forward_backward(batch()[:1].expand(size, 4)) for size in (12, 18, 7)]
        results.append(forward_backward.evaluate(batch(), outputs="all"))
        forward_backward.reschedule(in_flight=1)
    return results


def test_every_kind_of_batch_gets_the_new_table(engine: Engine) -> None:
    for results in engine(2, other_kinds_of_batch):
        for before, after in zip(results[:4], results[4:], strict=True):
            assert torch.equal(before, after)


# --- what lies around the actions ---


def spent_in_steps(name: str, options: dict[str, Any]) -> tuple[list[Timeline], list[float], int]:
    """Recorded steps with an evaluation behind each; what each took around the call; and this process's place."""
    topology = Topology([("pipe", CASES[name].ranks), ("data", options.get("data", 1))])
    others = {key: value for key, value in options.items() if key != "data"}
    forward_backward = compiled(CASES[name], topology=topology, **others)
    forward_backward(**CASES[name].batch())
    forward_backward.record_timeline()
    timelines, around = [], []
    for number in range(2):
        began = time.perf_counter()
        forward_backward(**CASES[name].batch(number))
        around.append(time.perf_counter() - began)
        forward_backward.evaluate(**CASES[name].batch(number))
        timelines.append(forward_backward.timeline())
    return timelines, around, forward_backward._transport.pipe_rank or 0


def assert_sums(timelines: list[Timeline], around: list[float], place: int) -> None:
    for timeline, took in zip(timelines, around, strict=True):
        assert len(timeline.spent) in (1, len(timeline.schedule.rows))
        mine = timeline.spent[place]
        assert mine.wall == pytest.approx(sum(mine.seconds.values()))
        assert mine.wall <= took
        assert {spell.what for spell in timeline.spells if spell.category == "compute"} == set(map(str, timeline.spans))
        assert {spell.what for spell in timeline.spells if spell.category == "before"} <= {"settling", "preparing"}
        sources = {f"{action} from rank {timeline.schedule.placement[action.stage]}" for action in timeline.spans}
        assert set().union(*(one.waits for one in timeline.spent)) <= sources


@pytest.mark.parametrize(
    "options", every(2, [{}, {"recompute": True, "schedule": "gpipe"}, {"schedule": "zb_h1"}, {}]), ids=str
)
def test_the_categories_of_a_step_sum_to_what_its_call_takes(options: dict[str, Any], engine: Engine) -> None:
    for timelines, around, place in engine(CASES[NAME].ranks, spent_in_steps, NAME, options):
        assert_sums(timelines, around, place)


@one_engine
def test_each_replica_tells_of_its_own_ranks(many_ranks: Engine) -> None:
    told = many_ranks(4, spent_in_steps, "two towers on 2 ranks", {"data": 2, "checks": fxpipe.Checks(batches=False)})
    for timelines, around, place in told:
        assert_sums(timelines, around, place)
    assert told[0][0][0].spells != told[1][0][0].spells


def test_a_failed_step_leaves_the_one_that_was_recorded_before() -> None:
    forward_backward = compiled(CASES[NAME])
    forward_backward.record_timeline()
    forward_backward(**CASES[NAME].batch())
    before = forward_backward.timeline()
    with pytest.raises(RunError):
        forward_backward(nothing=torch.ones(2))
    forward_backward.evaluate(**CASES[NAME].batch())
    assert forward_backward.timeline().spells == before.spells
