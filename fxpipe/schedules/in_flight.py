"""The micro-batches and bytes that stages hold: of a micro-batch all from F, or from R, to the end of its backward, and
the inputs alone from F to R."""

from __future__ import annotations

from collections.abc import Callable

from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import ActionTable
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Half
from fxpipe.schedules.kinds import OFFLOADS, Held


def changes_in_flight(schedule: ActionTable) -> Callable[[Action], int]:
    """Returns a function: action → how many more micro-batches its stage holds after it; negative if it frees some."""
    recomputed = schedule.dependencies.recomputed

    def change(action: Action) -> int:
        if not schedule.backward[action.stage]:
            return 0
        load = Held(1, 0, 1, 0, (action.stage, action.microbatch) in recomputed)
        return action.count * int(action.kind.change(load))

    return change


def peak_in_flight(schedule: ActionTable) -> tuple[int, ...]:
    """Returns, per stage, the most micro-batches that the stage holds on any of its ranks."""
    peaks, change = [0] * len(schedule.placement), changes_in_flight(schedule)
    for row in schedule.rows:
        in_flight = [0] * len(peaks)
        for action in row:
            in_flight[action.stage] += change(action)
            peaks[action.stage] = max(peaks[action.stage], in_flight[action.stage])
    return tuple(peaks)


def peak_host_bytes(schedule: ActionTable, costs: Costs) -> tuple[float, ...]:
    """Returns, per rank, the most bytes of activations in the host's memory. A micro-batch has a buffer there from its
    F, when its copy begins, to its backward. If it leaves after its I, it has a buffer from its I to its W."""
    leaving, peaks = {kind: schedule.dependencies.leaving(kind) for kind in OFFLOADS}, []
    for row in schedule.rows:
        now = peak = 0.0
        there: dict[Half, float] = {}
        for action in row:
            half = action.stage, action.microbatch
            # Its next use needs what has left, and the memory on the host is free then.
            if action.kind.lane is None:
                now -= there.pop(half, 0.0)
            if half in leaving.get(action.kind, ()):
                there[half] = costs.held(action._replace(kind=OFFLOADS[action.kind][1]))
                now += there[half]
                peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


def peak_bytes(schedule: ActionTable, costs: Costs) -> tuple[float, ...]:
    """Returns, per rank, the most bytes that its micro-batches hold; the costs must give ``activation_bytes``.

    Inputs that have arrived for a forward that has not run yet do not count.
    """
    # The peak may occur inside an action, which may hold more bytes while it runs than before or after.
    recomputed = schedule.dependencies.recomputed
    peaks = []
    for row in schedule.rows:
        now = peak = 0.0
        for action in row:
            if schedule.backward[action.stage]:
                peak = max(peak, now + costs.beside(action))
                now += costs.held(action, (action.stage, action.microbatch) in recomputed)
                peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
