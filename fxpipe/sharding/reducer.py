"""Reducer: sums gradients over the data axis, and over the owners of tied parameters, while backward goes on.

The parameters that a rank shares lie in flat buckets, in the reverse order of use. The sum of a bucket starts as soon
as the last micro-batch's backward has completed it. ``zero`` says which collectives make it:

  zero=0   all-reduce; across nodes: reduce-scatter in the node, all-reduce across, all-gather in the node
  zero=1   reduce-scatter over the shard group, all-reduce of the section across nodes
  zero=2   the same, but reduce-scattered after every micro-batch, so that a rank keeps only its section

With zero=0 ``.grad`` is a view into the bucket. With 1 and 2 each rank has its section of the sum, and ``.grad`` is a
mark: any use of its values raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.parameters.ownership import Ownership
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, FORWARD
from fxpipe.sharding.data_axis import BucketKind, GradientSums, Item, lay_out
from fxpipe.sharding.flat_bucket import FlatBucket, InBucket
from fxpipe.sharding.gradients import Gradients, OptimizerPieces, Piece, Use, last_backwards
from fxpipe.stage.awaiting import Waits
from fxpipe.tensors.dtensors import is_dtensor

FIRST_BUCKET = 2**20
"""Bytes. The first bucket is smaller, so that the first reduction starts early; as in torch's DDP."""


@dataclass(frozen=True)
class Shared:
    """A parameter that other ranks hold, too. ``stages``: all stages that use it. ``owners``: its pipe ranks, if
    several. ``turn``: its number in the order in which forward first uses parameters."""

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]
    owners: tuple[int, ...]
    turn: int


class Reducer(Gradients):
    """``Gradients`` of parameters that a rank holds whole.

    ``shared``: the parameters that other ranks hold, too, in the order in which their gradients come. ``alone``: the
    rest.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        alone: Mapping[str, nn.Parameter],
        transport: Transport,
        sums: GradientSums,
        capacity: int,
        tied: Mapping[tuple[int, ...], Sequence[str]],
    ) -> None:
        super().__init__(alone, transport, sums, tied)
        self._shared, self._capacity = {each.name: each for each in shared}, capacity
        self._buckets: list[FlatBucket] = []
        self._claims: set[int] = set()
        self._unsummed = False  # whether earlier calls have left gradients that are not summed yet
        self._sync = self._hold = self._last = False
        self._queue: list[FlatBucket] = []  # to be started, in an order that is the same on all replicas
        self._add_buckets(shared, 0, whole=False)

    # buckets

    def _add_buckets(self, shared: Sequence[Shared], claim: int, whole: bool) -> None:
        # Buckets stand in the order in which their last parameter was to be filled, whoever has claimed them: all
        # replicas start their sums in that order.
        items = [Item(each.name, each.parameter.numel(), _kind(each, whole)) for each in shared]
        layouts = lay_out(items, self.sums.shards, self._capacity, min(self._capacity, FIRST_BUCKET))
        for layout in layouts:
            parameters = [self._shared[slot.name].parameter for slot in layout.slots]
            self._buckets.append(FlatBucket(layout, parameters, self.sums, self._transport, claim))
        position = {name: number for number, name in enumerate(self._shared)}
        self._buckets.sort(key=lambda bucket: position[bucket.members[-1].slot.name])
        self._home = {member.slot.name: (bucket, member) for bucket in self._buckets for member in bucket.members}

    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """With ``whole``, parameters are balanced over the ranks by size.

        Raises:
            RunError: there are gradients already, which with zero=1 or 2 would have to move to other ranks.
        """
        wanted, number = set(names), 0
        if self.sums.sharded:
            # These parameters get buckets of their own. The rest of the buckets that they leave is unclaimed: claim 0.
            left = {self._home[name][0].claim for name in wanted & self._shared.keys()}
            moving = [each for each in self._shared.values() if self._home[each.name][0].claim in left]
            if any(each.parameter.grad is not None for each in moving):
                raise RunError(
                    "there are gradients already; make the optimizer before the first step, or call zero_grad()"
                )
            self.settle()
            number = 1 + max(self._claims, default=0)
            self._buckets = [bucket for bucket in self._buckets if bucket.claim not in left]
            self._claims -= left
            self._add_buckets([each for each in moving if each.name not in wanted], 0, whole=False)
            self._add_buckets([each for each in moving if each.name in wanted], number, whole)
        self._claims.add(number)
        return OptimizerPieces(number, tuple(piece for piece in self.pieces() if piece.name in wanted))

    def pieces(self) -> list[Piece]:
        return super().pieces() + [piece for bucket in self._buckets for piece in bucket.pieces()]

    # a call

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        for each in self._shared.values() if len(self._hooks) < len(self._shared) else ():
            if each.parameter.requires_grad:  # it may have been frozen until now
                self._watch(each.name, each.parameter)
        self._sync = sync
        # Unsummed gradients of earlier calls must not be scaled with this call's. So nothing is summed until the factor
        # is known: this call's are scaled, the earlier ones join them, and one sum takes both.
        self._hold = sync and scales and self._unsummed
        # A parameter that was frozen after a call without synchronisation still has that call's gradients.
        self._live = [
            bucket
            for bucket in self._buckets
            if self._unsummed or any(member.parameter.requires_grad for member in bucket.members)
        ]
        self._lasts = last_backwards(row)
        self._queue = [bucket for bucket in self._live if not bucket.owners]
        self._summing: list[InBucket] = []
        if self._asked is not None:  # the call before may have left its question under way
            self._asked.wait()
        for bucket in self._buckets:  # frozen parameters' as well: an optimizer may step them
            bucket.drop_cleared()
        for bucket in self._live:
            bucket.complete, bucket.stopwatch = False, self.stopwatch
            bucket.begin(scales, self._unsummed)
        self._set_earlier_aside(scales)

    def before(self, action: Action) -> None:
        if not self._live:  # no parameter is shared
            return
        # With zero=2 every micro-batch's gradients are reduced, in a queue of this backward's buckets. Otherwise the
        # last micro-batch's are, in the queue of all buckets.
        self._last = self._lasts[action.stage] == action and self._sync and not self._hold
        if self.sums.zero == 2 or self._last:
            mine = [bucket for bucket in self._live if bucket.stage == action.stage]
            if self.sums.zero == 2:
                self._queue = list(mine)
            for bucket in mine:
                bucket.awaited = {member.slot.name for member in bucket.members if member.parameter.requires_grad}

    def _collect(self, name: str) -> bool:
        bucket, member = self._home[name]
        if bucket.complete:
            return False
        bucket.collect(member)
        if bucket.awaited is not None:
            bucket.awaited.discard(name)
        return True

    def _reduce_complete(self) -> None:
        while self._queue and self._queue[0].awaited is not None and not self._queue[0].awaited:
            bucket = self._queue.pop(0)
            bucket.awaited = None
            # ``flush`` starts sums over owners, in an order that is the same on all pipe ranks.
            bucket.complete = (self.sums.zero < 2 or self._last) and not bucket.owners
            bucket.start(bucket.complete)

    def after(self, action: Action) -> None:
        """A backward is over, or was left out: its buckets go as they are, also where gradients are missing."""
        for bucket in self._live:
            if bucket.stage == action.stage and bucket.awaited is not None:
                bucket.awaited.clear()
        if self._queue:
            self._reduce_complete()

    def flush(self) -> None:
        """Starts the sums that are left."""
        last = self._sync and not self._hold
        for bucket in self._live:
            bucket.awaited = None
            if bucket.complete:
                continue
            # With zero=2 a bucket of one stage was scattered behind each of its backwards.
            if self.sums.zero < 2 or bucket.stage not in self._lasts:
                if last or self.sums.zero == 2:
                    bucket.start(last)
            elif last and bucket.owners:
                bucket.wait()
                bucket.start_across()
        self._queue.clear()

    def _whether_used(self) -> dict[str, Use]:
        pairs = [(bucket.owners, member) for bucket in self._live for member in bucket.summing]
        self._summing = [member for _, member in pairs] if self._sync or self.sums.zero == 2 else []
        return {member.slot.name: (owners, member.present) for owners, member in pairs if self._summing}

    def end(self, factor: Tensor | None) -> None:
        summed = self._sync and not self._hold
        for bucket in self._live:
            bucket.wait()
            bucket.scale(factor, summed)
        if self._hold:
            for bucket in self._live:
                bucket.start() if self.sums.zero < 2 else bucket.start_across()
            for bucket in self._live:
                bucket.wait()
        # Waits only where this rank has not used all parameters.
        if self._asked is not None and not all(member.present for member in self._summing):
            used = self._asked.wait()
            for member in self._summing:
                member.present = member.slot.name in used
        for bucket in self._live:
            bucket.finish(self._sync)
        self._unsummed = not self._sync
        self._finish_own(factor)
        self._leave_gradients()

    def _finish_own(self, factor: Tensor | None) -> None:
        """Ends a call for the parameters that are in no bucket."""
        self._scale(factor)

    def clear(self) -> None:
        super().clear()
        self._unsummed = False
        for bucket in self._buckets:
            bucket.forget()

    # after the optimizer

    def publish(self, claim: OptimizerPieces, frozen: bool) -> None:
        for bucket in sorted(self._buckets, key=self._turn):
            if bucket.claim == claim.number:
                bucket.gather(frozen)

    def _turn(self, bucket: FlatBucket) -> int:
        """A bucket's number in the order of the next forward. Buckets of tied parameters come first: their owners run
        different rows of the table, and gather in one order."""
        return -1 if bucket.owners else min(self._shared[member.slot.name].turn for member in bucket.members)

    def settle(self) -> None:
        for bucket in self._buckets:
            bucket.settle()

    def awaited(self, stage: int) -> Waits:
        # The next forward waits for a bucket where it first uses it, so that gathers overlap with earlier computing.
        if not self._buckets:
            return Waits()
        under_way = [(bucket, member) for bucket in self._buckets if bucket.gathering for member in bucket.members]
        return Waits(
            (id(member.parameter), bucket.settle)
            for bucket, member in under_way
            if stage in self._shared[member.slot.name].stages
        )


def _kind(shared: Shared, whole: bool) -> BucketKind:
    parameter = shared.parameter
    types = (parameter.dtype, parameter.grad_dtype or parameter.dtype)
    return BucketKind(
        stage=shared.stages[0] if len(shared.stages) == 1 else None,
        owners=shared.owners,
        whole=whole,
        element=min(kind.itemsize for kind in types),
        group=(*types, parameter.device, parameter.requires_grad),
    )


def reducer_for(
    graph: StageGraph,
    row: Sequence[Action],
    module: nn.Module,
    owners: Ownership,
    transport: Transport,
    sums: GradientSums,
    capacity: int,
    make: Callable[..., Reducer] = Reducer,
) -> Reducer:
    """The reducer of a rank that runs ``row``, and holds ``module``'s parameters; DTensors lie in no bucket."""
    parameters = {n: p for n, p in module.named_parameters(remove_duplicate=False) if not is_dtensor(p)}
    spread = {name: parameter for name, parameter in module.named_parameters() if is_dtensor(parameter)}
    names = {id(parameter): name for name, parameter in reversed(parameters.items())}
    # Gradients come stage by stage in the order of the last backwards in this row; within a stage, the last parameters'
    # gradients come first. Buckets are filled in that order.
    ends = {action.stage: index for index, action in enumerate(row) if action.kind.part_of is BACKWARD}
    forwards = dict.fromkeys(action.stage for action in row if action.kind.part_of is FORWARD)
    reads = dict.fromkeys(id(parameter) for stage in forwards for parameter in graph[stage].parameters.values())
    turns = {key: turn for turn, key in enumerate(reads)}
    users: dict[int, dict[int, None]] = {}
    for stage in dict.fromkeys([*sorted(ends, key=ends.__getitem__), *range(len(graph))]):
        for parameter in reversed(graph[stage].parameters.values()):
            if id(parameter) in names:
                users.setdefault(id(parameter), {})[stage] = None
    groups = owners.tied.items() if transport.pipe_rank is not None else ()
    tied = {id(parameters[name]): holders for holders, group in groups for name in group if name in parameters}
    shared: list[Shared] = []
    alone: dict[str, nn.Parameter] = {}
    for key in dict.fromkeys([*users, *names]):
        stages, turn = tuple(users.get(key, ())), turns.get(key, len(reads))
        each = Shared(names[key], parameters[names[key]], stages, tied.get(key, ()), turn)
        has_gradient = each.parameter.is_floating_point() or each.parameter.is_complex()
        if has_gradient and (transport.data_size > 1 or each.owners):
            shared.append(each)
        else:
            alone[each.name] = each.parameter
    # A gradient is complete after all stages that use the parameter. Owners of tied parameters run different rows of
    # the table: they agree on the order of names.
    shared.sort(
        key=lambda each: (len(each.stages) != 1 or bool(each.owners), each.owners, each.name if each.owners else "")
    )
    own = {**dict(reversed(alone.items())), **spread}  # the DTensors in an order that is the same on all ranks
    return make(shared, own, transport, sums, capacity, owners.tied)
