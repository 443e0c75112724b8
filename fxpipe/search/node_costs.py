"""Node costs: the seconds and bytes of each node of a program, derived from the shapes of a micro-batch.

The program runs once on fake tensors, which have shapes and no numbers, with autograd on. Nothing is allocated, and no
parameter is touched. Forward seconds come from the roofline model of ``Hardware`` over a node's operators; backward
seconds from the tensors that need gradients: frozen parts cost less. Saved bytes are the bytes that autograd saves.
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
from fxpipe.graph.program import Program, where
from fxpipe.hardware import REFERENCE, FigureMissing, Hardware
from fxpipe.no_gc import paused
from fxpipe.passes.defer_weights import halves_of
from fxpipe.search.alike import NodeOutcome, Operands, has_only_pure_operators
from fxpipe.search.memory import Account, StaticBytes, rows_of
from fxpipe.stage.activation_checkpoints import checkpoints_noted, checkpoints_that_keep
from fxpipe.stage.modes import Autocast, modes_restored, within
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.torch_compat.operators import TorchDispatchMode, schema_of, without_onednn
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace.checks.on_fakes import attribute, call_node, faked, left_as_it_is, modes_of
from fxpipe.trace.fake import FakeModel, fake_model


class CostUnknown(PartitionError, TraceError):
    """A node reads real numbers, and its capture has not recorded its result; another tracer's capture may have."""


@dataclass(frozen=True)
class NodeCost:
    """The costs of a node for a micro-batch; in a gathered stage, a micro-batch's share of the costs for a group.

    ``backward``: seconds of the whole backward; ``weight``: the part of these seconds that belongs to an action W.

    ``saved``: the memory that autograd keeps for the node's backward, as keys of ``NodeCosts.memory``. Nodes that keep
    the same tensor have the same key. ``parameters``: the parameters, buffers and inputs that the node uses, as keys
    of ``NodeCosts.parameters``.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    flops: float = 0.0
    backward_flops: float = 0.0
    """FLOPs of the node's products, forward and backward; recomputation in backward counts in neither."""
    ideal: float = 0.0
    """The seconds of forward and backward products at the device's peak."""
    bytes_out: int = 0
    gradient_bytes: int = 0
    """The bytes of the node's results, and of the results that need a gradient."""
    saved: frozenset[int] = frozenset()
    parameters: frozenset[int] = frozenset()
    trains: bool = False
    """Whether the node uses a parameter that needs a gradient."""
    deferred: frozenset[int] = frozenset()
    """The keys of the memory kept between I and W: the part of ``saved`` that W needs, and the result's gradient."""
    again: int = 0
    """The most bytes that a checkpoint of the model inside the node computes again in backward."""

    def part(self, size: int) -> NodeCost:
        """The share of each of ``size`` micro-batches."""
        names = "forward backward weight ideal flops backward_flops".split()
        shares = {each: getattr(self, each) / size for each in names}
        sizes = {each: getattr(self, each) // size for each in ("bytes_out", "gradient_bytes", "again")}
        return replace(self, **shares, **sizes)


def total(costs: Iterable[NodeCost]) -> NodeCost:
    """The sum of the nodes' costs; memory and parameters that several nodes share count once."""
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
class ParameterCost:
    """A parameter: its bytes in stages, and whether it is trained. Or, with a ``count`` of 0, a buffer or an input of
    the whole batch, which has no gradient and no optimizer state."""

    size: int
    count: int = 0
    trained: bool = False
    floating: bool = True
    rows: int = 1
    """The size of the parameter's first dimension; 0 if it has no dimension."""

    @staticmethod
    def from_tensor(tensor: Tensor) -> ParameterCost:
        """The entry of a parameter or a buffer."""
        if not isinstance(tensor, nn.Parameter):
            return ParameterCost(tensor.nbytes)
        floating = tensor.is_floating_point()
        return ParameterCost(tensor.nbytes, tensor.numel(), tensor.requires_grad, floating, rows_of(tensor))

    def on(self, account: Account) -> StaticBytes:
        """The bytes of the parameter on a rank that holds it."""
        if not self.count:
            return StaticBytes(parameters=float(self.size))
        part = account.part_of(self.count, self.rows)
        return account.bytes_of(self.count, self.size // self.count, self.trained, self.floating, part)


@dataclass(frozen=True)
class Group:
    """The group for which a gathered stage runs once: ``size`` micro-batches with ``times`` the rows of a micro-batch.
    ``times`` is larger if the rows of all replicas are gathered. ``example``: inputs with the rows of the group."""

    size: int
    times: int
    example: Mapping[str, Any]


@dataclass(frozen=True)
class NodeCosts:
    """Node name → its costs. ``costs["linear"].forward`` are seconds."""

    nodes: Mapping[str, NodeCost]
    memory: Mapping[int, int] = field(default_factory=dict)
    """Key → bytes of memory that is kept for backward, without parameters."""
    parameters: Mapping[int, ParameterCost] = field(default_factory=dict)
    """The model's parameters and buffers, without duplicates of tied parameters, and the batch's inputs."""
    hardware: Hardware = REFERENCE
    account: Account = field(default_factory=Account)
    """How parameters are counted."""
    halves: bool = True
    """Whether the costs say what W keeps; False if stages run whole backwards, or if a compiler cuts the backward."""
    groups: Mapping[int, Group] = field(default_factory=dict)
    """Gathered stage → its group."""
    guesses: str = ""
    """The nodes that could not run on fake tensors, and the assumed costs, in words."""
    source: str = "costs by shapes"
    """The origin of the seconds, in words."""

    def __getitem__(self, name: str) -> NodeCost:
        return self.nodes.get(name, _NOTHING)

    def on(self, hardware: Hardware, account: Account, batch: Mapping[str, int]) -> NodeCosts:
        """The costs on ranks that count parameters by another ``account``, behind other links, for a batch of other
        sizes. ``batch``: the same inputs → their bytes in all micro-batches."""
        first = len(self.parameters) - len(batch)  # the entries of inputs are the last
        inputs = {first + number: ParameterCost(size) for number, size in enumerate(batch.values())}
        return replace(self, hardware=hardware, account=account, parameters={**self.parameters, **inputs})

    def saved_bytes(self, keys: Iterable[int]) -> int:
        """The bytes of the memory of these keys."""
        return sum(map(self.memory.__getitem__, keys))

    def static_bytes(self, keys: Iterable[int]) -> float:
        """The bytes of these parameters on a rank that holds them, with gradients and optimizer state if trained."""
        return sum(map(self._static.__getitem__, keys))

    @cached_property
    def _static(self) -> Mapping[int, float]:
        return {key: cost.on(self.account).sum for key, cost in self.parameters.items()}

    def block(self, names: Sequence[str], copies: Mapping[str, NodeCost] = MappingProxyType({})) -> NodeCost:
        """The costs of a block of these nodes, in the order in which they run. When a checkpoint recomputes, the nodes
        after it have released their memory. ``copies``: the costs of copied nodes that the block runs for a group."""
        # Memory that a checkpoint recomputes is added to the memory that all nodes up to it keep. ``again`` is the
        # excess of that peak over the total that the block keeps.
        saved, most, seen = 0, 0, frozenset[int]()
        costs = [copies.get(name, self[name]) for name in names]
        for cost in costs:
            saved += self.saved_bytes(cost.saved - seen)
            seen |= cost.saved
            most = max(most, saved + cost.again)
        whole = total(costs)
        return replace(whole, again=max(most - saved, 0))


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
    keeps: bool = False,
) -> NodeCosts:
    """The costs of each node for a micro-batch like ``example``: input → value, with a ``TensorSpec`` for each tensor.

    ``autocast``: the autocast modes around the call. ``compute``: the type of floating-point parameters and inputs in
    stages, if it changes. ``batch``: input → its bytes in all micro-batches. ``halves``: as in ``NodeCosts``.
    ``groups``: gathered stage → its group. ``keeps``: whether the model's own checkpoints keep their activations, as
    they do in an action R. Boundaries cost nothing. A node that reads real numbers cannot run on fake
    tensors; its cost is estimated as a product of its parameters with each row of its result.
    """
    missing = [name for name in program.inputs if name not in example]
    if missing:
        raise PartitionError(f"costs need an example of every input; {missing} are missing from {sorted(example)}")
    with (
        left_as_it_is(program),
        torch.inference_mode(False),
        fake_model(program.module, device, compute) as fake,
        torch.enable_grad(),
        without_onednn(),  # oneDNN's recurrent layers hide their products and saved tensors
        modes_restored(),
        within(autocast),
        fake.mode,
    ):
        costed = partial(_CostingRun.costed, program, fake, keeps=keeps, hardware=hardware, batch=batch)
        run = costed(example)
        # A program of fixed sizes cannot run a group's rows, so its operators' costs are multiplied.
        scaled = not program.holds_for_any_size or bool(run.guessed)
        # All runs stay alive until the costs are made, since memory is counted by the ids of storages.
        runs = {at: costed(example, g.times) if scaled else costed(g.example) for at, g in groups.items()}
    for stage, group_run in runs.items():
        size, names = groups[stage].size, [name for name, at in program.stage_of.items() if at == stage]
        run.nodes |= {name: group_run.nodes[name].part(size) for name in names}
        run.memory |= {key: group_run.memory[key] // size for name in names for key in group_run.nodes[name].saved}
    calls, in_input = halves_of(program)
    run.defer(calls)
    stay = {name: replace(run.nodes[name], weight=0.0) for name in in_input if name in run.nodes}
    run.nodes |= stay if halves else {}
    guesses = []
    if run.guessed:
        guesses.append(
            f"{', '.join(run.guessed)}: opaque, and cannot run without numbers; reckoned as one product of the "
            "parameters with each row of what is returned"
        )
    if groups and scaled:
        names = [program.stage_names[stage] for stage in groups]
        guesses.append(f"what {', '.join(names)} computes between rows of several micro-batches counts as within each")
    return NodeCosts(run.nodes, run.memory, run.parameters, hardware, account, halves, groups, "\n".join(guesses))


class _CostingRun:
    """A run of a program on fake tensors, node by node. ``times``: the factor by which the example's rows count."""

    @staticmethod
    def costed(
        program: Program,
        fake: FakeModel,
        example: Mapping[str, Any],
        times: int = 1,
        keeps: bool = False,
        **kwargs: Any,
    ) -> _CostingRun:
        """Runs all nodes, and adds the costs that the model's own checkpoints compute again, unless they keep all."""
        run = _CostingRun(program, fake, example, times, **kwargs)
        if keeps:
            with checkpoints_that_keep():
                run.all_nodes()
            return run
        # A checkpoint hides its function's operators from autograd. So if the model has a checkpoint, a second run in
        # which checkpoints keep everything shows the recomputed operators.
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
        self.nodes: dict[str, NodeCost] = {}
        self.memory: dict[int, int] = {}
        self.guessed: dict[str, None] = {}
        self._saved: set[int] = set()
        self._inside: dict[int, int] | None = None  # storages that the running checkpoint keeps
        self._again, self._again_seconds = 0, 0.0
        self._operands = set[int]()
        self.seconds_again: dict[str, float] = {}
        """Node → the seconds that its checkpoints would recompute, in a run in which checkpoints keep everything."""
        parameters = dict(program.module.named_parameters())
        named = parameters | dict(program.module.named_buffers())
        self._keys = {id(tensor): key for key, tensor in enumerate(named.values())}
        self._inputs = {name: len(named) + index for index, name in enumerate(batch)}
        entries = [*map(ParameterCost.from_tensor, named.values()), *map(ParameterCost, batch.values())]
        self.parameters = dict(enumerate(entries))
        # Storages are kept alive so that ids are unique; the bytes of the batch are counted apart.
        self._storages = [tensor.untyped_storage() for tensor in [*named.values(), *tensors_in(self.inputs)]]
        self._own = set(map(id, self._storages))
        self._weights = {id(parameter.untyped_storage()) for parameter in parameters.values()}
        self._known: dict[Any, tuple[NodeCost, NodeOutcome]] = {}
        self._may_be_alike = has_only_pure_operators(program.nodes)

    def all_nodes(self) -> None:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            for node in self.program.nodes:
                if node.op == "placeholder":
                    self.values[node] = self.inputs[str(node.target)]
                elif node.op == "get_attr":
                    self.values[node] = attribute(self.program, node, self.fake)
                elif node.op != "output":
                    self._note_once(node)

    def defer(self, calls: Sequence[str]) -> None:
        """Adds the memory that these calls keep until W: their saved tensors, and the gradients of their results."""
        for number, name in enumerate(calls, start=1):
            cost = self.nodes[name]
            # W needs the saved inputs of its calls, and the gradients of the calls' results.
            self.memory[-number] = cost.bytes_out  # ids of objects are positive
            self.nodes[name] = replace(cost, deferred=cost.saved | {-number})

    @contextlib.contextmanager
    def one_checkpoint(self) -> Iterator[None]:
        """Wraps the function of a checkpoint and measures the memory that it keeps, inner checkpoints included."""
        # An outer checkpoint also recomputes everything that its inner checkpoints compute.
        if self._inside is not None:
            yield
            return
        self._inside, before = {}, self.meter.forward
        try:
            yield
        finally:
            # a checkpoint's inputs are kept anyway
            inside = sum(size for key, size in self._inside.items() if key not in self._operands)
            self._again = max(self._again, inside)
            self._again_seconds += (self.meter.forward - before) * bool(self._inside)
            self._inside = None

    def computes_again(self, keeping: _CostingRun) -> None:
        """Takes over the recomputed costs from a run in which checkpoints keep everything: a run in which they keep
        nothing shows neither the recomputed operators nor their gradients."""
        for name, seconds in keeping.seconds_again.items():
            cost, plain = keeping.nodes[name], self.nodes[name]
            # a checkpoint's backward leaves no gradients to W
            self.nodes[name] = replace(
                cost, backward=cost.backward + seconds, weight=0.0, saved=plain.saved, parameters=plain.parameters
            )

    def _pack(self, tensor: Tensor) -> Tensor:
        # Nodes that keep views of the same tensor share its memory, so memory is counted by storage. Parameters and the
        # batch are in memory anyway.
        storage = tensor.untyped_storage()
        if id(storage) not in self._own:
            if self._inside is not None:
                self._inside[id(storage)] = self.times * storage.nbytes()
            self._storages.append(storage)
            self.memory[id(storage)] = self.times * storage.nbytes()
            self._saved.add(id(storage))
        return tensor

    def _note_once(self, node: Node) -> None:
        """Takes over the costs of a node alike, or runs the node."""
        operands = Operands.of(node, self.values, (self._own, self._weights)) if self._may_be_alike else None
        known = self._known.get(operands.key) if operands is not None else None
        if operands is None or known is None:
            self._note(node)
            if operands is not None and node.name not in self.seconds_again:
                saved = {key: self.memory[key] // self.times for key in self._saved}
                self._known[operands.key] = self.nodes[node.name], NodeOutcome.of(operands, self.values[node], saved)
            return
        cost, outcome = known
        self.values[node], saved_again, new = outcome.again(operands, self.fake.mode)
        self._storages += new
        self.memory |= {id(storage): self.times * storage.nbytes() for storage in saved_again}
        used = self._parameters(node)
        trains = any(self.parameters[key].trained for key in used)
        self.nodes[node.name] = replace(cost, saved=frozenset(map(id, saved_again)), parameters=used, trains=trains)

    def _note(self, node: Node) -> None:
        def is_weight(tensor: Tensor) -> bool:
            return id(tensor.untyped_storage()) in self._weights

        self.meter = meter = OperatorMeter(self.hardware, is_weight, self.times)
        self._saved = set()
        self._again, self._again_seconds = 0, 0.0
        operands = tensors_in([self.values[operand] for operand in node.all_input_nodes])
        self._operands = {id(tensor.untyped_storage()) for tensor in operands}
        try:
            with modes_of(node), meter:
                self.values[node] = call_node(self.program, node, self.values)
            # Operators without gradients in a node that saves tensors belong to an autograd.Function or a checkpoint.
            # The backward is assumed to take three times their forward: once to recompute, twice for gradients.
            backward = meter.input + meter.weight + (3 * meter.without_gradient if self._saved else 0.0)
            cost = NodeCost(meter.forward, backward, meter.weight, meter.flops, meter.backward_flops, meter.ideal)
        except FigureMissing:
            raise
        except Exception as error:
            cost = self._guessed(node, error)
        used, results = self._parameters(node), tensors_in(self.values[node])
        self.nodes[node.name] = replace(
            cost,
            bytes_out=self.times * sum(tensor.nbytes for tensor in results),
            gradient_bytes=self.times * sum(tensor.nbytes for tensor in results if tensor.requires_grad),
            saved=frozenset(self._saved),
            parameters=used,
            trains=any(self.parameters[key].trained for key in used),
            again=self._again,
        )
        if self._again:
            self.seconds_again[node.name] = self._again_seconds

    def _guessed(self, node: Node, error: Exception) -> NodeCost:
        """The estimated cost of a node that cannot run on fake tensors, from the result that its capture recorded."""
        if "val" not in node.meta:
            raise CostUnknown(
                f"{node.name}{where(node)} cannot run without numbers ({type(error).__name__}: {error}), so its cost "
                "is not known; balance by hand with boundaries= and placement="
            ) from error
        self.guessed |= dict.fromkeys(call.name for call in opaque_calls(self.program.opaque.get(str(node.target))))
        self.values[node] = faked(node.meta["val"], self.fake)
        # The estimate is a linear layer of all its parameters: 2 FLOPs per weight and row, twice as many in backward.
        results = tensors_in(self.values[node])
        rows = self.times * max((tensor.numel() // max((1, *tensor.shape[-1:])) for tensor in results), default=1)
        count = sum(self.parameters[key].count for key in self._parameters(node))
        flops, moved = 2.0 * rows * count, 4.0 * count + self.times * sum(tensor.nbytes for tensor in results)
        seconds = self.hardware.seconds(flops, moved, 4)
        for tensor in results:
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
        keys = [self._inputs[name] for name in inputs if name in self._inputs]
        return frozenset([*keys, *(self._keys[id(tensor)] for tensor in used if id(tensor) in self._keys)])


# --- the cost of an operator below autograd ---

_ATTENTION = "_scaled_dot_product"
_ATTENTION_BACKWARD = 2.5
"""Attention's backward / forward: backward repeats one of two matrix products, and has four for the gradients."""
_ADDED_FIRST = ("addmm", "baddbmm", "addbmm", "addmv")
"""Products whose first argument is a summand and not a factor."""
_GATHERS = ("embedding", "index_select", "gather", "index")
"""Operators that read no more of their first argument than they return."""


class OperatorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the costs of all operators that run inside this mode.

    ``is_weight``: whether a tensor is a parameter or shares its memory. An action W computes the gradients of such
    tensors, an action I all other gradients. ``times``: the factor by which the operators' rows count.
    """

    def __init__(self, hardware: Hardware, is_weight: Callable[[Tensor], bool], times: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hardware, self._is_weight, self._times = hardware, is_weight, times
        self.forward = self.input = self.weight = self.without_gradient = 0.0
        self.flops = self.backward_flops = 0.0
        self.ideal = 0.0
        """The seconds of the products at the device's peak."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        arguments, results = tensors_in((args, kwargs)), tensors_in(result)
        # A view moves nothing, and launches no kernel.
        memory = {id(tensor.untyped_storage()) for tensor in arguments}
        is_view = not schema_of(func).is_mutable and all(id(tensor.untyped_storage()) in memory for tensor in results)
        if is_view or not results:
            return
        name = func.overloadpacket.__name__
        flops = self._times * _flops(func, name, args, kwargs, result)
        read = results if name in _GATHERS else arguments
        moved = self._times * sum(tensor.nbytes for tensor in [*read, *results])
        seconds = self._hardware.seconds(flops, moved, results[0].element_size())
        self.forward += seconds
        self.flops += flops
        if not torch.is_grad_enabled():
            self.without_gradient += seconds
        before = self.backward_flops
        # No backward runs; its costs follow from the factors that need a gradient.
        factors = arguments[1:3] if name in _ADDED_FIRST else arguments
        needing = [tensor for tensor in factors if tensor.requires_grad and torch.is_grad_enabled()]
        if needing:
            self._note_gradients(name, needing, results, seconds, flops)
        if flops:
            self.ideal += (flops + self.backward_flops - before) / self._hardware.peak(results[0].element_size())

    def _note_gradients(
        self, name: str, needing: Sequence[Tensor], results: Sequence[Tensor], seconds: float, flops: float
    ) -> None:
        """Adds the backward costs of an operator. A product's backward is a product for each factor that needs a
        gradient. Other backwards move as many bytes as forward; an embedding's gradient is as large as its table."""
        if name.startswith(_ATTENTION):
            self.input += _ATTENTION_BACKWARD * seconds
            self.backward_flops += 2 * flops
            return
        if flops:
            # A bias is one-dimensional: its gradient is a sum, not a product.
            needing = [tensor for tensor in needing if tensor.dim() > 1]
            self.backward_flops += flops * len(needing)
        elif name in _GATHERS:
            needing = needing[:1]
            table = needing[0].nbytes + self._times * sum(tensor.nbytes for tensor in results)
            seconds = self._hardware.seconds(0, table, needing[0].element_size())
        else:
            needing = sorted(needing, key=self._is_weight)[:1]  # an activation, if there is one
        for tensor in needing:
            if self._is_weight(tensor):
                self.weight += seconds
            else:
                self.input += seconds


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> float:
    """FLOPs from torch's registry. CPU attention is not registered, and counts its products of q, k and v."""
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    if name.startswith(_ATTENTION):
        query, key, value = (tensor.shape for tensor in args[:3])
        return float(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    return 0.0
