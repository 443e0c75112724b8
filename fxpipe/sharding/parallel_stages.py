"""Parallel stages: the stages of a rank run the modules that ``parallelize`` has worked on, for each capture.

A stage copy has structure of its own, and the very tensors of the model: what is done to it (hooks, wrappers, classes
swapped, modules replaced) leaves the model's own modules as they are, under their own names. A capture makes code and
names modules; what runs under those names are the copies. The gradients of their DTensors are reduced here as well.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_calls import check_shapes
from fxpipe.graph.stage_graph import Stage, StageGraph, all_tensors
from fxpipe.parameters.dtensors import is_dtensor, ranks_of
from fxpipe.parameters.ownership import Ownership
from fxpipe.schedules.action import Action
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.sharding.gradients import last_backwards
from fxpipe.sharding.reducer import Reducer, Shared
from fxpipe.torch_compat import pytree

if TYPE_CHECKING:
    from fxpipe.sharding.fsdp import FsdpStage


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


def copy_of(stage: Stage, graph: StageGraph) -> StageCopy:
    """A copy of a stage's module. RunError where a part of it cannot be copied."""
    tensors = [*all_tensors(graph.module).values(), *stage.tensors.values()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    twins: dict[int, tuple[nn.Module, nn.Module]] = {}

    def copied(module: nn.Module, name: str) -> nn.Module:
        try:
            made = copy.deepcopy(module, memo)
        except Exception as error:
            raise RunError(
                f"parallelize= works on copies of modules that share their tensors, but {name} "
                f"({type(module).__name__}) cannot be copied: {type(error).__name__}: {error}; give it a __deepcopy__, "
                "or keep what cannot be copied out of its attributes"
            ) from error
        twins.update({id(one): (one, memo[id(one)]) for one in module.modules() if id(one) in memo})
        return made

    module = stage.module
    assert isinstance(module, nn.Module)
    if graph.module._modules.get(stage.name) is module:  # the user's own, under the stage's name
        own = copied(module, stage.name)
        return StageCopy(stage, own, f"{stage.name}.", tuple(twins.values()))
    assert isinstance(module, fx.GraphModule)
    root: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module") and node.target not in root:
            found = attrgetter(node.target)(module)
            root[node.target] = copied(found, node.target) if isinstance(found, nn.Module) else found
    made = fx.GraphModule(root, copy.deepcopy(module.graph), class_name=type(module).__name__)
    made.training = module.training
    return StageCopy(stage, made, "", tuple(twins.values()))


class Parallel:
    """The stages of this rank, as ``parallelize`` has made them."""

    def __init__(self, copies: Mapping[int, StageCopy], sharded: Mapping[int, FsdpStage]) -> None:
        self._copies, self._sharded = dict(copies), dict(sharded)
        self._adopted: weakref.WeakKeyDictionary[nn.Module, _StageFunction] = weakref.WeakKeyDictionary()
        self._captures = 0

    def adopt(self, graph: StageGraph) -> StageGraph:
        """The same graph; the stages of this rank run the modules that ``parallelize`` has worked on.

        For the graph that was parallelised, and for later captures of the same model. RunError where a later capture
        takes the modules apart in another way.
        """
        stages = tuple(self._adopt(stage) if stage.index in self._copies else stage for stage in graph)
        return dataclasses.replace(graph, stages=stages)

    def _adopt(self, stage: Stage) -> Stage:
        if isinstance(stage.function, _StageFunction) or not isinstance(stage.module, nn.Module):
            return stage  # done, or idle: what it works on is absent from the batch
        home, module = self._copies[stage.index], stage.module
        if module not in self._adopted:
            code: Callable[..., Any] | None = None  # the module's own forward, which the user has written
            if not home.prefix:
                assert isinstance(module, fx.GraphModule)
                _share_tensors(stage, module)
                _let_be_sharded(module)
                if module is not home.stage.module:
                    self._captures += 1
                    _move_in(stage, module, home, self._captures)
                code = types.MethodType(type(module).forward, home.module)
            self._adopted[module] = _StageFunction(stage.name, home.module, code, max(len(stage.outputs), 1))
        return dataclasses.replace(stage, function=self._adopted[module])

    def gradients(
        self,
        shared: Sequence[Shared],
        alone: Mapping[str, nn.Parameter],
        transport: Transport,
        way: GradientSums,
        capacity: int,
        owners: Ownership,
        module: nn.Module,
    ) -> ParallelGradients:
        """The gradients of this rank, whose part of the model ``module`` is."""
        spread: dict[str, Any] = {name: one for name, one in module.named_parameters() if is_dtensor(one)}
        twins = [pair for copied in self._copies.values() for pair in copied.twins]
        return ParallelGradients(shared, {**alone, **spread}, transport, way, capacity, owners, self._sharded, twins)


class _StageFunction:
    """A stage's function: a call of its module, so that hooks on it run, too.

    ``code``: the forward of the capture that it is for; None: the module's own, whose result goes out ``uses`` times.
    """

    def __init__(self, name: str, module: nn.Module, code: Callable[..., Any] | None, uses: int) -> None:
        self._name, self._module, self._code, self._uses = name, module, code, uses

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self._code is None:
            outputs = (self._module(*inputs),) * self._uses
        else:
            self._module.__dict__["forward"] = self._code
            outputs = self._module(*inputs)
        if any(is_dtensor(leaf) for leaf in pytree.tree_leaves(outputs)):
            raise RunError(
                f"stage {self._name} returns a DTensor, but what passes between stages, and the loss, is the same "
                "plain tensor on all ranks of a tensor group; give the last module of the plan "
                "output_layouts=Replicate(), use_local_output=True"
            )
        return outputs


def _share_tensors(stage: Stage, module: fx.GraphModule) -> None:
    """A captured module, of which only the code runs, holds what the model now holds, and nothing else."""
    for node in module.graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and name in stage.tensors:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            table[leaf] = stage.tensors[name]


def _let_be_sharded(module: fx.GraphModule) -> None:
    """The results of submodules may be shards now, of other shapes than those captured; of those whose code looks at
    values, shapes are checked all the same."""
    checks = [node for node in module.graph.nodes if node.target is check_shapes and not node.args[3]]
    for node in checks:
        module.graph.erase_node(node)
    if checks:
        module.recompile()


def _move_in(stage: Stage, module: fx.GraphModule, home: StageCopy, number: int) -> None:
    """Makes the code of a later capture run on the modules that ``parallelize`` has worked on.

    What the model does not have (constants, modules made for the capture) is given to them, under names of its own,
    for as long as the capture is there. RunError where a module is called that ``parallelize`` has not seen.
    """
    first = {str(node.target) for node in home.stage.module.graph.nodes if node.op in ("get_attr", "call_module")}  # type: ignore[union-attr]
    parts = [name.split(".")[:-1] for name in stage.tensors]
    paths = {".".join(path[:length]) for path in parts for length in range(1, len(path) + 1)}  # modules with tensors
    originals = {id(original) for original, _ in home.twins}
    renamed: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        target = str(node.target)
        value = attrgetter(target)(module)
        if target in stage.tensors if isinstance(value, Tensor) else id(value) in originals or target in paths:
            there = home.held(target)
            if target not in first and (there is None or (node.op == "call_module" and type(there) is nn.Module)):
                raise RunError(
                    f"this kind of batch runs {target} of stage {stage.name} as a whole, which the first kind took "
                    "apart, and parallelize has not seen it so; compile with example_args= of this kind"
                )
            continue
        if target not in renamed:
            renamed[target] = f"{target.replace('.', '_')}_of_capture_{number}"
            if isinstance(value, Tensor):
                home.module.register_buffer(renamed[target], value, persistent=False)
            else:
                setattr(home.module, renamed[target], value)
            weakref.finalize(module, delattr, home.module, renamed[target])
        node.target = renamed[target]
        setattr(module, renamed[target], value)
    if renamed:
        module.recompile()


class ParallelGradients(Reducer):
    """The gradients of a rank some of whose parameters are DTensors, which lie in no bucket.

    ``sharded``: what FSDP2 manages, by stage. ``twins``: (a module of the model, its copy, which runs).
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        alone: Mapping[str, nn.Parameter],
        transport: Transport,
        way: GradientSums,
        capacity: int,
        owners: Ownership,
        sharded: Mapping[int, FsdpStage],
        twins: Sequence[tuple[nn.Module, nn.Module]],
    ) -> None:
        super().__init__(shared, alone, transport, way, capacity, owners.tied)
        self._sharded, self._twins = dict(sharded), twins
        self._names = {id(parameter): name for name, parameter in self._own.items()}
        self._managed = {self._names[id(shard)] for stage in self._sharded.values() for shard in stage.parameters}
        data = set(transport.ranks("data")) if transport.data_size > 1 else set()
        self._to_sum = [n for n, p in self._own.items() if is_dtensor(p) and not data <= ranks_of(p)]
        self._ends: dict[int, Action] = {}  # the last backward of each stage
        self._used: set[str] = set()

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        super().begin(graphs, row, sync, scales)
        self._ends = last_backwards(row)
        self._used.clear()
        self._take_flags()

    def _set_earlier_aside(self, wanted: bool = True) -> None:
        super()._set_earlier_aside()  # what is summed here is this call's alone

    def _take_flags(self) -> None:
        """The copies are in training, or not, as the model's modules are."""
        for original, twin in self._twins:
            twin.training = original.training

    def settle(self, stage: int | None = None) -> None:
        super().settle(stage)
        if stage is not None and stage in self._sharded:
            self._sharded[stage].gather()

    def after(self, action: Action) -> None:
        """Behind a stage's last backward, what FSDP2 shards of it is reduced."""
        super().after(action)
        if self._ends[action.stage] == action and action.stage in self._sharded:
            self._used |= {self._names[id(shard)] for shard in self._sharded[action.stage].reduce()}

    def flush(self) -> None:
        """Frees, too, what stages without a backward have gathered, and asks who has used what."""
        for sharded in self._sharded.values():
            sharded.free()
        super().flush()
        self._used |= {n for n, p in self._own.items() if p.grad is not None and n not in self._managed}
        self._own_asked = self._ask_who_used(self._used)

    def _finish_own(self, factor: Tensor | None) -> None:
        self._sum_used(self._own_asked.wait(), self._to_sum, factor)

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        self._take_flags()
        with super().evaluating(graphs, row):
            yield
        for sharded in self._sharded.values():
            sharded.free()
