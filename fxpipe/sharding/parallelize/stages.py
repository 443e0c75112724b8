"""Parallel stages: the stages of a rank run the modules that ``parallelize`` has worked on, for each capture.

A capture makes code and names modules; what runs under those names are the copies that the user's function was given.
The gradients of their DTensors are reduced here as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_calls import check_shapes
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.parameters.dtensors import is_dtensor, ranks_of
from fxpipe.parameters.ownership import Ownership
from fxpipe.schedules.action import Action
from fxpipe.sharding.flat_bucket import Piece
from fxpipe.sharding.gradients import Gradients, OptimizerPieces, WhoUsed, last_backwards
from fxpipe.sharding.parallelize.stage_copy import StageCopy
from fxpipe.sharding.reducer import Reducer
from fxpipe.torch_compat import pytree

if TYPE_CHECKING:
    from fxpipe.sharding.fsdp import FsdpStage
if TYPE_CHECKING:
    from fxpipe.sharding.fsdp import FsdpStage


class Parallel:
    """The stages of this rank, as ``parallelize`` has made them."""

    def __init__(self, copies: Mapping[int, StageCopy], sharded: Mapping[int, FsdpStage]) -> None:
        self._copies, self._sharded = dict(copies), dict(sharded)
        self._adopted: dict[int, _Adopted] = {}  # by the identity of the captured stage's module
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
        home = self._copies[stage.index]
        key = id(stage.module)
        if key not in self._adopted:
            code, given = self._code(stage, home)
            function = _StageFunction(stage.name, home.module, code, max(len(stage.outputs), 1))
            self._adopted[key] = _Adopted(stage.module, function, home.module, given)
        return dataclasses.replace(stage, function=self._adopted[key].function)

    def keep(self, graphs: Sequence[StageGraph]) -> None:
        """Lets go of what was adopted for other graphs than these, and of what their code alone was given."""
        wanted = {id(stage.module) for graph in graphs for stage in graph}
        for key in self._adopted.keys() - wanted:
            gone = self._adopted.pop(key)
            for name in gone.given:
                delattr(gone.home, name)

    def _code(self, stage: Stage, home: StageCopy) -> tuple[Callable[..., Any] | None, Collection[str]]:
        """What the stage's module runs for this capture; None: its own forward, which the user has written. And the
        names of what it was given for it."""
        if home.prefix:
            return None, ()
        assert isinstance(stage.module, fx.GraphModule)
        _let_go(stage)
        _let_be_sharded(stage.module)
        given: Collection[str] = ()
        if stage.module is not home.stage.module:
            self._captures += 1
            given = _move_in(stage, home, self._captures)
        return types.MethodType(type(stage.module).forward, home.module), given

    def gradients(self, inner: Reducer, transport: Transport, owners: Ownership, model: nn.Module) -> ParallelGradients:
        """The gradients of this rank: plain parameters are ``inner``'s, DTensors are summed beside it."""
        rank = transport.pipe_rank
        mine = {n: p for n, p in model.named_parameters() if rank is None or n in owners.names[rank]}
        spread = {name: mine[name] for name in mine if is_dtensor(mine[name])}
        return ParallelGradients(inner, spread, self._sharded, transport, owners, list(self._copies.values()))


class _Adopted(NamedTuple):
    """What runs in place of ``module``; ``home``: the copy that it runs on, ``given``: what that has for it alone."""

    module: nn.Module
    function: _StageFunction
    home: nn.Module
    given: Collection[str]


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


def _let_go(stage: Stage) -> None:
    """A captured module, of which only the code runs, holds what the model now holds, and nothing else."""
    assert isinstance(stage.module, fx.GraphModule)
    for node in stage.module.graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and name in stage.tensors:
            path, _, leaf = name.rpartition(".")
            owner = stage.module.get_submodule(path)
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


def _move_in(stage: Stage, home: StageCopy, number: int) -> Collection[str]:
    """Makes the code of a later capture run on the modules that ``parallelize`` has worked on.

    What the model does not have (constants, modules made for the capture) is given to them under names of its own,
    which are returned.
    """
    module = stage.module
    assert isinstance(module, fx.GraphModule)
    first = {str(node.target) for node in home.stage.module.graph.nodes if node.op in ("get_attr", "call_module")}  # type: ignore[union-attr]
    renamed: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        target = str(node.target)
        value = attrgetter(target)(module)
        if _is_of_model(stage, home, node, value):
            if target not in first:
                _check_there(stage, home, node)
            continue
        if target not in renamed:
            renamed[target] = f"{target.replace('.', '_')}_of_capture_{number}"
            _give(home.module, renamed[target], value)
        node.target = renamed[target]
        setattr(module, renamed[target], value)
    if renamed:
        module.recompile()
    return set(renamed.values())


def _is_of_model(stage: Stage, home: StageCopy, node: fx.Node, value: object) -> bool:
    if isinstance(value, Tensor):
        return str(node.target) in stage.tensors
    return any(original is value for original, _ in home.twins) or str(node.target) in _paths(stage)


def _paths(stage: Stage) -> set[str]:
    """The modules in which a stage's tensors lie."""
    found = set()
    for name in stage.tensors:
        parts = name.split(".")[:-1]
        found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found


def _check_there(stage: Stage, home: StageCopy, node: fx.Node) -> None:
    """What a later capture calls must be a module that ``parallelize`` has seen."""
    there = home.held(str(node.target))
    if there is None or (node.op == "call_module" and type(there) is nn.Module):
        raise RunError(
            f"this kind of batch runs {node.target} of stage {stage.name} as a whole, which the first kind took apart, "
            "and parallelize has not seen it so; compile with example_args= of this kind"
        )


def _give(module: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, nn.Module):
        module.add_module(name, value)
    elif isinstance(value, Tensor):
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)


class ParallelGradients(Gradients):
    """``Gradients`` of a rank some of whose parameters are DTensors.

    ``parameters``: these, by name. ``sharded``: what FSDP2 manages, by stage. ``copies``: the modules that run.
    """

    def __init__(
        self,
        inner: Reducer,
        parameters: Mapping[str, nn.Parameter],
        sharded: Mapping[int, FsdpStage],
        transport: Transport,
        owners: Ownership,
        copies: Sequence[StageCopy],
    ) -> None:
        super().__init__(parameters, transport, inner.way, owners.tied)
        self._inner, self._sharded, self._copies = inner, dict(sharded), list(copies)
        self._names = {id(parameter): name for name, parameter in self._own.items()}
        self._managed = {self._names[id(shard)] for stage in self._sharded.values() for shard in stage.parameters}
        data = set(transport.ranks("data")) if transport.data_size > 1 else set()
        self._to_sum = [n for n, p in self._own.items() if is_dtensor(p) and not data <= ranks_of(p)]
        self._lasts: dict[int, Action] = {}
        self._used: set[str] = set()
        self._asked = WhoUsed({}, transport)

    # a call

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        self._inner.begin(graphs, row, sync, scales)
        self._lasts = last_backwards(row)
        self._used.clear()
        self._take_flags()
        self._set_earlier_aside()

    def _take_flags(self) -> None:
        for copied in self._copies:
            copied.take_flags()

    def watch(self, stopwatch: Stopwatch) -> None:
        self._inner.watch(stopwatch)

    def settle(self, stage: int | None = None) -> None:
        self._inner.settle(stage)
        if stage is not None and stage in self._sharded:
            self._sharded[stage].gather()

    def before(self, action: Action) -> None:
        self._inner.before(action)

    def after(self, action: Action) -> None:
        """Behind a stage's last backward, what FSDP2 shards of it is reduced."""
        self._inner.after(action)
        if self._lasts[action.stage] == action and action.stage in self._sharded:
            self._used |= {self._names[id(shard)] for shard in self._sharded[action.stage].reduce()}

    def flush(self) -> None:
        """Frees, too, what stages without a backward have gathered, and asks who has used what."""
        for sharded in self._sharded.values():
            sharded.free()
        self._inner.flush()
        self._used |= {n for n, p in self._own.items() if p.grad is not None and n not in self._managed}
        self._asked = self._ask_who_used(self._used)

    def end(self, factor: Tensor | None) -> None:
        self._inner.end(factor)
        used = self._asked.wait()
        with torch.no_grad():
            for name, parameter in self._own.items():
                parameter.grad = _settled(parameter) if name in used and parameter.requires_grad else None
            self._sum("data", self._to_sum)
            self._sum_over_owners()
            self._scale(factor)
            self._leave_gradients()

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        self._take_flags()
        with self._inner.evaluating(graphs, row):
            yield
        for sharded in self._sharded.values():
            sharded.free()

    def drop(self) -> None:
        super().drop()
        self._inner.drop()

    def clear(self) -> None:
        super().clear()
        self._inner.clear()

    def close(self) -> None:
        self._inner.close()

    # for an optimizer

    def pieces(self) -> list[Piece]:
        return self._inner.pieces() + super().pieces()

    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """A DTensor, whose operations keep it spread."""
        wanted = set(names)
        claim = self._inner.claim(wanted, whole)
        spread = [piece for piece in super().pieces() if piece.name in wanted]
        return OptimizerPieces(claim.number, (*claim.pieces, *spread))

    def publish(self, claim: OptimizerPieces) -> None:
        self._inner.publish(claim)


def _settled(parameter: nn.Parameter) -> Tensor:
    """A DTensor's gradient, spread as the parameter is; zeros where this rank has none."""
    gradient = parameter.grad
    assert is_dtensor(parameter)
    if gradient is None:
        return torch.zeros_like(parameter.detach())
    if is_dtensor(gradient) and tuple(gradient.placements) != tuple(parameter.placements):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient
