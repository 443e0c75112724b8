"""The micro-batches and bytes that stages hold: of a micro-batch all from F, or from R, to the end of its backward, and
the inputs alone from F to R."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import ActionTable
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import FORWARD, Held, Kind


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
    """Returns, per rank, the most bytes of activations in the host's memory: each offloaded micro-batch has a buffer
    there from its F, when its copy begins, to its backward."""
    offloaded = schedule.dependencies.offloaded

    def change(action: Action) -> float:
        if action.kind.messages is None or (action.stage, action.microbatch) not in offloaded:
            return 0.0
        return costs.held(action._replace(kind=Kind.P)) * (1 if action.kind.messages is FORWARD else -1)

    return tuple(max(accumulate(map(change, row), initial=0.0)) for row in schedule.rows)


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
