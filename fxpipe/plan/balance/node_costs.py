"""Node costs: what each node of a program takes, in seconds and bytes, derived from the shapes of one micro-batch.

The program is run once on fake tensors, which have shapes and no numbers, with autograd on. Nothing is allocated, and
no parameter is touched. Forward is the roofline model of ``Hardware`` over the operators that a node runs; backward
follows from what needs a gradient: frozen parts cost less. What is kept for backward is what autograd keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.modes import Autocast, modes_restored, within
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.program import Program, where
from fxpipe.hardware import REFERENCE, FigureMissing, Hardware
from fxpipe.passes.defer_weights import deferred_calls
from fxpipe.plan.balance.memory import Account, Held, rows_of
from fxpipe.plan.balance.operator_costs import OperatorMeter, size_in_bytes
from fxpipe.plan.capture.on_fakes import attribute, call_node, faked, left_as_it_is, modes_of
from fxpipe.schedules.no_gc import paused
from fxpipe.torch_compat import pytree, without_onednn
from fxpipe.trace.fake import FakeModel, fake_model
from fxpipe.trace.state.replay import checkpoints_noted, checkpoints_that_keep


class CostUnknown(PartitionError, TraceError):
    """A node looks at numbers, and its capture has not seen what it makes; another tracer's may have."""


@dataclass(frozen=True)
class NodeCost:
    """What one node takes for one micro-batch. ``backward``: seconds, all of it; ``weight``: an action W's part of it.

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


@dataclass(frozen=True)
class HeldParameter:
    """A parameter: its bytes as stages run it, and whether it is trained. Or what takes its bytes and no more, with a
    ``count`` of 0: a buffer, or an input of the whole batch."""

    name: str
    size: int
    count: int
    trained: bool
    floating: bool = True
    rows: int = 1
    """The size of its first dimension; 0 where it has none."""

    def on(self, account: Account) -> Held:
        """What it takes where it lives."""
        if not self.count:
            return Held(parameters=float(self.size))
        part = account.part_of(self.count, self.rows)
        return account.held(self.count, self.size // self.count, self.trained, self.floating, part)


@dataclass(frozen=True)
class NodeCosts:
    """Node name → what it takes. ``costs["linear"].forward`` are seconds."""

    nodes: Mapping[str, NodeCost]
    memory: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes of what is kept for backward, by key; parameters are not among it."""
    parameters: Mapping[int, HeldParameter] = field(default_factory=lambda: MappingProxyType({}))
    """The model's parameters and buffers, tied ones once, and the batch's inputs."""
    hardware: Hardware = REFERENCE
    account: Account = field(default_factory=Account)
    """How parameters are counted."""
    halves: bool = True
    """Whether they give what W keeps: not of stages whose backward runs whole, or is cut by their compiler."""
    guessed: tuple[str, ...] = ()
    """Opaque regions that cannot run without numbers."""

    @property
    def guesses(self) -> str:
        """What was taken for what, in words; empty where all was derived from shapes."""
        if not self.guessed:
            return ""
        return (
            f"{', '.join(self.guessed)}: opaque, and cannot run without numbers; reckoned as one product of the "
            "parameters with each row of what is returned"
        )

    def __getitem__(self, name: str) -> NodeCost:
        return self.nodes.get(name, _NOTHING)

    def saved_bytes(self, names: Sequence[str]) -> int:
        """What is kept for the backward of these nodes together."""
        keys = frozenset[int]().union(*(self[name].saved for name in names))
        return sum(self.memory[key] for key in keys)

    def again_bytes(self, names: Sequence[str]) -> int:
        """What a checkpoint of one of these nodes, which run in this order, computes again at most, beside what is kept
        for the backward of all of them: when it does, what those behind it have kept is let go of."""
        most, kept, seen = 0, 0, frozenset[int]()
        for name in names:
            kept += sum(self.memory[key] for key in self[name].saved - seen)
            seen |= self[name].saved
            most = max(most, kept + self[name].again)
        return max(most - kept, 0)


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
) -> NodeCosts:
    """The costs of each node for a micro-batch like ``example``: input → value, a ``TensorLike`` for each tensor in it.

    ``autocast``: what is on around the call. ``compute``: the type of floating-point parameters and inputs when it
    runs, where that is another. ``batch``: the bytes of its inputs, of all micro-batches. ``halves``: as ``NodeCosts``
    has it. Boundaries cost nothing. A node that looks at numbers, which fake tensors have not, is taken for a product
    of its parameters with each row of what it makes.
    """
    missing = [name for name in program.inputs if name not in example]
    if missing:
        raise PartitionError(f"costs need an example of every input; {missing} are missing from {sorted(example)}")
    with (
        left_as_it_is(program.module),
        torch.inference_mode(False),
        fake_model(program.module, device, compute) as fake,
    ):
        run = _CostingRun(program, fake, example, hardware, batch)
        with _plainly(), modes_restored(), within(autocast), fake.mode:
            checkpoints: list[None] = []
            with checkpoints_noted(lambda: checkpoints.append(None)):
                run.all_nodes()
            if checkpoints:
                again = _CostingRun(program, fake, example, hardware, batch)
                with checkpoints_that_keep(again.one_checkpoint):
                    again.all_nodes()
                run.computes_again(again)
        run.defer(deferred_calls(program))
        return dataclasses.replace(run.costs(), account=account, halves=halves)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """With gradients, and with recurrent layers as the operators that they are made of: oneDNN's own one says neither
    what it computes nor what it keeps."""
    with torch.enable_grad(), without_onednn():
        yield


class _CostingRun:
    """One run of a program on fake tensors, node by node."""

    def __init__(
        self,
        program: Program,
        fake: FakeModel,
        example: Mapping[str, Any],
        hardware: Hardware,
        batch: Mapping[str, int],
    ) -> None:
        self.program, self.fake, self.hardware = program, fake, hardware
        self.values: dict[fx.Node, Any] = {}
        self.inputs = fake.inputs(example)
        self.found: dict[str, NodeCost] = {}
        self.memory: dict[int, int] = {}
        self.held: dict[int, HeldParameter] = {}
        self.guessed: dict[str, None] = {}
        self._storages: list[Any] = []  # keeps them, so that no two ever have the same id
        self._saved: set[int] = set()
        self._packed: set[int] = set()
        self._inside: dict[int, int] | None = None  # what a checkpoint keeps that runs now
        self._again, self._again_seconds = 0, 0.0
        self.seconds_again: dict[str, float] = {}
        """Node → what its checkpoints compute again, where they keep all that they run."""
        names = dict(program.module.named_parameters())
        self._numbers = {id(parameter): number for number, parameter in enumerate(names.values())}
        for name, parameter in names.items():
            size = parameter.numel() * parameter.element_size()
            self.held[self._numbers[id(parameter)]] = HeldParameter(
                name,
                size,
                parameter.numel(),
                parameter.requires_grad,
                parameter.is_floating_point(),
                rows_of(parameter),
            )
        for name, buffer in program.module.named_buffers():
            number = self._numbers.setdefault(id(buffer), len(self._numbers))
            self.held[number] = HeldParameter(name, size_in_bytes(buffer), 0, False)
        self._inputs = {name: len(self._numbers) + place for place, name in enumerate(batch)}
        self.held |= {self._inputs[name]: HeldParameter(name, size, 0, False) for name, size in batch.items()}
        tensors = [*names.values(), *program.module.buffers(), *_tensors(self.inputs)]  # a batch counts by itself
        self._own = {id(tensor.untyped_storage()) for tensor in tensors}
        self._storages += [tensor.untyped_storage() for tensor in tensors]
        weights = {id(parameter.untyped_storage()) for parameter in names.values()}
        self.meter = OperatorMeter(hardware, lambda tensor: id(tensor.untyped_storage()) in weights)

    def costs(self) -> NodeCosts:
        return NodeCosts(self.found, self.memory, self.held, self.hardware, guessed=tuple(self.guessed))

    def all_nodes(self) -> None:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            for node in self.program.graph.nodes:
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
            self.memory[-place] = cost.bytes_out  # a key that is no object's
            self.found[name] = dataclasses.replace(cost, deferred=cost.saved | {-place})

    @contextlib.contextmanager
    def one_checkpoint(self) -> Iterator[None]:
        """Around a function given to a checkpoint: looks at what it keeps; for those inside of it, along with it."""
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
            cost = keeping.found[name]
            self.found[name] = dataclasses.replace(
                cost,
                backward=cost.backward + seconds,
                saved=self.found[name].saved,
                parameters=self.found[name].parameters,
            )

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._packed.add(self.meter.ran)
        if id(storage) not in self._own:
            if self._inside is not None:
                self._inside[id(storage)] = storage.nbytes()
            self._storages.append(storage)
            self.memory[id(storage)] = storage.nbytes()
            self._saved.add(id(storage))
        return tensor

    def _note(self, node: fx.Node) -> None:
        self.meter.clear()
        self._saved, self._packed = set(), set()
        self._again, self._again_seconds = 0, 0.0
        try:
            with modes_of(node), self.meter:
                self.values[node] = call_node(self.program, node, self.values)
            cost = self._measured()
        except FigureMissing:
            raise
        except Exception as error:
            cost = self._guessed(node, error)
        used = self._parameters(node)
        self.found[node.name] = dataclasses.replace(
            cost,
            bytes_out=sum(map(size_in_bytes, made := _tensors(self.values[node]))),
            gradient_bytes=sum(size_in_bytes(tensor) for tensor in made if tensor.requires_grad),
            parameters=frozenset(used),
            trains=any(self.held[number].trained for number in used),
            again=self._again,
        )
        if self._again:
            self.seconds_again[node.name] = self._again_seconds

    def _measured(self) -> NodeCost:
        """What the meter shows. Activations that are computed again in backward show in what was not kept: at fewer
        moments than there are products, or for operators that ran without gradients."""
        meter = self.meter
        again = meter.without_gradient if self._saved else 0.0
        backward = meter.input + meter.weight + again + 2 * again
        if meter.products > len(self._packed):
            backward += meter.forward
        saved = frozenset(self._saved)
        return NodeCost(
            meter.forward, backward, meter.weight, meter.flops, meter.backward_flops, meter.ideal, saved=saved
        )

    def _guessed(self, node: fx.Node, error: Exception) -> NodeCost:
        """Of a node that cannot run on fake tensors: from what its capture saw it make."""
        if "val" not in node.meta:
            raise CostUnknown(
                f"{node.name}{where(node)} cannot run without numbers ({type(error).__name__}: {error}), so its cost "
                "is not known; balance by hand with boundaries= and placement="
            ) from error
        self.guessed |= dict.fromkeys(call.name for call in opaque_calls(self.program.opaque.get(str(node.target))))
        self.values[node] = faked(node.meta["val"], self.fake)
        made = _tensors(self.values[node])
        rows = max((tensor.numel() // max((1, *tensor.shape[-1:])) for tensor in made), default=1)
        sizes = [self.held[number].count for number in self._parameters(node)]
        flops, moved = 2.0 * rows * sum(sizes), 4.0 * sum(sizes) + sum(map(size_in_bytes, made))
        seconds = self.hardware.seconds(flops, moved, 4)
        for tensor in made:
            self._pack(tensor)
        ideal = 3 * flops / self.hardware.peak(4)
        return NodeCost(seconds, 2 * seconds, seconds, flops, 2 * flops, ideal, saved=frozenset(self._saved))

    def _parameters(self, node: fx.Node) -> set[int]:
        """The numbers of the parameters, buffers and inputs that a node uses."""
        found: set[int] = set()
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and id(self.values[operand]) in self._numbers:
                found.add(self._numbers[id(self.values[operand])])
            elif operand.op == "placeholder" and str(operand.target) in self._inputs:
                found.add(self._inputs[str(operand.target)])
        if node.op == "call_module":
            found |= {self._numbers[id(tensor)] for tensor in self._reads(node) if id(tensor) in self._numbers}
        return found

    def _reads(self, node: fx.Node) -> list[Tensor]:
        module: nn.Module = self.program.attribute(str(node.target))
        effects = self.program.effects.get(node.name)
        if effects is None:
            return [*module.parameters(), *module.buffers()]
        return [*module.parameters(), *(self.program.attribute(name) for name in effects.reads)]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
