"""fxpipe: a functional, graph-based pipeline compiler for PyTorch."""

from fxpipe.action import Action, Op
from fxpipe.compiler import compile
from fxpipe.engine import ForwardBackward
from fxpipe.errors import (
    CheckpointError,
    FxpipeError,
    PartitionError,
    RunError,
    ScheduleError,
    TopologyError,
    TraceError,
)
from fxpipe.ir import StageGraph
from fxpipe.loss import Sum
from fxpipe.marker import stage_boundary
from fxpipe.schedule import Schedule
from fxpipe.schedules import SCHEDULES
from fxpipe.topology import Topology
from fxpipe.trace import TRACERS
from fxpipe.world import init, launch

__all__ = [
    "SCHEDULES",
    "TRACERS",
    "Action",
    "CheckpointError",
    "ForwardBackward",
    "FxpipeError",
    "Op",
    "PartitionError",
    "RunError",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "Sum",
    "Topology",
    "TopologyError",
    "TraceError",
    "compile",
    "init",
    "launch",
    "stage_boundary",
]
