"""Stage copy: a stage's module with structure of its own, and the very tensors of the model.

What is done to the copy (hooks, wrappers, classes swapped, modules replaced) leaves the model's own modules as they
are, under their own names; the tensors, which are most of it, are not copied.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import fx, nn

from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage, StageGraph, all_tensors


@dataclass(frozen=True)
class StageCopy:
    """``module``: the copy. ``prefix``: what the model's names have in front of the copy's own.
    ``twins``: (a module of the model, its copy)."""

    stage: Stage
    module: nn.Module
    prefix: str
    twins: tuple[tuple[nn.Module, nn.Module], ...]

    def held(self, name: str) -> Any:
        """What the copy now has under one of the model's names; None where that is nothing.

        Wrappers of modules hand on what they have not, so that the name need not list them.
        """
        try:
            return attrgetter(name.removeprefix(self.prefix))(self.module)
        except AttributeError:
            return None

    def without_tensors(self) -> StageCopy:
        """The same, holding on to no tensor that has been replaced."""
        return dataclasses.replace(self, stage=dataclasses.replace(self.stage, tensors={}))

    def take_flags(self) -> None:
        """The copies are in training, or not, as the model's modules are."""
        for original, twin in self.twins:
            twin.training = original.training


def copy_of(stage: Stage, graph: StageGraph) -> StageCopy:
    """A copy of a stage's module. RunError where a part of it cannot be copied."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in all_tensors(graph.module).values()}
    memo |= {id(tensor): tensor for tensor in stage.tensors.values()}
    module = stage.module
    assert isinstance(module, nn.Module)
    if graph.module._modules.get(stage.name) is module:  # the user's own, under the stage's name
        copied = _copied(module, memo, stage.name)
        return StageCopy(stage, copied, f"{stage.name}.", _twins(module, memo))
    assert isinstance(module, fx.GraphModule)
    root: dict[str, Any] = {}
    twins: dict[int, tuple[nn.Module, nn.Module]] = {}
    for node in module.graph.nodes:
        if node.op not in ("get_attr", "call_module") or node.target in root:
            continue
        found = attrgetter(node.target)(module)
        if isinstance(found, nn.Module):
            root[node.target] = _copied(found, memo, node.target)
            twins |= {id(original): (original, twin) for original, twin in _twins(found, memo)}
        else:
            root[node.target] = found
    copied = fx.GraphModule(root, copy.deepcopy(module.graph), class_name=type(module).__name__)
    copied.training = module.training
    return StageCopy(stage, copied, "", tuple(twins.values()))


def _copied(module: nn.Module, memo: dict[int, Any], name: str) -> nn.Module:
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise RunError(
            f"parallelize= works on copies of modules that share their tensors, but {name} ({type(module).__name__}) "
            f"cannot be copied: {type(error).__name__}: {error}; give it a __deepcopy__, or keep what cannot be copied "
            "out of its attributes"
        ) from error


def _twins(module: nn.Module, memo: Mapping[int, Any]) -> tuple[tuple[nn.Module, nn.Module], ...]:
    return tuple((original, memo[id(original)]) for original in module.modules() if id(original) in memo)
