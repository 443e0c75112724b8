"""Gradients: what executors and optimizers ask of a rank's gradients, however its parameters lie over the data axis.

Reducer                 whole parameters, in flat buckets: zero=0, 1 and 2
FullyShardedGradients   shards, gathered and reduced once in a call: zero=3
ParallelGradients       a reducer that knows the DTensors that ``parallelize`` has made, too
"""

from __future__ import annotations

import copy
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from fxpipe.distributed.collective import Collective, Scope
from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.distributed.transport import Transport, in_flat_buffers
from fxpipe.errors import RunError
from fxpipe.graph.awaiting import Waits
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.parameters.dtensors import is_dtensor, local
from fxpipe.progress import log
from fxpipe.schedules.action import Action, Op
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.torch_compat import FOREACH_NORM, given_to_total_norm, plain_results, recast


@dataclass(frozen=True)
class Piece:
    """What one rank steps of one parameter: its elements ``start`` to ``stop``, in the order of its memory.

    ``data`` is a view of the parameter's memory, 1-dimensional, or of the parameter's own shape where the rank steps
    all of it. ``counts``: whether this rank counts it in a norm over all ranks.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    data: Tensor
    counts: bool
    gradient: Callable[[], Tensor | None]
    """The summed gradient, shaped like ``data``; None where nobody used the parameter."""

    def part_of(self, values: Tensor) -> Tensor:
        """The elements of a whole tensor that this piece has, shaped like ``data``."""
        if values.shape == self.data.shape:
            return values
        # Pieces count in the order of the parameter's memory, so the values must lie in that order first: in that of a
        # plain tensor, also where the parameter is a DTensor.
        like = torch.empty_strided(self.parameter.shape, self.parameter.stride(), device="meta")
        ordered = torch.empty_like(like, dtype=values.dtype, device=values.device)
        if ordered.stride() != values.stride():
            values = ordered.copy_(values)
        return values.detach().as_strided((values.numel(),), (1,))[self.start : self.stop].view(self.data.shape)

    def current_gradient(self) -> Tensor | None:
        """Its gradient, unless the user has cleared it: a tensor of its own, in the same memory."""
        gradient = self.gradient() if self.parameter.grad is not None else None
        return None if gradient is None else plain(gradient).detach()


@dataclass(frozen=True)
class OptimizerPieces:
    """What one optimizer steps."""

    number: int
    pieces: tuple[Piece, ...]


class Gradients(ABC):
    """All gradients of one rank.

    A call: ``begin``; ``awaited(stage)`` ahead of each forward, ``before`` and ``after`` around each backward, one that
    is left out included; ``flush``, ``end``. In a forward-only call ``awaited`` stands inside of ``evaluating``.

    ``own``: the parameters of this rank alone, by name, that lie in no bucket. What earlier calls have left in their
    ``.grad`` is kept out of a call that sums or scales, and added at its end. ``tied``: owners → names, as
    ``Ownership`` has them.
    """

    def __init__(
        self,
        own: Mapping[str, nn.Parameter],
        transport: Transport,
        sums: GradientSums,
        tied: Mapping[tuple[int, ...], Sequence[str]],
    ) -> None:
        self.sums, self._own, self._transport = sums, dict(own), transport
        mine = {ranks: names for ranks, names in tied.items() if transport.pipe_rank in ranks}
        self._tied = {ranks: [name for name in names if name in self._own] for ranks, names in mine.items()}
        self._owners = {name: ranks for ranks, names in self._tied.items() for name in names}
        self._earlier: dict[str, Tensor] | None = None  # what stands aside in a call
        self._hooks: dict[str, tuple[Node, Any]] = {}  # the nodes of autograd's that have them are held, too

    @property
    def shards(self) -> bool:
        """Whether the ranks of a shard group have different pieces."""
        return self.sums.sharded and self.sums.shards > 1

    # a call

    @abstractmethod
    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        """A call begins that runs this row of the graphs' stages. ``sync``: whether gradients are summed in it, the
        same on all ranks. ``scales``: whether they will be multiplied by a factor, once it is known."""

    def watch(self, stopwatch: Stopwatch) -> None:  # noqa: B027
        """``stopwatch``: what times the sums of this call, where they can be separated from computing."""

    @abstractmethod
    def awaited(self, stage: int) -> Waits:
        """A forward begins, in whose modules the parameters lie whole: waits for those that are still under way."""

    def settle(self) -> None:  # noqa: B027
        """Between calls: waits until all parameters are what optimizers have made of them."""

    def in_call(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """What stands in the places of a stage's parameters from the first forward of a call on, and gets gradients."""
        return parameters

    @abstractmethod
    def before(self, action: Action) -> None:
        """A backward begins, or the second half of one; of a micro-batch without weight, it is left out. What a first
        half makes of gradients comes unannounced, before the second's."""

    @abstractmethod
    def after(self, action: Action) -> None:
        """It is over."""

    @abstractmethod
    def flush(self) -> None:
        """All backwards are over: starts what is left."""

    def drop(self) -> None:
        """The call has failed, in one process, where one can go on: what earlier calls have left is there as it was,
        where it was set aside. What this one has made of those gradients is without its factor, and dropped."""
        if self._earlier is not None:
            for name, parameter in self._own.items():
                parameter.grad = self._earlier.get(name)
        self._earlier = None

    @abstractmethod
    def end(self, factor: Tensor | None) -> None:
        """Sums are done when it returns. ``factor``: what this call's gradients are multiplied by; None for 1."""

    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> AbstractContextManager[None]:
        """A forward-only call."""
        return nullcontext()

    def clear(self) -> None:
        """Drops all gradients, those not summed yet included."""
        for parameter in self._own.values():
            parameter.grad = None

    def close(self) -> None:
        """Leaves the parameters alone."""
        for _, handle in self._hooks.values():
            handle.remove()

    # for an optimizer

    def pieces(self) -> list[Piece]:
        """This rank's part of all parameters."""
        return [self._piece(name, parameter) for name, parameter in self._own.items()]

    @abstractmethod
    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """These parameters, for one optimizer to step, which takes them from any that had them before.

        ``whole``: each parameter is stepped by one rank of the shard group, which has all of it. RunError where that,
        or moving them now, cannot be.
        """

    def publish(self, claim: OptimizerPieces) -> None:  # noqa: B027
        """Its pieces have been stepped: starts bringing them to the ranks that use them, where no call gathers them."""

    # what the kinds have in common

    @abstractmethod
    def _collect(self, name: str) -> bool:
        """A gradient has been added to ``.grad``. False where the sum of the others is on its way."""

    @abstractmethod
    def _reduce_complete(self) -> None:
        """Starts the sums at the head of the queue that nothing is missing from."""

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        """``_collect`` is called behind each gradient from now on, by a hook that does not keep what a user has
        dropped."""
        if name in self._hooks:
            return
        alive = weakref.ref(self)

        def arrived(*gradients: object) -> None:
            # A hook of the user's that is newer runs next, and may change the gradient; from then on this one is the
            # last. What the gradient completes goes at once, or else with the next one.
            hooks, me = handle.hooks_dict_ref(), alive()
            is_last = next(reversed(hooks)) == handle.id
            hooks[handle.id] = hooks.pop(handle.id)
            if me is None:
                return
            me._reduce_complete()
            if not me._collect(name):
                raise RunError(
                    f"a gradient of {name} came after its last one: inside a reentrant checkpoint, perhaps; "
                    "write torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            if is_last:
                me._reduce_complete()

        # on the node that adds them up: behind all hooks of the parameter
        node = get_gradient_edge(parameter).node
        handle: Any = node.register_hook(arrived)
        self._hooks[name] = node, handle

    def _piece(self, name: str, parameter: nn.Parameter) -> Piece:
        data, counts = parameter.detach(), self._is_first_owner(name)
        return Piece(name, parameter, 0, parameter.numel(), data, counts, lambda: parameter.grad)

    def _is_first_owner(self, name: str) -> bool:
        return name not in self._owners or self._owners[name][0] == self._transport.pipe_rank

    def _set_earlier_aside(self, wanted: bool = True) -> None:
        """``wanted``: False where this call's gradients may be added as they come."""
        self._earlier = None
        if wanted:
            self._earlier = {name: p.grad for name, p in self._own.items() if p.grad is not None}
            for name in self._earlier:
                self._own[name].grad = None

    def _leave_gradients(self) -> None:
        """At the end of a call: adds what earlier ones have left, and marks what is one of several pipe ranks'."""
        for name, earlier in (self._earlier or {}).items():
            parameter = self._own[name]
            if parameter.grad is not None:
                local(earlier).add_(local(parameter.grad))
            parameter.grad = earlier
        self._earlier = None
        for parameter in self._own.values() if len(self._transport.ranks("pipe")) > 1 else ():
            if parameter.grad is not None:
                parameter.grad = held(parameter.grad)

    def _scale(self, factor: Tensor | None) -> None:
        if factor is None:
            return
        for parameter in self._own.values():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor.to(parameter.grad.device))

    def _sum(self, scope: Scope, names: Iterable[str]) -> None:
        """Sums local parts over a group, in place: each is the sum's local part, since all are spread equally."""
        gradients = [self._own[name].grad for name in names]
        parts = [local(gradient) for gradient in gradients if gradient is not None]
        in_flat_buffers(parts, lambda flat: self._transport.all_reduce(scope, flat))

    @torch.no_grad()
    def _sum_used(self, used: Collection[str], over_data: Iterable[str], factor: Tensor | None) -> None:
        """Sums what this call has left in ``.grad`` over owners, and of some parameters over the data axis.

        ``used``: the names of the parameters that any rank has used. These have a gradient on all ranks afterwards.
        """
        # All ranks of a group sum the same parameters, in parts of the same shape: zeros where this rank has used
        # nothing, and a gradient whose placement autograd chose (a partial sum, say) is spread as the parameter is.
        for name, parameter in self._own.items():
            gradient = parameter.grad
            if name not in used:
                parameter.grad = None
            elif gradient is None:
                parameter.grad = torch.zeros_like(parameter.detach())
            elif is_dtensor(gradient) and is_dtensor(parameter) and gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
        self._sum("data", over_data)
        for ranks, names in self._tied.items():
            self._sum(ranks, names)
        self._scale(factor)

    def _ask_who_used(self, used: Collection[str]) -> WhoUsed:
        return WhoUsed({name: (self._owners.get(name, ()), name in used) for name in self._own}, self._transport)


class WhoUsed:
    """Finds, beside the caller, which parameters any rank has used: over the data axis, and over owners of tied ones.

    ``used``: name → (its owners, where it is tied; whether this rank has used it). In the same order on all ranks.
    """

    def __init__(self, used: Mapping[str, tuple[tuple[int, ...], bool]], transport: Transport) -> None:
        # The owners' groups come in one order on all ranks. In different orders, ranks would wait in a circle.
        self._names = sorted(used, key=lambda name: used[name][0])
        # On the host, which decides by them: on a GPU they would wait for all that is in front of them there.
        self._flags = torch.tensor([used[name][1] for name in self._names], dtype=torch.uint8, device="cpu")
        # First the replicas agree, then the owners. The flags of an owners' group lie side by side, as sorted.
        over_data = bool(used) and transport.data_size > 1
        steps = [Collective("maximum", "flags", self._flags)] if over_data else []
        start = 0
        for owners, names in groupby(self._names, key=lambda name: used[name][0]):
            stop = start + len(list(names))
            if owners:
                steps.append(Collective("maximum", owners, self._flags[start:stop]))
            start = stop
        self._work = transport.start(steps, "which parameters were used") if steps else None

    def wait(self) -> set[str]:
        """The names of those that one has used."""
        if self._work is not None:
            self._work.wait()
        return {name for name, flag in zip(self._names, self._flags.tolist(), strict=True) if flag}


def last_backwards(row: Sequence[Action]) -> dict[int, Action]:
    """Stage → the last of its backwards in a row."""
    return {action.stage: action for action in row if action.op is not Op.F}


# --- .grad on one of several pipe ranks, where a norm over all that is at hand is this rank's alone

_NORMS = {torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, FOREACH_NORM}
# Whatever only multiplies a gradient is one still, so that a norm of it is seen.
_MULTIPLES = {Tensor.data.__get__, Tensor.detach, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}  # type: ignore[attr-defined]


class HeldGradient(Tensor):
    """A gradient on one of several pipe ranks. torch's ``clip_grad_norm_`` and ``get_total_norm`` of several of them
    are a RunError; another norm is told of, once; what is computed with one is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = plain_results(func, types, args, kwargs or {})
        if func in _NORMS:
            _note_norm(sys._getframe(1))
        return held(found) if func in _MULTIPLES else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain(self), memo)


def _note_norm(caller: FrameType) -> None:
    if given_to_total_norm(caller) > 1:
        raise RunError(
            "torch.nn.utils.clip_grad_norm_ and get_total_norm would count this rank's gradients alone; "
            "forward_backward.clip_grad_norm_(max_norm) clips by the whole model's norm, and returns it; parameters= "
            "is for a part of the model, and grad_norms() gives each parameter's norm"
        )
    _tell_of_norms()


@cache
def _tell_of_norms() -> None:
    log(
        "fxpipe: norms of .grad are those of this rank's gradients; forward_backward.grad_norms() has those of all of "
        "the model's parameters"
    )


def held(gradient: Tensor) -> Tensor:
    """The gradient, in the same memory, as one of several pipe ranks'; a sparse one itself: torch cannot alias it."""
    is_dense = type(gradient) is Tensor and gradient.layout is torch.strided
    is_spread = is_dtensor(gradient) and not isinstance(gradient, HeldGradient)
    return recast(gradient, HeldGradient) if is_dense or is_spread else gradient


def plain(gradient: Tensor) -> Tensor:
    """The gradient, in the same memory, as a plain tensor or DTensor."""
    return recast(gradient, Tensor) if isinstance(gradient, HeldGradient) else gradient
