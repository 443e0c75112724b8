"""Stage reads: which modules of a rank's stages have each parameter, and where their forwards read it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.torch_compat.modules import hook_tables

_TORCH = "torch torch._C._nn torch._ops.aten torch.functional torch.nn.functional"
_SAVING = {"_operator", "builtins", "math", "fxpipe.stage.modes", *_TORCH.split()}
"""Modules of functions whose backward reads only what C++ has saved in forward. An ``autograd.Function``, a custom
operator or an activation checkpoint may read parameters that Python holds."""


@dataclass(frozen=True)
class StageReads:
    """What the stages of a plan read on a rank."""

    modules: list[nn.Module]
    """The stages' modules, with all modules inside of them."""
    saves: bool
    """Whether a backward reads only parameters that its forward has saved, unless a hook of a module reads others."""
    homes: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """Parameter name → the (module, attribute) pairs that register the parameter."""
    positions: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Stage → parameter name → the positions, among the nodes of the stage's graph, of the first node that reads the
    parameter and of the last node that gets it. Only stages that run the code of a graph, and plans of one capture."""

    @staticmethod
    def of_rank(graphs: Sequence[StageGraph], rank: int | None, names: Mapping[int, str]) -> StageReads:
        """``names``: the identity of each parameter that the modules have now → its name."""
        modules = [part for module in modules_of(graphs, rank) for part in module.modules()]
        reads = StageReads(modules, all(map(_saves_all, modules)))
        for part in reads.modules:
            for leaf, parameter in part._parameters.items():
                if id(parameter) in names:
                    reads.homes.setdefault(names[id(parameter)], []).append((part, leaf))
        for stage in stages_of(graphs[0], rank) if len(graphs) == 1 else ():
            if isinstance(stage.function, fx.GraphModule):
                reads.positions[stage.index] = _positions(stage.function, names)
        return reads

    def saves_all(self) -> bool:
        """Whether ``saves``, and no module has a hook now."""
        return self.saves and not any(any(hook_tables(module)) for module in self.modules)


def _positions(module: fx.GraphModule, names: Mapping[int, str]) -> dict[str, tuple[int, int]]:
    order = {node: position for position, node in enumerate(module.graph.nodes)}
    found: dict[str, tuple[int, int]] = {}
    for node, first in order.items():
        if node.op not in ("get_attr", "call_module"):
            continue
        value = operator.attrgetter(node.target)(module)
        last = first if node.op == "call_module" else max(map(order.__getitem__, node.users), default=first)
        for parameter in value.parameters() if isinstance(value, nn.Module) else [value]:
            if name := names.get(id(parameter)):
                earliest, latest = found.get(name, (first, last))
                found[name] = min(earliest, first), max(latest, last)
    return found


def _saves_all(module: nn.Module) -> bool:
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    homes = {getattr(node.target, "__module__", "torch") for node in nodes if node.op == "call_function"}
    return type(module).__module__.startswith(("torch.nn.modules.", "torch.fx.")) and homes <= _SAVING


def stages_of(graph: StageGraph, rank: int | None) -> list[Stage]:
    return [stage for stage in graph if rank in graph.ranks(stage.index)]


def modules_of(graphs: Sequence[StageGraph], rank: int | None) -> list[nn.Module]:
    """Returns the modules that a rank's stages run, each once, including the owners of opaque calls."""
    modules = [stage.module for graph in graphs for stage in stages_of(graph, rank)]
    modules += [call.owner for module in modules for call in opaque_calls(module)]
    return list({id(module): module for module in modules if isinstance(module, nn.Module)}.values())
