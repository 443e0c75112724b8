"""Flat bucket: the gradients of several parameters in one tensor, and the collectives that sum it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fxpipe.distributed.collective import Collective, Scope, Work
from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.labels import label
from fxpipe.sharding.data_axis import BucketLayout, GradientSums, Slot
from fxpipe.sharding.gradients import Piece, as_pipe_gradient
from fxpipe.stage.elsewhere import Elsewhere


@dataclass
class InBucket:
    """A parameter of a bucket. ``mark``: the tensor in ``.grad`` that stands for a gradient which lies in sections."""

    slot: Slot
    parameter: nn.Parameter
    mark: Tensor
    view: Tensor | None = None
    """Its gradient in the bucket."""
    present: bool = False
    """Whether it has a gradient: in a call, one on this rank that is not summed yet; after it, one on any rank."""


@dataclass(frozen=True)
class Earlier:
    """The gradients that earlier calls have left, while a call runs that must not sum or scale them again.

    ``values``: the whole buffer, or this rank's section. ``summed``: the names of the parameters whose gradients in it
    are sums over all ranks; empty where they are not summed yet.
    """

    values: Tensor
    summed: frozenset[str]


class FlatBucket:
    """One bucket of this rank, from the first gradient that arrives to their sum over all replicas and owners.

    Between calls all gradients lie in one tensor, the buffer or this rank's section of it. They are summed, or not yet
    where calls ran without synchronisation. In a call, ``Earlier`` may hold the gradients of the calls before it.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        sums: GradientSums,
        transport: Transport,
        claim: int,
    ) -> None:
        first = parameters[0]
        self.dtype: torch.dtype = first.grad_dtype or first.dtype
        self.device = first.device
        self.stage, self.owners = layout.kind.stage, layout.kind.owners
        self.size, self.root, self.sums, self.transport, self.claim = layout.size, layout.root, sums, transport, claim
        # begins to ends: this rank's section of the sum. _steps: the part of the section that this rank steps.
        self._sections = [layout.section(rank, sums.shards) for rank in range(sums.shards)]
        self.begins, self.ends = self._steps = self._sections[sums.rank] if sums.sharded else (0, self.size)
        # The owners of tied parameters have the same section of the sum. Each of them steps an equal part of it.
        if sums.sharded and transport.pipe_rank in self.owners and self.root is None:
            length = (self.ends - self.begins) // len(self.owners)
            begins = self.begins + self.owners.index(transport.pipe_rank) * length
            self._steps = begins, begins + length
        # One tensor holds all parameters, so that a single all-gather brings what every rank has stepped.
        self.values = torch.zeros(self.size, dtype=first.dtype, device=self.device) if sums.sharded else None
        self.members: list[InBucket] = []
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            if self.values is not None:
                parameter.data = view_of(self.values, slot, parameter).copy_(parameter.detach())
            like = torch.empty_like(parameter, device="meta", dtype=self.dtype, requires_grad=False)
            mark = _Mark.in_place_of(like, f"zero={sums.zero} {_IN_PARTS.format(slot.name)}", self.device)
            self.members.append(InBucket(slot, parameter, mark))
        self.summing: Sequence[InBucket] = self.members  # in a call: the members whose gradients it sums
        self.complete = False  # whether its sum has started, so that no gradient may come any more
        self.awaited: set[str] | None = None  # the parameters whose gradients the running backward still owes
        self.stopwatch: Stopwatch | None = None
        self._works: list[Work] = []
        self.gathering: Work | None = None  # the all-gather of the values that other ranks have stepped
        self._flat: Tensor | None = None
        self.forget()

    def __str__(self) -> str:
        return f"{self.members[0].slot.name} …, {self.size * self.dtype.itemsize / 2**20:.3g} MiB"

    # between calls

    def forget(self) -> None:
        """Drops all gradients; the buffers stay."""
        self.part: Tensor | None = None  # zero=1 and 2: this rank's section of the gradient
        self._summed = False  # whether the gradients here are sums over all ranks
        self._earlier: Earlier | None = None
        for member in self.members:
            member.present = False
            member.parameter.grad = None

    def drop_cleared(self) -> None:
        """Drops the gradients whose marks the user has set to zero."""
        for member in self.members:
            if vars(member.mark).pop("cleared", False) and member.parameter.grad is member.mark:
                member.parameter.grad = None

    def begin(self, scales: bool, all_members: bool) -> None:
        """A call begins. ``scales``: its gradients will be multiplied by a factor, and the gradients of earlier calls
        not. ``all_members``: the call also sums the gradients of frozen parameters, which earlier calls have left."""
        self.summing = self._moving(lambda parameter: all_members or parameter.requires_grad)
        if all(member.parameter.grad is None for member in self.members):
            self.forget()
            return
        if all(member.parameter.grad is None or self._is_set(member) for member in self.members):
            # Earlier calls have left nothing. A gradient set behind a call without a sum is this rank's, as it was.
            self.part = None
            self._summed = self._summed or not any(member.present for member in self.members)
        for member in self.members:
            if member.parameter.grad is None:  # the user has cleared it, of this parameter alone
                if self.part is not None:
                    self._overlap(member, self.part, (self.begins, self.ends)).zero_()
                member.present = False
            elif member.parameter.grad is member.mark:
                member.parameter.grad = None
            elif self._is_set(member) and self.sums.sharded and (self._summed or self.sums.zero == 2):
                # Where gradients are not summed yet, each rank of the shard group adds its own.
                section, times = (self.begins, self.ends), 1 if self._summed else self.sums.shards
                part = self._overlap(member, self._content(self._summed), section)
                torch.mul(self._part_of_set(member, section), times, out=part)
                member.present, member.parameter.grad = True, None
            else:
                self.collect(member)
        # Sums must not be summed again, and gradients of earlier calls must not be scaled by this call's factor.
        if self._summed or scales:
            names = frozenset(member.slot.name for member in self.members if member.present and self._summed)
            self._earlier = Earlier(self._take(), names)
        for member in self.members:
            member.present = member.present and not self._summed
        self._summed = False

    def _take(self) -> Tensor:
        """The gradients of earlier calls. This call's are collected apart from them."""
        if self.sums.zero == 2 or (self.sums.sharded and self._summed):
            content, self.part = self._content(self._summed), None
            return content
        content = self._collected().clone()
        for member in self.members:
            member.parameter.grad = None
        return content

    # collecting

    def collect(self, member: InBucket) -> None:
        """Makes a gradient that has arrived a view into the bucket."""
        gradient, view = member.parameter.grad, self._view(member)
        if gradient is not view and gradient is not None:
            if gradient.layout != torch.strided:
                raise RunError(
                    f"the gradient of {member.slot.name} is sparse, and cannot be summed over replicas; "
                    "write nn.Embedding(..., sparse=False)"
                )
            view.copy_(gradient.detach())
            member.parameter.grad = view
        member.present = True

    def _view(self, member: InBucket) -> Tensor:
        if self._flat is None:
            self._flat = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        if member.view is None:
            view = view_of(self._flat, member.slot, member.parameter)
            member.view = as_pipe_gradient(view) if len(self.transport.ranks("pipe")) > 1 else view
        return member.view

    def _collected(self) -> Tensor:
        """This rank's flat gradient; zeros for parameters without a gradient."""
        for member in self.members:
            if member.parameter.grad is None:
                self._view(member).zero_()
            elif member.parameter.grad is not member.view:  # a user's hook has set another tensor
                self.collect(member)
        assert self._flat is not None
        return self._flat

    # summing

    def start(self, last: bool = True) -> None:
        """Starts the sum of the gradients so far; with zero=2 after each micro-batch, and then frees its buffer.

        ``last``: no more gradients come in this call, so that the sum goes on to other nodes and to owners.
        """
        # A work keeps its buffers until it is waited for. With zero=2 each micro-batch has buffers of its own.
        flat = self._collected()
        while self.sums.zero == 2 and len(self._works) > 1:
            self._works.pop(0).wait()
        self._go(self._to_section(flat, last) if self.sums.sharded else self._in_place(flat))
        if self.sums.zero == 2:
            self._flat = None
            for member in self.members:
                member.view = member.parameter.grad = None

    def start_across(self) -> None:
        """zero=2: starts the sum over nodes and owners, after micro-batches that were not known to be the last."""
        if self.part is not None:
            fill, steps = self._across(self.part)
            fill()
            self._go(steps)

    def _go(self, steps: Sequence[Collective]) -> None:
        if steps:
            what = str(self)
            with label(f"reduce {what}"):
                if self.stopwatch is not None:
                    steps = [*steps[:-1], steps[-1].followed_by(self.stopwatch.started(what))]
                self._works.append(self.transport.start(steps, what))

    def _in_place(self, flat: Tensor) -> list[Collective]:
        """zero=0: the collectives that sum the buffer, in place."""
        extent = self._extent(self.summing, (0, self.size))
        wire = self.sums.on_wire(taken(flat, extent))
        steps: list[Collective] = []
        # Across nodes only 1/shards of the bucket travels from each rank: scatter, sum the section across, gather.
        if self.sums.replicas > 1:
            if rest := -wire.numel() % self.sums.shards:
                wire = pad(wire, (0, rest))
            part = wire.new_empty(wire.numel() // self.sums.shards)
            steps.append(Collective("reduce_scatter", "shard", part, wire))
            steps += self.all_reduces(part)
            steps.append(Collective("all_gather", "gather", wire, part))
        else:
            if self.sums.shards > 1:
                steps.append(Collective("all_reduce", "shard", wire))
            steps += self.all_reduces(wire)
        if steps:
            steps[-1] = steps[-1]._replace(then=lambda: put(wire, flat, extent))
        return steps

    def _to_section(self, flat: Tensor, last: bool) -> list[Collective]:
        """zero=1 and 2: the collectives that sum over the shard group; each rank adds its section to ``part``."""
        wire, members = self.sums.on_wire(flat), self.summing
        # Sections of several micro-batches (zero=2) add up in the gradients' type, not in the wire's.
        is_first = self.part is None
        if self.part is None:
            self.part = torch.zeros(self.ends - self.begins, dtype=self.dtype, device=self.device)
        part, mine = self.part, self._extent(members, (self.begins, self.ends))
        received, steps = taken(wire, mine), list[Collective]()
        if self._is_even(members) and self.sums.shards > 1:
            received = torch.empty_like(received)
            steps = [Collective("reduce_scatter", "shard", received, wire)]
        elif self.sums.shards > 1:
            sent = [taken(wire, self._extent(members, section)) for section in self._sections]
            received = sent[self.sums.rank]
            steps = [Collective("reduce", "shard", each, root=root) for root, each in enumerate(sent) if each.numel()]
        fill, across = self._across(part) if last else (None, [])

        def arrived() -> None:
            put(received, part, mine, self.begins, adds=not is_first)
            if fill is not None:
                fill()

        if not steps:
            arrived()
            return across
        return [*steps[:-1], steps[-1]._replace(then=arrived), *across]

    def _across(self, part: Tensor) -> tuple[Callable[[], object], list[Collective]]:
        """The sum of a section over nodes and owners: a function to call once the section is complete, and collectives.

        Where the wire has another type, or only some members move, they travel in a buffer that the function fills.
        """
        extent = self._extent(self.summing, (self.begins, self.ends))
        mine = taken(part, extent, self.begins)
        if mine.data_ptr() == part.data_ptr() and self.sums.on_wire(mine) is mine:
            return lambda: None, self.all_reduces(mine)
        wire = torch.empty_like(self.sums.on_wire(mine))
        steps = self.all_reduces(wire)
        if steps:
            steps[-1] = steps[-1]._replace(then=lambda: put(wire, part, extent, self.begins))
        return lambda: wire.copy_(taken(part, extent, self.begins)), steps

    def all_reduces(self, tensor: Tensor) -> list[Collective]:
        """All-reduces over the ranks of other nodes with the same section, and over the owners of tied parameters."""
        scopes: list[Scope] = ["replica"] if self.sums.replicas > 1 else []
        scopes += [self.owners] if self.owners else []
        return [Collective("all_reduce", scope, tensor) for scope in scopes if tensor.numel()]

    # moving some of the members: the others are frozen

    def _moving(self, moves: Callable[[nn.Parameter], bool]) -> Sequence[InBucket]:
        """The members to move. Where the owners of tied parameters step equal parts, all members move, or none."""
        members = [member for member in self.members if moves(member.parameter)]
        return self.members if members and self.owners else members

    def _is_even(self, members: Sequence[InBucket]) -> bool:
        """Whether a collective moves equal sections, of all members."""
        return self.root is None and len(members) == len(self.members)

    def _extent(self, members: Sequence[InBucket], section: tuple[int, int]) -> list[tuple[int, int]]:
        """(start, stop) of the elements of a section that belong to these members, or to the padding between all."""
        if len(members) == len(self.members):
            return [section]
        return [ends for member in members if (ends := _within(member.slot, section))[0] < ends[1]]

    def wait(self) -> None:
        """Waits until all sums that were started are done."""
        with label("wait for a reduction"):
            for work in self._works:
                work.wait()
        self._works.clear()

    # after a call

    def scale(self, factor: Tensor | None, summed: bool) -> None:
        """Multiplies this call's gradients, ``summed`` or not; then adds the earlier calls' gradients to them."""
        if factor is not None:
            self._content(summed).mul_(factor)
        if self._earlier is None:
            return
        content, earlier, share = self._content(summed), self._earlier.values, 1.0
        if self._earlier.summed and not summed:
            # All ranks will be summed, so each gets a share: over shards, where each has all of it, nodes and owners.
            shards = 1 if self.sums.sharded else self.sums.shards
            share /= shards * self.sums.replicas * max(len(self.owners), 1)
        # With zero=1 summed gradients are a section, and unsummed ones the whole buffer.
        is_section = earlier.numel() < content.numel()
        (content[self.begins : self.ends] if is_section else content).add_(earlier, alpha=share)
        if content is self._flat:
            for member in self.members:
                member.parameter.grad = self._view(member) if self._has_gradient(member) else None

    def _has_gradient(self, member: InBucket) -> bool:
        """Whether a member has a gradient of this call, or a summed one of earlier calls."""
        return member.present or (self._earlier is not None and member.slot.name in self._earlier.summed)

    def _content(self, summed: bool) -> Tensor:
        """The tensor with this call's gradients: the buffer, or this rank's section."""
        if not self.sums.sharded and summed:
            assert self._flat is not None
            return self._flat
        if not self.sums.sharded or (self.sums.zero == 1 and not summed):
            return self._collected()
        if self.part is None:
            self.part = torch.zeros(self.ends - self.begins, dtype=self.dtype, device=self.device)
        return self.part

    def finish(self, summed: bool) -> None:
        """Sets ``.grad`` of each parameter with a gradient: to the gradient, or to the mark that stands for it."""
        self._summed, self.complete = summed, False
        # Where a sum lies in sections, .grad cannot show it.
        shows = not self.sums.sharded or (self.sums.zero == 1 and not summed)
        for member in self.members:
            member.present = self._has_gradient(member)
            member.parameter.grad = (self._view(member) if shows else member.mark) if member.present else None
        self._earlier = None

    # for the optimizer

    def pieces(self) -> list[Piece]:
        """The pieces that this rank steps."""
        # Owners that step equal parts all count them in norms. Where each owner steps all, the first counts.
        is_apart = not self.owners or self._steps != (self.begins, self.ends)
        counts = is_apart or self.owners[0] == self.transport.pipe_rank
        pieces = []
        for member in self.members:
            slot, parameter = member.slot, member.parameter
            start, stop = _within(slot, self._steps)
            if start < stop or (self.root in (None, self.sums.rank) and slot.start == slot.stop):
                data = self.values[start:stop] if self.values is not None and self.root is None else parameter.detach()
                read = partial(self._gradient, member)
                pieces.append(Piece(slot.name, parameter, start - slot.start, stop - slot.start, data, counts, read))
        return pieces

    def _gradient(self, member: InBucket) -> Tensor | None:
        if not self.sums.sharded:
            return member.parameter.grad
        if self._is_set(member):
            return member.parameter.grad if self.root is not None else self._part_of_set(member, self._steps)
        if self.part is None or not member.present:
            return None
        if self.root is not None:
            return view_of(self.part, member.slot, member.parameter)
        return self._overlap(member, self.part, self._steps)

    def _overlap(self, member: InBucket, part: Tensor, section: tuple[int, int]) -> Tensor:
        """The part of a parameter's gradient that lies in a section."""
        start, stop = _within(member.slot, section)
        return part[start - self.begins : stop - self.begins]

    @staticmethod
    def _is_set(member: InBucket) -> bool:
        """Whether the user has set the gradient in ``.grad``: the same on all ranks, as a sum over them is."""
        gradient = member.parameter.grad
        return gradient is not None and gradient is not member.mark and gradient is not member.view

    def _part_of_set(self, member: InBucket, section: tuple[int, int]) -> Tensor:
        """A section's part of a gradient that the user has set: a view, since ``.grad`` gets the parameter's order."""
        slot, parameter = member.slot, member.parameter
        gradient = parameter.grad
        assert gradient is not None
        if gradient.stride() != member.mark.stride():
            gradient = parameter.grad = torch.empty_like(member.mark, device=self.device).copy_(gradient)
        start, stop = _within(slot, section)
        return gradient.detach().as_strided((gradient.numel(),), (1,))[start - slot.start : stop - slot.start]

    def gather(self, all_members: bool) -> None:
        """Starts all-gathers over the owners and the shard group, after each rank has stepped its section of values:
        of the members that a step may change, or of all."""
        members = self._moving(lambda each: all_members or each.requires_grad or each.grad is not None)
        if self.values is None or not members:
            return
        # The owners' parts make a section, and the sections the bucket.
        steps: list[Collective] = []
        if self._steps != (self.begins, self.ends):
            section, mine = (self.values[slice(*ends)] for ends in ((self.begins, self.ends), self._steps))
            steps.append(Collective("all_gather", self.owners, section, mine))
        if self._is_even(members) and self.sums.shards > 1:
            steps.append(Collective("all_gather", "gather", self.values, self.values[self.begins : self.ends]))
        elif self.sums.shards > 1:
            for root, extent in enumerate(self._extent(members, section) for section in self._sections):
                values = taken(self.values, extent)
                then = partial(put, values, self.values, extent)
                steps += [Collective("broadcast", "gather", values, root=root, then=then)] * bool(values.numel())
        if steps:
            self.gathering = self.transport.start(steps, f"parameters of {self}")

    def settle(self) -> None:
        """Waits until ``values`` has what all ranks have stepped."""
        if self.gathering is not None:
            self.gathering.wait()
        self.gathering = None


_IN_PARTS = (
    "leaves each replica a part of the gradient of {}, and .grad marks that there is one; write "
    "forward_backward.optimizer(torch.optim.AdamW, lr=...), which steps the parts, and "
    "forward_backward.clip_grad_norm_(max_norm), which clips them"
)


class _Mark(Elsewhere):
    """The tensor in ``.grad`` that stands for a gradient which lies in parts over the ranks. Setting it to zero, as a
    module's ``zero_grad(set_to_none=False)`` does, clears the gradient."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is not torch.ops.aten.zero_.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        args[0].cleared = True
        return args[0]


def _within(slot: Slot, section: tuple[int, int]) -> tuple[int, int]:
    """(start, stop) of the part of a parameter that lies in a section, in elements of the bucket."""
    begins, ends = section
    return max(slot.start, begins), max(min(slot.stop, ends), slot.start, begins)


def taken(tensor: Tensor, extent: Sequence[tuple[int, int]], begins: int = 0) -> Tensor:
    """The elements of an extent, in a row; a view if it is one range. ``begins``: the number of the first element."""
    views = [tensor[start - begins : stop - begins] for start, stop in extent]
    return views[0] if len(views) == 1 else torch.cat(views or [tensor[:0]])


def put(values: Tensor, tensor: Tensor, extent: Sequence[tuple[int, int]], begins: int = 0, adds: bool = False) -> None:
    """Writes, or adds, what ``taken`` has returned back to the elements of an extent."""
    for start, stop in extent:
        view = tensor[start - begins : stop - begins]
        if view.data_ptr() != values.data_ptr():
            (view.add_ if adds else view.copy_)(values[: stop - start])
        values = values[stop - start :]


def view_of(flat: Tensor, slot: Slot, like: Tensor) -> Tensor:
    """The part of a flat tensor that has the shape of a parameter, and its strides where these leave no gaps."""
    strides = torch.empty_like(like, device="meta").stride()
    return flat[slot.start : slot.stop].as_strided(like.shape, strides)
