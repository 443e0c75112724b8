"""Together: a plan is made on every rank, and is the same on all of them, or every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fxpipe.distributed.transport import Transport, member
from fxpipe.errors import RunError
from fxpipe.options import Options
from fxpipe.plan.example import with_first_plan
from fxpipe.plan.plan import Plan
from fxpipe.plan.planner import Planner

_EVERYONE = ("pipe", "data")


def first_plan_together(transport: Transport, planner: Planner, options: Options) -> Planner:
    """A planner with the plan for ``options``' example, the same on every rank. A collective call of all ranks.

    Where captures are checked, a tracer found wrong on one rank's example is passed over on all.
    """
    attempt, agreed = _attempt(partial(with_first_plan, planner, options)), set[str]()
    while planner.captures is not None:
        wrong = _of_everyone(transport, planner.captures.wrong)
        if wrong.keys() == agreed:  # which is the same question on all ranks
            break
        agreed = set(wrong)
        if planner.captures.wrong.keys() != agreed:
            planner = planner.without_tracers(wrong)
            attempt = _attempt(partial(with_first_plan, planner, options))
    return planner_together(transport, attempt)


def _of_everyone(transport: Transport, wrong: Mapping[str, str]) -> Mapping[str, str]:
    for scope in _EVERYONE:
        for theirs in transport.gather(scope, wrong):
            wrong = {**theirs, **wrong}
    return wrong


def _attempt(make: Callable[[], Planner]) -> Callable[[], Planner]:
    """A function that returns the planner, or raises what making it has raised."""
    try:
        planner = make()
    except Exception as error:
        return partial(_raise, error)
    return lambda: planner


def _raise(error: Exception) -> Planner:
    raise error


def planner_together(transport: Transport, make: Callable[[], Planner]) -> Planner:
    """The planner, whose first plan is the same on every rank; or every rank raises. A collective call of all ranks."""
    attempt = _attempt(make)
    plan_together(transport, _EVERYONE, lambda: attempt().first)
    return attempt()


def plan_together(transport: Transport, scopes: Sequence[str], make: Callable[[], Plan]) -> Plan:
    """The plan, the same on every rank; where one rank has none, or another, every rank raises. A collective call."""
    plan, failure, wrong = None, None, ""
    try:
        plan = make()
    except Exception as error:
        failure, wrong = error, f"could not compile: {type(error).__name__}: {error}"
    for scope in scopes:  # all of them, whatever has been found: others wait in the next one
        everyone = transport.gather(scope, (plan.digest if plan is not None else "", wrong))
        told = [f"{member(transport, scope, rank)} {other}" for rank, (_, other) in enumerate(everyone) if other]
        digests = [digest for digest, _ in everyone]
        if told:
            wrong = wrong or told[0]
        elif len(set(digests)) > 1 and plan is not None:
            texts = transport.gather(scope, plan.description)
            odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            wrong = _difference(transport, scope, odd, digests, texts)
    if failure is not None:
        raise failure
    if wrong or plan is None:
        raise RunError(wrong)
    return plan


def _difference(transport: Transport, scope: str, odd: int, digests: Sequence[str], texts: Sequence[str]) -> str:
    ours, theirs = texts[0].splitlines(), texts[odd].splitlines()
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        place = min(len(ours), len(theirs))
    lines = [text[place] if place < len(text) else "(ends)" for text in (ours, theirs)]
    first, other = member(transport, scope, 0), member(transport, scope, odd)
    return (
        f"{first} and {other} have compiled different programs ({digests[0]} and {digests[odd]}); they first differ "
        f"in\n  {first}: {lines[0]}\n  {other}: {lines[1]}\nbuild the same model and ask for the same schedule on "
        "every rank"
    )
