"""Figures: computes the figures of a ``Preview`` from a plan, its costs and its topology.

The bytes that a rank sends over the data axis in a step follow from the formulas of ring collectives.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from fxpipe.dealing import dealt
from fxpipe.distributed.grid import BATCH
from fxpipe.forecast.preview import Preview, RankPreview
from fxpipe.forecast.uneven import uneven_preview
from fxpipe.graph.stage_graph import Edge, StageGraph, all_tensors
from fxpipe.hardware import FigureMissing, Hardware
from fxpipe.parameters.ownership import ownership
from fxpipe.plan.plans import Plans
from fxpipe.plan.tables import mib, saving
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.in_flight import peak_bytes, peak_host_bytes
from fxpipe.schedules.kinds import BACKWARD
from fxpipe.schedules.lower import Compute, Instruction, Message, Receive, Release, Send, Use, use_of, user_of
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.stage_work import stage_work_of
from fxpipe.search.memory import Account, ParameterPart, StaticBytes, rows_of
from fxpipe.sharding.data_axis import block_bytes
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace.checks.sizes import bytes_of_inputs


@dataclass(frozen=True)
class Stepping:
    """How an optimizer steps parameters. ``states``: the number of state values per element. ``whole``: whether a rank
    steps whole parameters, as it must if the optimizer does not step each element independently."""

    states: float = 2.0
    whole: bool = False


def preview_of(plans: Plans, stepping: Stepping, parts: Mapping[int, ParameterPart], costs: Any = None) -> Preview:
    """The preview of the first plan. ``parts``: id of a parameter → its part, if ``parallelize=`` spreads it.
    ``costs``: of the samples of real batches, if they are to be simulated."""
    forecast = _Forecast(plans, stepping, parts)
    preview = forecast.preview(timed=plans.options.device.has_speeds)
    return preview if costs is None else replace(preview, uneven=uneven_preview(costs, plans, forecast.costs_of))


def over_the_limit(plans: Plans) -> str:
    """A warning if the first plan exceeds the memory of ``hardware``, or its bytes are not known; otherwise empty."""
    if (memory := plans.options.device.memory) is None:
        return ""
    preview = _Forecast(plans, Stepping(), {}).preview(timed=False)
    if preview.fits is None:
        return (
            f"the memory of hardware=, {memory:,.0f} bytes, is not checked: this needs a batch's shapes; pass "
            "example_args= or example_kwargs="
        )
    if preview.fits:
        return ""
    number, most = max(enumerate(preview.ranks), key=lambda pair: pair[1].total)
    counted = "without activations" if most.activations is None else "with messages and batch"
    return (
        f"rank {number} of a pipeline takes {most.total:,.0f} bytes {counted}, and the memory of hardware= is "
        f"{memory:,.0f} bytes; fxpipe.preview says of what"
    )


def with_figures(plans: Plans, costs: Costs | None, graph: StageGraph) -> StageGraph:
    """The first plan's stages with the bytes between them, as far as shapes tell, and their seconds: at ``costs``, or
    by shapes."""
    try:
        known = _Forecast(plans, Stepping(), {}).stages(costs)
    except FigureMissing:
        return graph
    return replace(graph, bytes_of={**known.bytes_of, **graph.bytes_of}, work=known.work)


def planned_costs(plans: Plans, table: Schedule) -> Costs | None:
    """The costs at which a table of the plans' stages was made, and what these lack by shapes; None if not known."""
    own = table.costs
    with contextlib.suppress(FigureMissing):
        forecast = _Forecast(plans, Stepping(), {})
        if forecast.staged is not None:
            by_shapes = forecast.costs_of(table)
            return own.or_else(by_shapes) if own is not None and own.source else by_shapes
    return own


class _Forecast:
    def __init__(self, plans: Plans, stepping: Stepping, parts: Mapping[int, ParameterPart]) -> None:
        self.parts = parts
        self.plans, self.options, self.topology = plans, plans.options, plans.topology
        assert plans.shown is not None
        self.pattern, self.plan = plans.shown, plans.first
        self.graph, self.schedule = self.plan.graph, self.plan.schedule
        self.staged = plans.captures.stage_work(self.pattern, self.graph.placement)
        self.account = replace(Account.from_options(self.options, self.topology), states=stepping.states)
        self.stepping = stepping
        self.per_node = self.topology.ranks_per_node or self.topology.world_size
        self.used = self.graph.held
        self.hardware = self.options.device.completed
        self.sizes: dict[Edge, tuple[float, float]] = {}
        """Edge → the bytes of the value that its stage makes in one action, and of the value's gradient."""
        self.timeline = self.schedule.simulate(self.costs_of(self.schedule))
        if self.staged is None:
            return
        # A gathered stage makes the value of its whole group in one action.
        for edge in self.graph.edges:
            cost, group = self.staged.work.costs[edge.value], self.schedule.groups[edge.source]
            self.sizes[edge] = group * cost.bytes_out, group * cost.gradient_bytes

    def costs_of(self, table: Schedule) -> Costs:
        """The costs at which a table of these stages is planned: by shapes, or else the table's own, or F = 1."""
        if self.staged is None:
            return table.costs or Costs.of(len(self.graph))
        again = {stage for stage, _ in table.dependencies.recomputed}
        costs = self.staged.costs_with(
            [stage in again for stage in range(len(self.graph))],
            [name in self.graph.by_layers for name in self.graph.names],
        )
        # Forward sends tokens to their experts and their results back; backward sends the gradients of both.
        sent = self._exchange_seconds
        return replace(
            costs,
            forward=tuple(seconds + 2 * more for seconds, more in zip(costs.forward, sent, strict=True)),
            backward=tuple(seconds + 2 * more for seconds, more in zip(costs.backward, sent, strict=True)),
        )

    def preview(self, timed: bool) -> Preview:
        """The preview. ``timed``: whether it includes seconds, which need the hardware's figures."""
        timed = timed and self.staged is not None
        inside, between = self._sent() if self.staged else (None, None)
        return Preview(
            plan=replace(self.plan, graph=self.stages()),
            timeline=self.timeline,
            ranks=self._ranks(),
            memory=self.hardware.memory,
            seconds=self._seconds if timed else None,
            flops=self._of_step("flops", "backward_flops") if timed else None,
            utilisation=self._of_step("ideal") / self.topology.world_size / self._seconds if timed else None,
            inside_nodes=inside,
            between_nodes=between,
            saving=saving(self.plans, self.staged),
            what=self._what(),
            cuts=self.plans.cuts,
        )

    def stages(self, costs: Costs | None = None) -> StageGraph:
        """The stages with bytes by shapes and seconds at ``costs``, or by shapes."""
        sizes = {edge: int(size) for edge, (size, _) in self.sizes.items()}
        work = stage_work_of(self.schedule, costs or self.timeline.costs)
        return replace(self.graph, bytes_of=sizes, work=work)

    @cached_property
    def _exchange_seconds(self) -> list[float]:
        """For each stage, the seconds of one all-to-all of a micro-batch's tokens for each module that has experts.

        A rank sends each token to each of its experts. Expert ranks get equally many, and have their own share.
        """
        over = {key: part.exchanged_over for key, part in self.parts.items() if part.exchanged_over}
        # Module with experts of its own → the ranks that exchange its tokens.
        ranks_of = {
            module: over[id(parameter)]
            for module in self.graph.module.modules()
            for parameter in module.parameters(recurse=False)
            if id(parameter) in over
        }
        if not ranks_of:
            return [0.0] * len(self.graph)
        sent: dict[nn.Module, Sent] = {}

        def note(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            tokens, *others = tensors_in((args, kwargs))
            chosen = [other.numel() for other in others if not other.is_floating_point()]
            copies = max(chosen) / tokens.shape[:-1].numel() if chosen else 1.0
            ranks = ranks_of[module]
            sent[module] = Sent((1 - 1 / len(ranks)) * copies * tokens.nbytes, self._crosses(ranks))

        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in ranks_of]
        try:  # costs anew, so that the modules run on the shapes of a micro-batch
            balancing = replace(self.plans.captures.source.balancing, costed={})
            if (program := self.plans.captures.program) is not None:
                balancing.stage_work(program, self.pattern, self.graph.placement)
        finally:
            for hook in hooks:
                hook.remove()
        seconds = []
        for stage in self.graph:
            mine = set(map(id, stage.tensors.values()))
            inside = (module for module in sent if mine & set(map(id, module.parameters(recurse=False))))
            seconds.append(sum(sent[module].seconds(self.hardware) for module in inside))
        return seconds

    def _crosses(self, ranks: Sequence[int]) -> float:
        """The fraction of a ring's links that connect different nodes."""
        nodes = [rank // self.per_node for rank in ranks]
        return sum(node != other for node, other in pairwise([*nodes, nodes[0]])) / len(nodes)  # the ring closes

    # bytes

    @cached_property
    def _tensors(self) -> list[list[Tensor]]:
        """Each rank's parameters and buffers, without duplicates."""
        tensors = all_tensors(self.graph.module)
        names = ownership(self.graph).names
        return [list({id(tensors[name]): tensors[name] for name in sorted(mine)}.values()) for mine in names]

    def _ranks(self) -> tuple[RankPreview, ...]:
        is_costed = self.staged is not None
        activations = peak_bytes(self.schedule, self.timeline.costs) if is_costed else ()
        hosts = peak_host_bytes(self.schedule, self.timeline.costs) if is_costed else [0.0] * len(self._tensors)
        sizes = bytes_of_inputs(self.pattern.shapes, self.options.precision)
        previews = []
        for rank, tensors in enumerate(self._tensors):
            mine = [self.graph[number] for number in self.schedule.stages_of[rank]]
            inputs = {name for stage in mine for name in stage.batch_inputs}
            previews.append(
                RankPreview(
                    tuple(stage.name for stage in mine),
                    **vars(self._static_bytes(tensors)),
                    activations=activations[rank] if is_costed else None,
                    messages=self._most_under_way(self.plan.instructions[rank]) if is_costed else None,
                    batch=float(sum(sizes[name] for name in inputs & sizes.keys())) if is_costed else None,
                    host=hosts[rank],
                )
            )
        return tuple(previews)

    def _static_bytes(self, tensors: Sequence[Tensor]) -> StaticBytes:
        """The bytes that the fullest replica holds for these tensors."""
        parameters = [each for each in tensors if isinstance(each, nn.Parameter) and id(each) not in self.parts]
        buffers = sum(tensor.nbytes for tensor in tensors if not isinstance(tensor, nn.Parameter))
        spread = sum(
            (
                self.parts[id(each)].bytes_of(each.element_size(), self.stepping.states, each.requires_grad)
                for each in tensors
                if id(each) in self.parts
            ),
            StaticBytes(parameters=float(buffers)),
        )
        # Element-wise optimizers shard every parameter evenly. Other optimizers step whole parameters, and the rank
        # with the most bytes decides.
        parts = [[self.account.part_of(parameter.numel(), rows_of(parameter)) for parameter in parameters]]
        if self.stepping.whole and self.account.zero in (1, 2) and parameters:
            sizes = [parameter.numel() for parameter in parameters]
            owners = dealt(sizes, self.account.shards)
            parts = [
                [float(size * (owner == rank)) for size, owner in zip(sizes, owners, strict=True)]
                for rank in sorted(set(owners))
            ]
        sums = (sum(map(self._of_one, parameters, mine), StaticBytes()) for mine in parts)
        return max(sums, key=lambda memory: memory.sum) + spread

    def _of_one(self, parameter: Tensor, part: float) -> StaticBytes:
        """The bytes of one parameter. ``part``: the number of its elements that a rank steps."""
        count = parameter.numel()
        cost = partial(self.account.bytes_of, count, self._element(parameter), floating=parameter.is_floating_point())
        stepped = cost(parameter.requires_grad, part=part)
        if id(parameter) in self.used:
            return stepped
        # A parameter that no stage uses is never stepped, and zero=3 does not shard it.
        if self.account.zero == 3:
            return StaticBytes(cost(False, part=count).parameters)
        return replace(stepped, optimizer=cost(False, part=part).optimizer)

    def _element(self, tensor: Tensor) -> int:
        """The bytes of an element in the type in which stages compute."""
        precision = self.options.precision
        return precision.compute.itemsize if precision and tensor.is_floating_point() else tensor.element_size()

    def _size(self, message: Message) -> float:
        return self.sizes[self.graph.edges[message.edge]][message.direction is BACKWARD]

    def _most_under_way(self, row: Sequence[Instruction]) -> float:
        """The most bytes of buffers that a rank holds for messages at once."""
        now, most, groups = 0.0, 0.0, self.schedule.dependencies.groups
        # A receive buffer is held from its post until the action that uses it begins, a send buffer until the receiver
        # is known to have the message.
        coming: defaultdict[Use | None, float] = defaultdict(float)
        for instruction in row:
            match instruction:
                case Receive(message):
                    coming[user_of(message, self.graph.edges, groups)] += self._size(message)
                    now += self._size(message)
                case Compute(action):
                    now -= coming.pop(use_of(action), 0.0)
                case Send(message):
                    now += self._size(message)
                case Release(message):
                    now -= self._size(message)
            most = max(most, now)
        return most

    # time

    def _of_step(self, *names: str) -> float:
        """The sum of these node costs over all nodes, micro-batches and replicas of a step."""
        nodes = self.staged.work.costs.nodes.values() if self.staged else ()
        each = sum(getattr(node, name) for node in nodes for name in names)
        return float(each * self.schedule.microbatches * self.topology.size(BATCH))

    @cached_property
    def _traffic(self) -> list[DataTraffic]:
        """Each rank's traffic on the data axis."""
        data, zero, precision = self.topology.size(BATCH), self.options.sharding.level, self.options.precision
        # Without zero, gradients are summed inside each node first, and then between nodes.
        node = min(map(len, self.topology.shard_groups()))
        shards = self.account.shards if zero else node if 1 < node < data else data
        replicas, part = data // shards, (shards - 1) / shards
        crossing = max(map(self._crosses, self.topology.groups(BATCH))) if shards == data else 0.0
        # In a ring of S ranks, a reduce-scatter or an all-gather sends (S - 1) / S of a tensor, an all-reduce twice as
        # much. zero=2 runs a reduce-scatter for each micro-batch.
        times = {0: 2, 2: self.schedule.microbatches}.get(zero, 1)
        traffic = []
        for tensors in self._tensors:
            parameters = [each for each in tensors if isinstance(each, nn.Parameter) and id(each) not in self.parts]
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            wire = sum(
                parameter.numel() * (precision.reduce.itemsize if precision else parameter.element_size())
                for parameter in trained
            )
            whole = sum(parameter.numel() * self._element(parameter) for parameter in parameters)
            sums = [Sent(times * part * wire, crossing)]
            if zero or replicas > 1:
                sums.append(Sent(2 * (replicas - 1) / replicas * wire / shards, 1.0))
            # With one micro-batch, zero=3 gathers all blocks but the last for the backward, too.
            again = zero == 3 and self.schedule.microbatches == 1
            again = again and whole > block_bytes(whole, self.options.sharding.bucket_bytes)
            gathers = [Sent((1 + again) * part * whole, crossing)] if zero else []
            for each in (each for each in tensors if id(each) in self.parts):
                spread, size = self.parts[id(each)], each.element_size()
                ring, leaves = 1 - 1 / len(spread.summed_over), self._crosses(spread.summed_over)
                if each.requires_grad:  # FSDP2 reduces and scatters, and gathers its own
                    sums.append(Sent(ring * size * (spread.gathered or 2 * spread.count), leaves))
                gathers.append(Sent(ring * size * spread.gathered, leaves))
            traffic.append(DataTraffic(sums, gathers))
        return traffic

    @cached_property
    def _seconds(self) -> float:
        """The end of the last rank. A rank's gradient sums begin with the first of its stages' last backwards, or with
        its first backward under zero=2. The rest of the sums, and the parameter gathers, run after the table's end."""
        assert self.staged is not None
        end = whole = self.timeline.makespan + self.staged.tied_seconds
        if self.topology.size(BATCH) == 1:
            return end
        for traffic, row in zip(self._traffic, self.schedule.rows, strict=True):
            backwards = [action for action in row if action.kind.completes_gradients]
            sums = sum(collective.seconds(self.hardware) for collective in traffic.sums)
            gathers = sum(collective.seconds(self.hardware) for collective in traffic.gathers)
            # A bucket is reduced after the last backward of its stage, with zero=2 after each backward.
            last = {action.stage: action for action in backwards}
            begin = backwards if self.options.sharding.level == 2 else last.values()
            start = min((self.timeline.spans[action].start for action in begin), default=0.0)
            end = max(end, start + sums + gathers, whole + gathers)
        return end

    def _sent(self) -> tuple[float, float]:
        """The bytes that all ranks together send in a step inside of nodes, and between nodes."""
        whole = crossing = 0.0
        if self.topology.size(BATCH) > 1:
            sent = [collective for traffic in self._traffic for collective in (*traffic.sums, *traffic.gathers)]
            times = self.topology.world_size / self.topology.size("pipe")
            whole = times * sum(collective.size for collective in sent)
            crossing = times * sum(collective.size * collective.crossing for collective in sent)
        sizes: defaultdict[tuple[int, int], float] = defaultdict(float)  # sender, receiver in a pipeline → bytes
        for message in (each.message for row in self.plan.instructions for each in row if isinstance(each, Send)):
            sizes[message.sender, message.receiver] += self._size(message)
        pipelines, node = self.topology.groups("pipe"), self.per_node
        for (sender, receiver), size in sizes.items():
            whole += size * len(pipelines)
            crossing += size * sum(ranks[sender] // node != ranks[receiver] // node for ranks in pipelines)
        return whole - crossing, crossing

    def _why_level_2(self) -> str:
        """Says why zero=2 takes more memory than zero=1, if it does."""
        if self.account.zero != 2:
            return ""
        sums = [self._static_bytes(tensors) for tensors in self._tensors]
        rank = max(range(len(sums)), key=lambda rank: sums[rank].sum)
        other = copy(self)
        other.account = replace(self.account, zero=1)
        less = other._static_bytes(self._tensors[rank]).sum
        if less >= sums[rank].sum:
            return ""
        return (
            f"zero=1 takes less than zero=2: {mib(less)} in place of {mib(sums[rank].sum)} MiB of parameters, "
            f"gradients and state on rank {rank}. zero=2 collects gradients whole while a step runs, and reduces them "
            f"in two buckets: {mib(sums[rank].whole)} MiB"
        )

    def _what(self) -> str:
        left = []
        if self.staged is None:
            left.append("activations, messages and time need a batch's shapes: pass example_args= or example_kwargs=")
        else:
            left.append(self.staged.work.costs.guesses)
            if not self.options.device.has_speeds:
                left.append('the time of a step needs the speeds of hardware=, such as hardware="h100"')
        left.append(self._why_level_2())
        spread = " and ".join(axis for axis in ("tensor", "expert") if self.topology.size(axis) > 1)
        if any(part.exchanged_over for part in self.parts.values()):
            left.append("experts get equally many tokens; each token travels to each of its experts, and back")
        elif spread and not self.parts:
            left.append(f"what parallelize= spreads over the {spread} axis counts whole: pass parallelize=")
        return "\n".join(filter(None, [f"{self.account}", *left, *self.plans.captures.notes]))


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends on groups of one kind. ``crossing``: the fraction of the bytes that leaves the node, on
    average over a group's ranks: only the last rank of a node sends to another node."""

    size: float
    crossing: float

    def seconds(self, hardware: Hardware) -> float:
        """The seconds of the collective; a ring is as fast as its slowest link."""
        return hardware.latency + self.size / hardware.wire(self.crossing > 0) if self.size else 0.0


class DataTraffic(NamedTuple):
    """The bytes that a rank sends over the data axis in a step: for sums of gradients, and gathers of parameters."""

    sums: list[Sent]
    gathers: list[Sent]
