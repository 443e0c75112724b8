"""Labelled: the calls of a step, each in a region of a profile: "fxpipe 2F5 text", "fxpipe send 2F5 text"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpipe.graph.stage_graph import StageGraph
from fxpipe.labels import label
from fxpipe.run.actions import LeftOut
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.lower import Compute, Instruction, Send

Call = Callable[[], object]


def labelled(calls: Sequence[tuple[Instruction, Call]], graph: StageGraph) -> list[tuple[Instruction, Call]]:
    """For a step that is profiled; a receive that is posted, and a buffer that is freed, take no time to speak of."""
    return [(instruction, _within(call, _name(instruction, call, graph))) for instruction, call in calls]


def _within(call: Call, name: str) -> Call:
    def call_within() -> object:
        with label(name):
            return call()

    return call_within if name else call


def _name(instruction: Instruction, call: Call, graph: StageGraph) -> str:
    match instruction:
        case Compute(action) if not isinstance(call, LeftOut):
            return f"{action} {graph.names[action.stage]}"
        case Send(message):
            edge = graph.edges[message.edge]
            stage = edge.source if message.op is Op.F else edge.target
            return f"send {Action(stage, message.op, message.microbatch)} {graph.names[stage]}"
    return ""
