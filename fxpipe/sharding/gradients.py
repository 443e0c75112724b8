"""Gradients: a rank's gradients, as executors and optimizers use them. Each class is for one layout of parameters:

Reducer                 whole parameters, in flat buckets: zero=0, 1 and 2
FullyShardedGradients   shards, gathered and reduced once in a call: zero=3
ParallelGradients       a reducer that knows the DTensors that ``parallelize`` has made, too
"""

from __future__ import annotations

import copy
import inspect
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
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.progress import log
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.stage.awaiting import Waits
from fxpipe.tensors.dtensors import is_dtensor, local
from fxpipe.torch_compat.operators import FOREACH_NORM
from fxpipe.torch_compat.tensors import plain_results, recast


@dataclass(frozen=True)
class Piece:
    """The elements ``start`` to ``stop`` of a parameter, in the order of its memory: one rank steps them.

    ``data`` is a view of the parameter's memory. It is 1-dimensional, or has the parameter's shape where the rank steps
    the whole parameter. ``counts``: whether this rank counts the piece in a norm over all ranks.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    data: Tensor
    counts: bool
    gradient: Callable[[], Tensor | None]
    """The summed gradient, shaped like ``data``; None where no rank used the parameter."""

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
        """The piece's gradient, as a new tensor in the same memory; None where the user has cleared it."""
        gradient = self.gradient() if self.parameter.grad is not None else None
        return None if gradient is None else plain(gradient).detach()


@dataclass(frozen=True)
class OptimizerPieces:
    """The pieces that one optimizer steps. ``number`` tells the optimizers of a rank apart."""

    number: int
    pieces: tuple[Piece, ...]


class Gradients(ABC):
    """All gradients of one rank.

    The methods are called in this order: ``begin``; ``awaited(stage)`` before each forward; ``before`` and ``after``
    around each backward, also around a backward that is left out; ``flush``; ``end``. A forward-only call runs
    ``awaited`` within ``evaluating``.

    ``own``: the parameters, by name, that only this rank has and that lie in no bucket. A call that sums or scales
    takes the gradients of earlier calls out of their ``.grad``, and adds them at its end. ``tied``: owners → names, as
    in ``Ownership``.
    """

    shards_parameters = False
    """Whether stages gather parameters over the data axis: then all replicas run the same stages in the same order."""

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
        self._marks = len(transport.ranks("pipe")) > 1  # whether a norm of .grad is this rank's alone
        self._earlier: dict[str, Tensor] | None = None  # in a call: the gradients of earlier calls
        self.stopwatch: Stopwatch | None = None
        """Times the sums of the call that begins next, where they run apart from computing."""
        self._asked: WhoUsed | None = None  # the question that a call has asked last
        self._hooks: dict[str, tuple[Node, Any]] = {}  # hooks, and the autograd nodes that they are on

    meets = False
    """Whether stages may meet other ranks of the batch group in forward and backward, so that all run the same actions.
    """

    @property
    def shards(self) -> bool:
        """Whether the ranks of a shard group have different pieces."""
        return self.sums.sharded and self.sums.shards > 1

    # a call

    @abstractmethod
    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        """Begins a call that runs this row of the graphs' stages. ``sync``: whether the call sums gradients; the same
        on all ranks. ``scales``: whether the call multiplies its gradients by a factor, once the factor is known."""

    @abstractmethod
    def awaited(self, stage: int) -> Waits:
        """The parameters of a stage that are still under way when its forward begins, and the calls that wait for them.
        The stage's modules hold whole parameters."""

    def settle(self) -> None:  # noqa: B027
        """Waits, between calls, until all parameters have the values that optimizers gave them."""

    def in_call(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The tensors that a stage uses for its parameters in a call, and that get the gradients."""
        return parameters

    def gathered(self) -> Iterable[Tensor]:
        """The tensors that a call uses for parameters, and that have no memory after the call."""
        return ()

    @abstractmethod
    def before(self, action: Action) -> None:
        """A backward begins, or its second half; or it is left out, for a micro-batch without weight. The gradients of
        a first half come before this call."""

    @abstractmethod
    def after(self, action: Action) -> None:
        """The backward is over."""

    @abstractmethod
    def flush(self) -> None:
        """All backwards are over: starts the sums that are left."""

    def ask(self, numbers: Tensor | None) -> None:
        """Asks, behind ``flush``, which parameters were used. Sums ``numbers``, if any, over the replicas, in place."""
        self._asked = WhoUsed(self._whether_used(), self._transport, numbers)

    def drop(self) -> None:
        """Puts the gradients of earlier calls back, after a call that failed in a single process, and drops the failed
        call's own, which lack their factor."""
        if self._earlier is not None:
            for name, parameter in self._own.items():
                parameter.grad = self._earlier.get(name)
        self._earlier = None

    @abstractmethod
    def end(self, factor: Tensor | None) -> None:
        """Returns when all sums are done. ``factor`` multiplies this call's gradients; None for 1."""

    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> AbstractContextManager[None]:
        """The context of a forward-only call."""
        return nullcontext()

    def clear(self) -> None:
        """Drops all gradients, also those that are not summed yet."""
        for parameter in self._own.values():
            parameter.grad = None

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for _, handle in self._hooks.values():
            handle.remove()

    # for an optimizer

    @torch.no_grad()  # otherwise each local() of a DTensor is an autograd function
    def pieces(self) -> list[Piece]:
        """This rank's part of all parameters."""
        return [self._piece(name, parameter) for name, parameter in self._own.items()]

    @abstractmethod
    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """Gives these parameters to one optimizer, and takes them from the optimizers that had them before.

        ``whole``: one rank of the shard group steps all of each parameter.

        Raises:
            RunError: parameters cannot be stepped whole, or cannot move to other ranks now.
        """

    def publish(self, claim: OptimizerPieces, frozen: bool) -> None:  # noqa: B027
        """Starts to send the pieces of a claim, which were stepped, to the ranks that use them; not where each call
        gathers parameters. ``frozen``: also the pieces of frozen parameters that have no gradient."""

    # shared by all classes

    @abstractmethod
    def _whether_used(self) -> dict[str, Use]:
        """The parameters whose gradients this call sums over other ranks, in one order on all of them."""

    @abstractmethod
    def _collect(self, name: str) -> bool:
        """Takes a gradient that was added to ``.grad``. False where the bucket's sum has started already."""

    @abstractmethod
    def _reduce_complete(self) -> None:
        """Starts the sums at the head of the queue whose gradients are all there."""

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        """Calls ``_collect`` after each gradient from now on. The hook does not keep ``self`` alive."""
        if name in self._hooks:
            return
        alive = weakref.ref(self)

        def arrived(*gradients: object) -> None:
            # A newer hook of the user's runs next, and may change the gradient. From then on this hook runs last. A sum
            # that the gradient completes starts now, or with the next gradient.
            hooks, me = handle.hooks_dict_ref(), alive()
            is_last = next(reversed(hooks)) == handle.id
            if not is_last:
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

        # The node that adds gradients up runs after all hooks of the parameter.
        node = get_gradient_edge(parameter).node
        handle: Any = node.register_hook(arrived)
        self._hooks[name] = node, handle

    def _piece(self, name: str, parameter: nn.Parameter) -> Piece:
        data, counts = parameter.detach(), self._is_first_owner(name)
        return Piece(name, parameter, 0, parameter.numel(), data, counts, lambda: parameter.grad)

    def _is_first_owner(self, name: str) -> bool:
        return name not in self._owners or self._owners[name][0] == self._transport.pipe_rank

    def _set_earlier_aside(self, wanted: bool = True) -> None:
        """Takes the gradients of earlier calls out of ``.grad``, if ``wanted``: otherwise autograd adds to them."""
        self._earlier = None
        if wanted:
            self._earlier = {name: p.grad for name, p in self._own.items() if p.grad is not None}
            for name in self._earlier:
                self._own[name].grad = None

    def _leave_gradients(self) -> None:
        """At the end of a call: adds the gradients of earlier calls, and marks those whose norms are this rank's."""
        for name, earlier in (self._earlier or {}).items():
            parameter = self._own[name]
            if parameter.grad is not None:
                local(earlier).add_(local(parameter.grad))
            parameter.grad = earlier
        self._earlier = None
        for parameter in self._own.values() if self._marks else ():
            if parameter.grad is not None:
                parameter.grad = as_pipe_gradient(parameter.grad)

    def _scale(self, factor: Tensor | None) -> None:
        if factor is None:
            return
        for parameter in self._own.values():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor.to(parameter.grad.device))

    def _sum(self, scope: Scope, names: Iterable[str]) -> None:
        """Sums local parts over a group, in place. All ranks of the group hold the same part of a tensor."""
        gradients = [self._own[name].grad for name in names]
        parts = [local(gradient) for gradient in gradients if gradient is not None]
        in_flat_buffers(parts, lambda flat: self._transport.all_reduce(scope, flat))

    @torch.no_grad()
    def _sum_used(self, over: Mapping[str, Iterable[str]], factor: Tensor | None) -> None:
        """Sums this call's gradients in ``.grad`` over owners, and the gradients in ``over``, scope → names, over batch
        axes.

        Waits for the answer to ``ask``. Parameters that any rank has used have a gradient on all ranks afterwards.
        """
        assert self._asked is not None
        used = self._asked.wait()
        # All ranks of a group sum the same parameters, in parts of the same shape: a rank that has not used a parameter
        # adds zeros, and a gradient with another placement (a partial sum, say) takes the parameter's placement.
        for name, parameter in self._own.items():
            gradient = parameter.grad
            if name not in used:
                parameter.grad = None
            elif gradient is None:
                parameter.grad = torch.zeros_like(parameter.detach())
            elif is_dtensor(gradient) and is_dtensor(parameter) and gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
        for scope, names in over.items():
            self._sum(scope, names)
        for ranks, tied in self._tied.items():
            self._sum(ranks, tied)
        self._scale(factor)

    def _whether_own_used(self, used: Collection[str]) -> dict[str, Use]:
        return {name: (self._owners.get(name, ()), name in used) for name in self._own}


Use = tuple[tuple[int, ...], bool]
"""The owners of a tied parameter, empty for others; and whether this rank has used the parameter."""


class WhoUsed:
    """Asks all replicas, and all owners of tied parameters, which parameters they have used; the caller need not wait.

    ``used``: parameter name → ``Use``, in one order on all ranks. ``numbers``: summed over the replicas, in place,
    before the constructor returns. Numbers on the host travel in one message with the flags of use.
    """

    def __init__(self, used: Mapping[str, Use], transport: Transport, numbers: Tensor | None = None) -> None:
        # The owners' groups come in one order on all ranks. In different orders, ranks would wait in a circle.
        self._names = sorted(used, key=lambda name: used[name][0])
        # The flags lie on the host, which decides by them. On a GPU they would wait for all kernels before them.
        self._flags = torch.tensor([used[name][1] for name in self._names], dtype=torch.uint8, device="cpu")
        steps: list[Collective] = []
        # First the replicas agree, then the owners. The flags of an owners' group lie side by side, as sorted.
        if numbers is not None and numbers.device.type == "cpu":
            message = torch.cat([self._flags, numbers])  # a used parameter's flags add up to 1 or more
            transport.all_reduce("data", message)
            numbers.copy_(message[len(used) :])
            self._flags.copy_(message[: len(used)] > 0)
        elif used and transport.data_size > 1:
            steps.append(Collective("maximum", "flags", self._flags))
        start = 0
        for owners, names in groupby(self._names, key=lambda name: used[name][0]):
            stop = start + len(list(names))
            if owners:
                steps.append(Collective("maximum", owners, self._flags[start:stop]))
            start = stop
        self._work = transport.start(steps, "which parameters were used") if steps else None
        if numbers is not None and numbers.device.type != "cpu":
            transport.all_reduce("data", numbers)

    def wait(self) -> set[str]:
        """The names of the parameters that at least one rank has used."""
        if self._work is not None:
            self._work.wait()
        return {name for name, flag in zip(self._names, self._flags.tolist(), strict=True) if flag}


def last_backwards(row: Sequence[Action]) -> dict[int, Action]:
    """Stage → its last backward in a row."""
    return {action.stage: action for action in row if action.kind.part_of is BACKWARD}


# --- .grad on one of several pipe ranks, or beside DTensors: a norm of all gradients at hand is not the model's

_NORMS = {torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, FOREACH_NORM}
# A multiple of a gradient is still a PipeGradient, so that its norm is noticed, too.
_MULTIPLES = {Tensor.data.__get__, Tensor.detach, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}  # type: ignore[attr-defined]


class PipeGradient(Tensor):
    """A gradient on one of several pipe ranks, or a DTensor beside plain gradients. torch's ``clip_grad_norm_`` and
    ``get_total_norm`` of several gradients raise RunError; the first other norm is logged. Results of other functions
    are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = plain_results(func, types, args, kwargs or {})
        if func in _NORMS:
            _note_norm(sys._getframe(1))
        return as_pipe_gradient(result) if func in _MULTIPLES else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain(self), memo)


def _note_norm(caller: FrameType) -> None:
    if _given_to_total_norm(caller) > 1:
        raise RunError(
            "torch.nn.utils.clip_grad_norm_ and get_total_norm would count this rank's gradients alone; "
            "forward_backward.clip_grad_norm_(max_norm) clips by the whole model's norm, and returns it; parameters= "
            "is for a part of the model, and grad_norms() gives each parameter's norm"
        )
    _tell_of_norms()


def _given_to_total_norm(caller: FrameType | None) -> int:
    """The number of tensors passed to ``torch.nn.utils.get_total_norm``, if it is among the callers; otherwise 0."""
    for _ in range(_BETWEEN):
        if caller is None:
            return 0
        if caller.f_code is _TOTAL_NORM:
            return len(caller.f_locals["tensors"])
        caller = caller.f_back
    return 0


_TOTAL_NORM, _BETWEEN = inspect.unwrap(torch.nn.utils.get_total_norm).__code__, 8
"""The most frames between: a list comprehension's before Python 3.12, and the frames of modes, as a default device."""


@cache
def _tell_of_norms() -> None:
    log(
        "fxpipe: norms of .grad are those of this rank's gradients; forward_backward.grad_norms() has those of all of "
        "the model's parameters"
    )


def as_pipe_gradient(gradient: Tensor) -> Tensor:
    """The gradient as a ``PipeGradient``, in the same memory; a sparse gradient unchanged: torch cannot alias it."""
    is_dense = type(gradient) is Tensor and gradient.layout is torch.strided
    is_spread = is_dtensor(gradient) and not isinstance(gradient, PipeGradient)
    return recast(gradient, PipeGradient) if is_dense or is_spread else gradient


def plain(gradient: Tensor) -> Tensor:
    """The gradient, in the same memory, as a plain tensor or DTensor."""
    return recast(gradient, Tensor) if isinstance(gradient, PipeGradient) else gradient
