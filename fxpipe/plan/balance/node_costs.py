"""Node costs: what each node of a program takes, in seconds and bytes, derived from the shapes of one micro-batch.

The program is run once on fake tensors, which have shapes and no numbers, with autograd on. Nothing is allocated, and
no parameter is touched. Forward is the roofline model of ``Hardware`` over the operators that a node runs; backward
follows from what needs a gradient: frozen parts cost less. What is kept for backward is what autograd keeps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.modes import Autocast, modes_restored, within
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.program import Program, where
from fxpipe.hardware import REFERENCE, FigureMissing, Hardware
from fxpipe.passes.defer_weights import deferred_calls
from fxpipe.plan.balance.memory import Account, Held, rows_of
from fxpipe.plan.capture.on_fakes import attribute, call_node, faked, left_as_it_is, modes_of
from fxpipe.schedules.no_gc import paused
from fxpipe.torch_compat import TorchDispatchMode, packet_of, schema_of, tensors_in, without_onednn
from fxpipe.trace import NEED_SHAPES
from fxpipe.trace.fake import FakeModel, fake_model
from fxpipe.trace.state.replay import checkpoints_noted, checkpoints_that_keep


class CostUnknown(PartitionError, TraceError):
    """A node looks at numbers, and its capture has not seen what it makes; another tracer's may have."""


@dataclass(frozen=True)
class NodeCost:
    """What one node takes for one micro-batch; in a gathered stage, a micro-batch's part of what it takes for a group.

    ``backward``: seconds, all of it; ``weight``: an action W's part of it.

    ``saved``: the memory that autograd keeps for its backward, by keys of ``NodeCosts.memory``: nodes that keep the
    same tensor have the same key. ``parameters``: those, buffers and inputs that it uses, by keys of
    ``NodeCosts.parameters``.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    flops: float = 0.0
    backward_flops: float = 0.0
    """Operations of its products, forward and backward; what is computed again in backward counts in neither."""
    ideal: float = 0.0
    """Seconds that both take at the device's peak."""
    bytes_out: int = 0
    gradient_bytes: int = 0
    """Those of what it makes, and of what of it gets a gradient."""
    saved: frozenset[int] = frozenset()
    parameters: frozenset[int] = frozenset()
    trains: bool = False
    """Whether it uses a parameter that needs a gradient."""
    deferred: frozenset[int] = frozenset()
    """What it keeps between I and W, by key: of ``saved`` what W needs, and the gradient of what it makes."""
    again: int = 0
    """The most bytes that one of its own checkpoints computes again in backward."""

    def part(self, size: int) -> NodeCost:
        """What falls to each of ``size`` micro-batches."""
        seconds = {each: getattr(self, each) / size for each in ("forward", "backward", "weight", "ideal")}
        flops = {each: getattr(self, each) / size for each in ("flops", "backward_flops")}
        sizes = {each: getattr(self, each) // size for each in ("bytes_out", "gradient_bytes", "again")}
        return replace(self, **seconds, **flops, **sizes)


def total(costs: Iterable[NodeCost]) -> NodeCost:
    """What nodes take together; what several keep or use counts once."""
    costs = tuple(costs)
    return NodeCost(
        forward=sum(cost.forward for cost in costs),
        backward=sum(cost.backward for cost in costs),
        weight=sum(cost.weight for cost in costs),
        saved=_union(cost.saved for cost in costs),
        parameters=_union(cost.parameters for cost in costs),
        trains=any(cost.trains for cost in costs),
        deferred=_union(cost.deferred for cost in costs),
        again=max((cost.again for cost in costs), default=0),
    )


def _union(keys: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*keys)


@dataclass(frozen=True)
class HeldParameter:
    """A parameter: its bytes as stages run it, and whether it is trained. Or what takes its bytes and no more, with a
    ``count`` of 0: a buffer, or an input of the whole batch."""

    size: int
    count: int = 0
    trained: bool = False
    floating: bool = True
    rows: int = 1
    """The size of its first dimension; 0 where it has none."""

    @staticmethod
    def of(tensor: Tensor) -> HeldParameter:
        """That of a parameter or buffer."""
        if not isinstance(tensor, nn.Parameter):
            return HeldParameter(tensor.nbytes)
        floating = tensor.is_floating_point()
        return HeldParameter(tensor.nbytes, tensor.numel(), tensor.requires_grad, floating, rows_of(tensor))

    def on(self, account: Account) -> Held:
        """What it takes where it lives."""
        if not self.count:
            return Held(parameters=float(self.size))
        part = account.part_of(self.count, self.rows)
        return account.held(self.count, self.size // self.count, self.trained, self.floating, part)


@dataclass(frozen=True)
class Group:
    """What a gathered stage runs for at once: ``size`` micro-batches, of ``times`` the rows of one, such as ``example``
    has; ``times`` is larger where the rows of all replicas are gathered."""

    size: int
    times: int
    example: Mapping[str, Any]


@dataclass(frozen=True)
class NodeCosts:
    """Node name → what it takes. ``costs["linear"].forward`` are seconds."""

    nodes: Mapping[str, NodeCost]
    memory: Mapping[int, int] = field(default_factory=dict)
    """Bytes of what is kept for backward, by key; parameters are not among it."""
    parameters: Mapping[int, HeldParameter] = field(default_factory=dict)
    """The model's parameters and buffers, tied ones once, and the batch's inputs."""
    hardware: Hardware = REFERENCE
    account: Account = field(default_factory=Account)
    """How parameters are counted."""
    halves: bool = True
    """Whether they say what W keeps; not where the backward of stages runs whole, or a compiler cuts it."""
    groups: Mapping[int, Group] = field(default_factory=dict)
    """Gathered stage → its group."""
    guesses: str = ""
    """What could not be run, and what it was taken for, in words."""

    def __getitem__(self, name: str) -> NodeCost:
        return self.nodes.get(name, _NOTHING)

    def saved_bytes(self, keys: Iterable[int]) -> int:
        """What is kept under these keys."""
        return sum(map(self.memory.__getitem__, keys))

    def static_bytes(self, keys: Iterable[int]) -> float:
        """What parameters take where they live, with gradients and optimizer state of those that are trained."""
        return sum(map(self._static.__getitem__, keys))

    @cached_property
    def _static(self) -> Mapping[int, float]:
        return {key: held.on(self.account).sum for key, held in self.parameters.items()}

    def block(self, names: Sequence[str], copies: Mapping[str, NodeCost] = MappingProxyType({})) -> NodeCost:
        """What these nodes take, which run in this order. When a checkpoint of one computes again, what those behind it
        have kept is let go of. ``copies``: those of them that the block runs itself, for a group at once."""
        # What a checkpoint computes again is held beside all that the nodes before it keep. Its own peak is what stands
        # above the total that stays kept.
        kept, most, seen = 0, 0, frozenset[int]()
        costs = [copies.get(name, self[name]) for name in names]
        for cost in costs:
            kept += self.saved_bytes(cost.saved - seen)
            seen |= cost.saved
            most = max(most, kept + cost.again)
        whole = total(costs)
        return replace(whole, again=max(most - kept, 0))


_NOTHING = NodeCost()


@paused()
def costs_from_shapes(
    program: Program,
    example: Mapping[str, Any],
    device: torch.device = torch.device("cpu"),  # noqa: B008  (it is immutable)
    autocast: Sequence[Autocast] = (),
    hardware: Hardware = REFERENCE,
    compute: torch.dtype | None = None,
    account: Account = Account(),  # noqa: B008  (so is this)
    batch: Mapping[str, int] = MappingProxyType({}),
    halves: bool = True,
    groups: Mapping[int, Group] = MappingProxyType({}),
) -> NodeCosts:
    """The costs of each node for a micro-batch like ``example``: input → value, a ``TensorLike`` for each tensor in it.

    ``autocast``: what is on around the call. ``compute``: the type of floating-point parameters and inputs when it
    runs, where that is another. ``batch``: the bytes of its inputs, of all micro-batches. ``halves``: as ``NodeCosts``
    has it. ``groups``: gathered stage → its group. Boundaries cost nothing. A node that looks at numbers, which fake
    tensors have not, is taken for a product of its parameters with each row of what it makes.
    """
    missing = [name for name in program.inputs if name not in example]
    if missing:
        raise PartitionError(f"costs need an example of every input; {missing} are missing from {sorted(example)}")
    with (
        left_as_it_is(program.module),
        torch.inference_mode(False),
        fake_model(program.module, device, compute) as fake,
        torch.enable_grad(),
        without_onednn(),  # its recurrent layers say neither what they compute nor what they keep
        modes_restored(),
        within(autocast),
        fake.mode,
    ):
        costed = partial(_CostingRun.costed, program, fake, hardware=hardware, batch=batch)
        run = costed(example)
        # A program of fixed sizes cannot run a group's rows: its operators count as if they had so many more.
        scaled = program.tracer in NEED_SHAPES or bool(run.guessed)
        # All runs live until the costs are made, since memory is counted by ids of storages.
        runs = {at: costed(example, g.times) if scaled else costed(g.example) for at, g in groups.items()}
    for stage, group_run in runs.items():
        size, names = groups[stage].size, [name for name, at in program.stage_of.items() if at == stage]
        run.found |= {name: group_run.found[name].part(size) for name in names}
        run.memory |= {key: group_run.memory[key] // size for name in names for key in group_run.found[name].saved}
    run.defer(deferred_calls(program))
    guesses = []
    if run.guessed:
        guesses.append(
            f"{', '.join(run.guessed)}: opaque, and cannot run without numbers; reckoned as one product of the "
            "parameters with each row of what is returned"
        )
    if groups and scaled:
        names = [program.stage_names[stage] for stage in groups]
        guesses.append(f"what {', '.join(names)} computes between rows of several micro-batches counts as within each")
    return NodeCosts(run.found, run.memory, run.held, hardware, account, halves, groups, "\n".join(guesses))


class _CostingRun:
    """One run of a program on fake tensors, node by node. ``times``: as if the example had so many times its rows."""

    @staticmethod
    def costed(
        program: Program, fake: FakeModel, example: Mapping[str, Any], times: int = 1, **kwargs: Any
    ) -> _CostingRun:
        """The run of all nodes, with what the model's own checkpoints compute again."""
        run = _CostingRun(program, fake, example, times, **kwargs)
        # A checkpoint hides from autograd what its function does. Where the model has one, a second run in which
        # checkpoints keep everything shows what they compute again.
        checkpoints: list[None] = []
        with checkpoints_noted(lambda: checkpoints.append(None)):
            run.all_nodes()
        if checkpoints:
            keeping = _CostingRun(program, fake, example, times, **kwargs)
            with checkpoints_that_keep(keeping.one_checkpoint):
                keeping.all_nodes()
            run.computes_again(keeping)
        return run

    def __init__(
        self,
        program: Program,
        fake: FakeModel,
        example: Mapping[str, Any],
        times: int,
        hardware: Hardware,
        batch: Mapping[str, int],
    ) -> None:
        self.program, self.fake, self.times, self.hardware = program, fake, times, hardware
        self.values: dict[Node, Any] = {}
        self.inputs = fake.inputs(example)
        self.found: dict[str, NodeCost] = {}
        self.memory: dict[int, int] = {}
        self.guessed: dict[str, None] = {}
        self._saved: set[int] = set()
        self._inside: dict[int, int] | None = None  # what a checkpoint keeps that runs now
        self._again, self._again_seconds = 0, 0.0
        self.seconds_again: dict[str, float] = {}
        """Node → what its checkpoints compute again, where they keep all that they run."""
        parameters = dict(program.module.named_parameters())
        named = parameters | dict(program.module.named_buffers())
        self._keys = {id(tensor): key for key, tensor in enumerate(named.values())}
        self._inputs = {name: len(named) + place for place, name in enumerate(batch)}
        held = [*map(HeldParameter.of, named.values()), *map(HeldParameter, batch.values())]
        self.held = dict(enumerate(held))
        # kept, so that no two storages ever have the same id; a batch counts by itself
        self._storages = [tensor.untyped_storage() for tensor in [*named.values(), *tensors_in(self.inputs)]]
        self._own = set(map(id, self._storages))
        self._weights = {id(parameter.untyped_storage()) for parameter in parameters.values()}

    def all_nodes(self) -> None:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            for node in self.program.nodes:
                if node.op == "placeholder":
                    self.values[node] = self.inputs[str(node.target)]
                elif node.op == "get_attr":
                    self.values[node] = attribute(self.program, node, self.fake)
                elif node.op != "output":
                    self._note(node)

    def defer(self, calls: Sequence[str]) -> None:
        """Counts what these calls keep until W: what autograd saves for them, and what comes back to them."""
        for place, name in enumerate(calls, start=1):
            cost = self.found[name]
            # W needs the saved inputs of its calls, and the gradient that came back to what they made.
            self.memory[-place] = cost.bytes_out  # ids of objects are positive
            self.found[name] = replace(cost, deferred=cost.saved | {-place})

    @contextlib.contextmanager
    def one_checkpoint(self) -> Iterator[None]:
        """Around a function given to a checkpoint: looks at what it keeps; for those inside of it, along with it."""
        # Of nested checkpoints the outer one computes again all that the inner ones do.
        if self._inside is not None:
            yield
            return
        self._inside, before = {}, self.meter.forward
        try:
            yield
        finally:
            self._again = max(self._again, sum(self._inside.values()))
            self._again_seconds += (self.meter.forward - before) * bool(self._inside)
            self._inside = None

    def computes_again(self, keeping: _CostingRun) -> None:
        """Takes over what checkpoints compute again, from a run in which they keep all: one that keeps nothing shows
        neither what that is nor what is differentiated there."""
        for name, seconds in keeping.seconds_again.items():
            cost, plain = keeping.found[name], self.found[name]
            self.found[name] = replace(
                cost, backward=cost.backward + seconds, saved=plain.saved, parameters=plain.parameters
            )

    def _pack(self, tensor: Tensor) -> Tensor:
        # Nodes that keep views of one tensor keep its memory once, so memory is counted by storage. Parameters and the
        # batch are there anyway.
        storage = tensor.untyped_storage()
        if id(storage) not in self._own:
            if self._inside is not None:
                self._inside[id(storage)] = self.times * storage.nbytes()
            self._storages.append(storage)
            self.memory[id(storage)] = self.times * storage.nbytes()
            self._saved.add(id(storage))
        return tensor

    def _note(self, node: Node) -> None:
        def is_weight(tensor: Tensor) -> bool:
            return id(tensor.untyped_storage()) in self._weights

        self.meter = meter = OperatorMeter(self.hardware, is_weight, self.times)
        self._saved = set()
        self._again, self._again_seconds = 0, 0.0
        try:
            with modes_of(node), meter:
                self.values[node] = call_node(self.program, node, self.values)
            # What ran without gradients and kept something is an autograd.Function, or a checkpoint: its backward is
            # taken to compute it again, and twice as much for the gradients.
            backward = meter.input + meter.weight + (3 * meter.without_gradient if self._saved else 0.0)
            cost = NodeCost(meter.forward, backward, meter.weight, meter.flops, meter.backward_flops, meter.ideal)
        except FigureMissing:
            raise
        except Exception as error:
            cost = self._guessed(node, error)
        used, made = self._parameters(node), tensors_in(self.values[node])
        self.found[node.name] = replace(
            cost,
            bytes_out=self.times * sum(tensor.nbytes for tensor in made),
            gradient_bytes=self.times * sum(tensor.nbytes for tensor in made if tensor.requires_grad),
            saved=frozenset(self._saved),
            parameters=used,
            trains=any(self.held[key].trained for key in used),
            again=self._again,
        )
        if self._again:
            self.seconds_again[node.name] = self._again_seconds

    def _guessed(self, node: Node, error: Exception) -> NodeCost:
        """Of a node that cannot run on fake tensors: from what its capture saw it make."""
        if "val" not in node.meta:
            raise CostUnknown(
                f"{node.name}{where(node)} cannot run without numbers ({type(error).__name__}: {error}), so its cost "
                "is not known; balance by hand with boundaries= and placement="
            ) from error
        self.guessed |= dict.fromkeys(call.name for call in opaque_calls(self.program.opaque.get(str(node.target))))
        self.values[node] = faked(node.meta["val"], self.fake)
        # As a linear layer of all its parameters: 2 operations for each weight and row, twice as many in backward.
        made = tensors_in(self.values[node])
        rows = self.times * max((tensor.numel() // max((1, *tensor.shape[-1:])) for tensor in made), default=1)
        count = sum(self.held[key].count for key in self._parameters(node))
        flops, moved = 2.0 * rows * count, 4.0 * count + self.times * sum(tensor.nbytes for tensor in made)
        seconds = self.hardware.seconds(flops, moved, 4)
        for tensor in made:
            self._pack(tensor)
        return NodeCost(seconds, 2 * seconds, seconds, flops, 2 * flops, 3 * flops / self.hardware.peak(4))

    def _parameters(self, node: Node) -> frozenset[int]:
        """The keys of the parameters, buffers and inputs that a node uses."""
        used: list[Tensor] = []
        if node.op == "call_module":
            module: nn.Module = self.program.attribute(node)
            effects = self.program.effects.get(node.name)
            read = module.buffers() if effects is None else map(self.program.attribute, effects.reads)
            used = [*module.parameters(), *read]
        used += [self.values[operand] for operand in node.all_input_nodes if operand.op == "get_attr"]
        inputs = [str(operand.target) for operand in node.all_input_nodes if operand.op == "placeholder"]
        found = [self._inputs[name] for name in inputs if name in self._inputs]
        return frozenset([*found, *(self._keys[id(tensor)] for tensor in used if id(tensor) in self._keys)])


# --- what an operator below autograd costs ---

_ATTENTION = "_scaled_dot_product"
_ATTENTION_BACKWARD = 2.5
"""Of attention's matrix products: it makes its two again in part, and four for the gradients."""
_ADDED_FIRST = ("addmm", "baddbmm", "addbmm", "addmv")
"""Products whose first argument is a summand and no factor."""
_GATHERS = ("embedding", "index_select", "gather", "index")
"""Operators that read no more of their first argument than they return."""


class OperatorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what the operators take that run while it is open.

    ``is_weight``: whether a tensor is, or shares the memory of, a parameter. The gradients of those are what an action
    W computes; all others are I's. ``times``: as if they had so many times the rows.
    """

    def __init__(self, hardware: Hardware, is_weight: Callable[[Tensor], bool], times: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hardware, self._is_weight, self._times = hardware, is_weight, times
        self.forward = self.input = self.weight = self.without_gradient = 0.0
        self.flops = self.backward_flops = 0.0
        self.ideal = 0.0
        """Seconds that the products take at the peak."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        # A view moves nothing, and launches no kernel.
        memory = {id(tensor.untyped_storage()) for tensor in given}
        is_view = not schema_of(func).is_mutable and all(id(tensor.untyped_storage()) in memory for tensor in made)
        if is_view or not made:
            return
        name = packet_of(func).__name__
        flops = self._times * _flops(func, name, args, kwargs, result)
        read = made if name in _GATHERS else given
        moved = self._times * sum(tensor.nbytes for tensor in [*read, *made])
        seconds = self._hardware.seconds(flops, moved, made[0].element_size())
        self.forward += seconds
        self.flops += flops
        if not torch.is_grad_enabled():
            self.without_gradient += seconds
        before = self.backward_flops
        # No backward is run: what it takes follows from the factors that need a gradient.
        factors = given[1:3] if name in _ADDED_FIRST else given
        needing = [tensor for tensor in factors if tensor.requires_grad and torch.is_grad_enabled()]
        if needing:
            self._note_gradients(name, needing, made, seconds, flops)
        if flops:
            self.ideal += (flops + self.backward_flops - before) / self._hardware.peak(made[0].element_size())

    def _note_gradients(
        self, name: str, needing: Sequence[Tensor], made: Sequence[Tensor], seconds: float, flops: float
    ) -> None:
        """A product's backward is a product for each factor that needs a gradient; another operator's moves as many
        bytes as its forward, but the gradient of an embedding is as large as its table."""
        if name.startswith(_ATTENTION):
            self.input += _ATTENTION_BACKWARD * seconds
            self.backward_flops += 2 * flops
            return
        if flops:
            # A bias is one-dimensional: its gradient is a sum, and no product.
            needing = [tensor for tensor in needing if tensor.dim() > 1]
            self.backward_flops += flops * len(needing)
        elif name in _GATHERS:
            needing = needing[:1]
            table = needing[0].nbytes + self._times * sum(tensor.nbytes for tensor in made)
            seconds = self._hardware.seconds(0, table, needing[0].element_size())
        else:
            needing = sorted(needing, key=self._is_weight)[:1]  # an activation, if there is one
        for tensor in needing:
            if self._is_weight(tensor):
                self.weight += seconds
            else:
                self.input += seconds


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> float:
    """By torch's own table; attention for the CPU, which is not in it, is the product of q, k and v as elsewhere."""
    count = flop_registry.get(packet_of(func))
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    if name.startswith(_ATTENTION):
        query, key, value = (tensor.shape for tensor in args[:3])
        return float(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    return 0.0
