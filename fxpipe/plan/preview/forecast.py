"""Forecast: computes what a ``Preview`` shows, from a plan, its costs and its topology.

What a rank sends over the data axis in a step follows from the formulas of a ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from fxpipe.distributed.topology import Topology
from fxpipe.graph.ranks import RankOf
from fxpipe.graph.stage_graph import Edge, Stage, StageGraph, all_tensors
from fxpipe.hardware import Hardware
from fxpipe.notebook import listed
from fxpipe.options import Options
from fxpipe.parameters.ownership import ownership
from fxpipe.plan.balance.memory import Account, Held, dealt, rows_of
from fxpipe.plan.capture.sizes import bytes_of_inputs
from fxpipe.plan.inputs.pattern import Pattern
from fxpipe.plan.planner import Planner
from fxpipe.plan.preview.previewed import Preview, RankPreview
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.in_flight import peak_bytes
from fxpipe.schedules.lower import Compute, Instruction, Message, Receive, Release, Send
from fxpipe.schedules.schedule import Timeline

Sizes = Mapping[Edge, tuple[float, float]]
"""Edge → the bytes of its value, as its stage makes it at once, and of that value's gradient."""


@dataclass(frozen=True)
class Stepping:
    """How an optimizer steps parameters. ``states``: how many numbers it keeps of each. ``whole``: whether a rank steps
    whole ones, as it must where elements are not stepped by themselves."""

    states: float = 2.0
    whole: bool = False


def preview_of(planner: Planner, pattern: Pattern, stepping: Stepping) -> Preview:
    """What a pattern's plan comes to."""
    return _Forecast(planner, pattern, stepping).preview(timed=planner.options.hardware is not None)


def over_the_limit(planner: Planner) -> str:
    """In words, where the first plan does not keep within ``memory_per_rank``, or that is not known; else empty."""
    if planner.options.memory_per_rank is None:
        return ""
    preview = _Forecast(planner, planner.shown, Stepping()).preview(timed=False)
    if preview.fits is None:
        return "memory_per_rank= is not looked at: it needs a batch's shapes; pass example_args= or example_kwargs="
    number, most = max(enumerate(preview.ranks), key=lambda pair: pair[1].total)
    if preview.fits:
        return ""
    return (
        f"rank {number} of a pipeline takes {most.total:,.0f} bytes {_counted(most)}, "
        f"memory_per_rank={planner.options.memory_per_rank:,.0f}; fxpipe.preview says of what"
    )


def _counted(rank: RankPreview) -> str:
    return "without activations" if rank.activations is None else "with messages and batch"


class _Forecast:
    def __init__(self, planner: Planner, pattern: Pattern, stepping: Stepping) -> None:
        self.planner, self.pattern, self.options, self.topology = planner, pattern, planner.options, planner.topology
        self.plan = planner.plan(pattern, "nothing is run")
        self.graph, self.schedule = self.plan.graph, self.plan.schedule
        self.work = planner.tables.stage_work(pattern, self.graph.placement)
        self.account = dataclasses.replace(Account.of(self.options, self.topology), states=stepping.states)
        self.stepping = stepping
        self.hardware = Hardware.of(self.options.hardware)

    def preview(self, timed: bool) -> Preview:
        """``timed``: with seconds, for which figures of the hardware are needed."""
        timed = timed and self.work is not None
        graph = dataclasses.replace(self.graph, bytes_of={edge: int(size) for edge, (size, _) in self.sizes.items()})
        return Preview(
            plan=dataclasses.replace(self.plan, graph=graph),
            timeline=self.timeline,
            ranks=tuple(map(self._rank, range(len(self.schedule.rows)))),
            memory=self.options.memory_per_rank or self.hardware.memory,
            seconds=self._seconds if timed else None,
            flops=self._of_step(("flops", "backward_flops")) if timed else None,
            utilisation=self._of_step(("ideal",)) / self.topology.world_size / self._seconds if timed else None,
            between_nodes=self._between_nodes if self.work is not None else None,
            saving=self.planner.tables.saving(self.plan, self.pattern, self.work),
            what=self._what(),
        )

    @cached_property
    def timeline(self) -> Timeline:
        if self.work is None:
            return self.schedule.planned()
        again = {stage for stage, _ in self.schedule.dependencies.recomputed}
        return self.schedule.planned(self.work.costs([stage in again for stage in range(len(self.graph))]))

    # bytes

    @cached_property
    def sizes(self) -> Sizes:
        if self.work is None:
            return {}
        found: dict[Edge, tuple[float, float]] = {}
        for edge in self.graph.edges:
            cost, group = self.work.nodes[edge.value], self.schedule.groups[edge.source]
            found[edge] = group * cost.bytes_out, group * cost.gradient_bytes
        return found

    @cached_property
    def _tensors(self) -> list[list[Tensor]]:
        """Each rank's parameters and buffers, each once."""
        held = all_tensors(self.graph.module)
        names = ownership(self.graph).names
        return [list({id(held[name]): held[name] for name in sorted(mine)}.values()) for mine in names]

    @cached_property
    def _stages(self) -> list[list[Stage]]:
        """Each rank's stages."""
        found: list[list[Stage]] = [[] for _ in self.schedule.rows]
        for stage in self.graph:
            for rank in self.graph.ranks(stage.index):
                found[rank].append(stage)
        return found

    @cached_property
    def _activations(self) -> tuple[float, ...]:
        return peak_bytes(self.schedule, self.timeline.costs)

    @cached_property
    def _used(self) -> set[int]:
        """What some stage uses, by id."""
        return {id(tensor) for stage in self.graph for tensor in stage.tensors.values()}

    def _held(self, tensors: Sequence[Tensor]) -> Held:
        """What the fullest of the replicas holds of these."""
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        buffers = sum(tensor.nbytes for tensor in tensors if not isinstance(tensor, nn.Parameter))
        whole = self.stepping.whole and self.account.zero in (1, 2)
        owners = dealt([parameter.numel() for parameter in parameters], self.account.shards) if whole else []
        held = [
            sum(
                (self._of_one(one, one.numel() * (mine == rank)) for one, mine in zip(parameters, owners, strict=True)),
                Held(),
            )
            for rank in sorted(set(owners))
        ] or [sum(map(self._of_one, parameters), Held())]
        return max(held, key=lambda one: one.sum) + Held(parameters=float(buffers))

    def _of_one(self, parameter: Tensor, part: float | None = None) -> Held:
        """``part``: how much of it a rank steps; None: all alike."""
        count, element, floating = parameter.numel(), self._element(parameter), parameter.is_floating_point()
        trained, used = parameter.requires_grad, id(parameter) in self._used
        if self.account.zero == 3 and not used:
            return Held(parameters=float(count * self._element_of_shards(parameter)))
        part = self.account.part_of(count, rows_of(parameter)) if part is None else part
        held = self.account.held(count, element, trained, floating, part)
        idle = self.account.held(count, element, False, floating, part)
        return held if used else dataclasses.replace(held, optimizer=idle.optimizer)

    def _element(self, tensor: Tensor) -> int:
        """Bytes of an element as stages run it."""
        precision = self.options.precision if tensor.is_floating_point() else None
        return tensor.element_size() if precision is None else precision.compute.itemsize

    def _element_of_shards(self, parameter: Tensor) -> int:
        """Bytes of an element as ``zero=3`` keeps it."""
        precision = self.options.precision if parameter.is_floating_point() else None
        return parameter.element_size() if precision is None else precision.master.itemsize

    def _rank(self, rank: int) -> RankPreview:
        held = self._held(self._tensors[rank])
        mine = self._stages[rank]
        inputs = {name for stage in mine for name in stage.batch_inputs}
        known = self.work is not None
        return RankPreview(
            tuple(stage.name for stage in mine),
            held.parameters,
            held.gradients,
            held.optimizer,
            held.whole,
            activations=self._activations[rank] if known else None,
            messages=self._messages(rank) if known else None,
            batch=float(sum(size for name, size in self._batch.items() if name in inputs)) if known else None,
        )

    def _messages(self, rank: int) -> float:
        return most_under_way(self.plan.instructions[rank], self.graph, self.schedule.rank_of, self._size)

    @cached_property
    def _batch(self) -> Mapping[str, int]:
        return bytes_of_inputs(self.pattern.shapes, self.options.precision)

    def _size(self, message: Message) -> float:
        return self.sizes[self.graph.edges[message.edge]][message.op is not Op.F]

    # time

    def _of_step(self, names: tuple[str, ...]) -> float:
        """What the nodes have of this, all together, on all ranks."""
        nodes = self.work.nodes.nodes.values() if self.work is not None else ()
        each = sum(getattr(node, name) for node in nodes for name in names)
        return float(each * self.schedule.microbatches * self.topology.size("data"))

    def _traffic(self, rank: int) -> DataTraffic:
        parameters = [tensor for tensor in self._tensors[rank] if isinstance(tensor, nn.Parameter)]
        precision = self.options.precision
        wire = sum(
            tensor.numel() * (self._element(tensor) if precision is None else precision.reduce.itemsize)
            for tensor in parameters
            if tensor.requires_grad
        )
        whole = sum(tensor.numel() * self._element(tensor) for tensor in parameters)
        return DataTraffic(self.options, self.topology, whole, wire, self.schedule.microbatches)

    @cached_property
    def _seconds(self) -> float:
        """The last rank's end. The sums of a rank's gradients begin with the first of its stages' last backwards, with
        zero=2 with its first one, and what is left when all have ended is waited for; so are gathers of parameters."""
        assert self.work is not None
        end = self.work.seconds(self.timeline)
        if self.topology.size("data") == 1:
            return end
        for rank, row in enumerate(self.schedule.rows):
            traffic, backwards = self._traffic(rank), [action for action in row if action.op in (Op.B, Op.W)]
            sums, gathers = (sum(one.seconds(self.hardware) for one in way) for way in (traffic.sums, traffic.gathers))
            begin = backwards if self.options.zero == 2 else {action.stage: action for action in backwards}.values()
            start = min((self.timeline.spans[action].start for action in begin), default=0.0)
            end = max(end, start + sums + gathers, self.work.seconds(self.timeline) + gathers)
        return end

    @cached_property
    def _between_nodes(self) -> float:
        per_node = self.topology.ranks_per_node
        if per_node is None:
            return 0.0
        found = 0.0
        if self.topology.size("data") > 1:
            pipelines = self.topology.world_size // self.topology.size("pipe") // self.topology.size("data")
            found = pipelines * sum(self._traffic(rank).between_nodes for rank in range(len(self.schedule.rows)))
        sent: dict[tuple[int, int], float] = {}
        for message in (one.message for row in self.plan.instructions for one in row if isinstance(one, Send)):
            pair = message.sender, message.receiver
            sent[pair] = sent.get(pair, 0.0) + self._size(message)
        groups = self.topology.groups("pipe")
        return found + sum(
            size for (a, b), size in sent.items() for group in groups if group[a] // per_node != group[b] // per_node
        )

    def _what(self) -> str:
        left = [] if self.work is None or not self.work.nodes.guessed else [self.work.nodes.guesses]
        if self.work is None:
            left.append("activations, messages and time need a batch's shapes: pass example_args= or example_kwargs=")
        elif self.options.hardware is None:
            left.append('seconds need hardware=, such as hardware="h100"')
        gathers = [stage.name for stage in self.graph if stage.gathered is not None]
        if gathers and self.work is not None:
            left.append(f"what {listed(gathers)} computes between rows of several micro-batches counts as within each")
        if self.topology.size("tensor") > 1:
            left.append("what parallelize= spreads over the tensor axis counts whole")
        beside = () if self.planner.captures is None else self.planner.captures.beside
        return "\n".join([f"{self.account}", *left, *beside])


def most_under_way(
    row: Sequence[Instruction], graph: StageGraph, rank_of: RankOf, size: Callable[[Message], float]
) -> float:
    """The most bytes of a rank's messages: of those to come, from their post until the action that takes them, and of
    those sent, until they are known to have been received. What a stage without backward makes for one of its own rank
    is one, too."""
    now = most = 0.0
    coming: dict[Message, float] = {}
    for instruction in row:
        match instruction:
            case Receive(message):
                coming[message] = size(message)
                now += coming[message]
            case Compute(action):
                taken = [message for message in coming if _takes(action, message, graph)]
                now -= sum(coming.pop(message) for message in taken)
                coming |= (kept := {message: size(message) for message in _kept(action, graph, rank_of)})
                now += sum(kept.values())
            case Send(message):
                now += size(message)
            case Release(message):
                now -= size(message)
        most = max(most, now)
    return most


def _kept(action: Action, graph: StageGraph, rank_of: RankOf) -> list[Message]:
    """What an action makes that no backward holds, and that stays on its rank until it is taken."""
    stage, rank = graph.stages[action.stage], rank_of(action.stage, action.microbatch)
    if action.op is not Op.F or stage.has_backward:
        return []
    places = action.microbatches[:1] if stage.gathered else action.microbatches
    return [
        Message(graph.edges.index(edge), Op.F, place, rank, rank)
        for edge in stage.outputs
        for place in places
        if rank_of(edge.target, place) == rank
    ]


def _takes(action: Action, message: Message, graph: StageGraph) -> bool:
    """Whether a message is for this action."""
    edge = graph.edges[message.edge]
    if message.op is Op.F:
        takes = action.op is Op.F and edge.target == action.stage
    else:
        takes = action.op in (Op.B, Op.I) and edge.source == action.stage
    return takes and message.microbatch in action.microbatches


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends on groups of one kind. ``crossing``: which part of them leaves its node, on average over
    the ranks of a group, of which some stand at its node's end."""

    size: float
    crossing: float

    def seconds(self, hardware: Hardware) -> float:
        """A ring is as fast as its slowest link."""
        return hardware.latency + self.size / hardware.wire(self.crossing > 0) if self.size else 0.0


@dataclass(frozen=True)
class DataTraffic:
    """For ranks that hold so many bytes of parameters, and of gradients as they travel."""

    options: Options
    topology: Topology
    parameters: float
    gradients: float
    microbatches: int

    @cached_property
    def _shards(self) -> int:
        if self.options.zero:
            return Account.of(self.options, self.topology).shards
        data, node = self.topology.size("data"), min(map(len, self.topology.shard_groups()))
        return node if 1 < node < data else data

    @cached_property
    def _inner(self) -> float:
        """Which part of the links of the ring of a shard group leave a node, of the group that has most."""
        if self._shards < self.topology.size("data"):
            return 0.0
        return max(_leaving(group, self.topology.ranks_per_node) for group in self.topology.groups("data"))

    @property
    def sums(self) -> tuple[Sent, ...]:
        """Of the gradients' sums."""
        data, shards = self.topology.size("data"), self._shards
        replicas = data // shards
        scatter = (shards - 1) / shards * self.gradients
        if self.options.zero == 0 and replicas == 1:
            return (Sent(2 * scatter, self._inner),)
        across = Sent(2 * (replicas - 1) / replicas * self.gradients / shards, 1.0)
        times = {0: 2, 2: self.microbatches}.get(self.options.zero, 1)
        return Sent(times * scatter, self._inner), across

    @property
    def gathers(self) -> tuple[Sent, ...]:
        """Of the all-gathers of parameters."""
        if not self.options.zero:
            return ()
        return (Sent((self._shards - 1) / self._shards * self.parameters, self._inner),)

    @property
    def between_nodes(self) -> float:
        """Bytes that leave a node for another, of all ranks of one data group together."""
        return self.topology.size("data") * sum(one.size * one.crossing for one in (*self.sums, *self.gathers))


def _leaving(group: list[int], per_node: int | None) -> float:
    """The part of a ring's links that leads from one node to another."""
    if per_node is None:
        return 0.0
    nodes = [rank // per_node for rank in group]
    return sum(one != other for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True)) / len(group)
