"""fxpipe: a functional, graph-based pipeline compiler for PyTorch.

Schedules and topologies are plain arithmetic; the package imports names that need torch at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe import graph, schedules
from fxpipe.dealing import deal
from fxpipe.distributed.topology import Topology
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
from fxpipe.graph.boundary import stage_boundary
from fxpipe.packed import Offsets, Packed
from fxpipe.policies import Checks, Tracing, Zero
from fxpipe.schedules import SCHEDULES
from fxpipe.schedules.action import Action
from fxpipe.schedules.comparison import compare
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule, Timeline

if TYPE_CHECKING:
    from fxpipe import passes
    from fxpipe.choosing import choose
    from fxpipe.compiler import compile, preview
    from fxpipe.distributed.processes import init, launch
    from fxpipe.distributed.traffic import Traffic
    from fxpipe.forecast.choice import Choice
    from fxpipe.forecast.preview import Preview
    from fxpipe.graph.cuts import Cuts
    from fxpipe.graph.stage_graph import StageGraph
    from fxpipe.hardware import Hardware
    from fxpipe.numerics.comparison import bisect
    from fxpipe.numerics.plain import record_plain
    from fxpipe.parameters.materialise import init_weights_of, reset_parameters
    from fxpipe.parameters.weights import Weights
    from fxpipe.precision import Precision
    from fxpipe.run.average import Average
    from fxpipe.run.batch_norm import update_batch_norm
    from fxpipe.run.forward_backward import ForwardBackward
    from fxpipe.run.loading import load
    from fxpipe.run.log_to import log_to
    from fxpipe.run.saving import save
    from fxpipe.stage.loss import Sum
    from fxpipe.trace import TRACERS

__version__ = "0.3.0"

__all__ = [
    "SCHEDULES",
    "TRACERS",
    "Action",
    "Average",
    "CheckpointError",
    "Checks",
    "Choice",
    "Costs",
    "Cuts",
    "ForwardBackward",
    "FxpipeError",
    "Hardware",
    "Kind",
    "Offsets",
    "Packed",
    "PartitionError",
    "Precision",
    "Preview",
    "RunError",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "Sum",
    "Timeline",
    "Topology",
    "TopologyError",
    "TraceError",
    "Tracing",
    "Traffic",
    "Weights",
    "Zero",
    "bisect",
    "choose",
    "compare",
    "compile",
    "deal",
    "graph",
    "init",
    "init_weights_of",
    "launch",
    "load",
    "log_to",
    "passes",
    "preview",
    "record_plain",
    "reset_parameters",
    "save",
    "schedules",
    "stage_boundary",
    "update_batch_norm",
]

# Name → the module that defines the name and imports torch.
_LATER = {
    "TRACERS": "trace",
    "Average": "run.average",
    "Choice": "forecast.choice",
    "Cuts": "graph.cuts",
    "ForwardBackward": "run.forward_backward",
    "Hardware": "hardware",
    "Precision": "precision",
    "Preview": "forecast.preview",
    "StageGraph": "graph.stage_graph",
    "Sum": "stage.loss",
    "Traffic": "distributed.traffic",
    "Weights": "parameters.weights",
    "bisect": "numerics.comparison",
    "choose": "choosing",
    "compile": "compiler",
    "init": "distributed.processes",
    "init_weights_of": "parameters.materialise",
    "launch": "distributed.processes",
    "load": "run.loading",
    "log_to": "run.log_to",
    "passes": "passes",
    "preview": "compiler",
    "record_plain": "numerics.plain",
    "reset_parameters": "parameters.materialise",
    "save": "run.saving",
    "update_batch_norm": "run.batch_norm",
}


def _first_use(name: str) -> Any:
    """Imports a name at its first use and stores the value in the package (PEP 562)."""
    if name not in _LATER:
        hint = "" if name.startswith("_") else nearest(name, __all__)
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}{hint}", name=name)
    module = import_module(f"fxpipe.{_LATER[name]}")
    value = globals()[name] = module if name == _LATER[name] else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if not TYPE_CHECKING:  # with __getattr__, a type checker takes every misspelt name for Any
    __getattr__ = _first_use
