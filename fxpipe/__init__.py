"""fxpipe: a functional, graph-based pipeline compiler for PyTorch.

Schedules and topologies are plain arithmetic: names that need torch are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe import schedules
from fxpipe.action import Action, Op
from fxpipe.comparison import compare
from fxpipe.costs import Costs
from fxpipe.errors import (
    CheckpointError,
    FxpipeError,
    PartitionError,
    RunError,
    ScheduleError,
    TopologyError,
    TraceError,
    nearest,
)
from fxpipe.marker import stage_boundary
from fxpipe.schedule import Schedule
from fxpipe.schedules import SCHEDULES
from fxpipe.timeline import Timeline
from fxpipe.topology import Topology

if TYPE_CHECKING:
    from fxpipe import passes
    from fxpipe.compiler import compile, preview
    from fxpipe.engine import ForwardBackward
    from fxpipe.initialise import init_weights_of, reset_parameters
    from fxpipe.ir import StageGraph
    from fxpipe.loss import Sum
    from fxpipe.precision import Precision
    from fxpipe.trace import TRACERS
    from fxpipe.traffic import Traffic
    from fxpipe.weights import Weights
    from fxpipe.world import init, launch

__all__ = [
    "SCHEDULES",
    "TRACERS",
    "Action",
    "CheckpointError",
    "Costs",
    "ForwardBackward",
    "FxpipeError",
    "Op",
    "PartitionError",
    "Precision",
    "RunError",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "Sum",
    "Timeline",
    "Topology",
    "TopologyError",
    "TraceError",
    "Traffic",
    "Weights",
    "compare",
    "compile",
    "init",
    "init_weights_of",
    "launch",
    "passes",
    "preview",
    "reset_parameters",
    "schedules",
    "stage_boundary",
]

# Name → the module that has it, whose import takes torch along.
_LATER = {
    "TRACERS": "trace",
    "ForwardBackward": "engine",
    "Precision": "precision",
    "StageGraph": "ir",
    "Sum": "loss",
    "Traffic": "traffic",
    "Weights": "weights",
    "compile": "compiler",
    "init": "world",
    "init_weights_of": "initialise",
    "launch": "world",
    "passes": "passes",
    "preview": "compiler",
    "reset_parameters": "initialise",
}


def _first_use(name: str) -> Any:
    """What is asked of the package and not there yet; from then on it is there (PEP 562)."""
    if name not in _LATER:
        hint = "" if name.startswith("_") else nearest(name, __all__)
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}{hint}", name=name)
    module = import_module(f"fxpipe.{_LATER[name]}")
    value = globals()[name] = module if name == _LATER[name] else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for Any
    __getattr__ = _first_use
