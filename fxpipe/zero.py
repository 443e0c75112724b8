"""Zero: an optimizer of which each rank steps its pieces, as ZeRO does, in master precision, on the CPU if asked.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.clip import gradient_of
from fxpipe.data_axis import Way
from fxpipe.dtensors import local
from fxpipe.errors import CheckpointError, RunError, nearest
from fxpipe.flat import Piece
from fxpipe.groups import resolve_groups
from fxpipe.precision import Precision
from fxpipe.reduce import Claim
from fxpipe.target import Target, originals_of, target_of
from fxpipe.transport import Transport

Maker = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, or what stands for one: ``Maker(groups, **kw)``."""

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
"""Those that step each element by itself, so that a rank can step any part of a tensor. Others get whole tensors."""

REFUSED = {
    torch.optim.LBFGS: "takes the parameters of the whole model as one vector, and calls for its loss again and again",
    torch.optim.SparseAdam: "steps sparse gradients alone, and those of a bucket are dense",
}


class Store(Protocol):
    """Who has parameters and gradients; ``fxpipe.reduce.Reducer`` is one."""

    way: Way

    def claim(self, names: Iterable[str], whole: bool) -> Claim: ...
    def pieces(self) -> list[Piece]: ...
    def publish(self, claim: Claim) -> None: ...
    def settle(self) -> None: ...


def is_elementwise(cls: Maker) -> bool:
    """Whether this very class is known to step each element by itself."""
    return _class_of(cls) in ELEMENTWISE


def check_class(cls: Maker) -> None:
    """Refuses what cannot step pieces."""
    made = _class_of(cls)
    for refused, why in REFUSED.items():
        if isinstance(made, type) and issubclass(made, refused):
            raise RunError(f"torch.optim.{refused.__name__} {why}; write torch.optim.AdamW, say")


def _class_of(cls: Maker) -> Any:
    while isinstance(cls, functools.partial):
        cls = cls.func
    return cls


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer of this rank's parameters, of which an inner ``cls(groups, **kw)`` steps this rank's pieces.

    ``param_groups`` hold the model's own parameters; what a scheduler or the user writes into them counts in the next
    step. ``state`` is the inner one's, by the tensors that are stepped. Several optimizers may share a model.

    A parameter that nobody used has no gradient, and stays as it is. With ``precision`` a step for which any rank's
    gradient has an inf or nan is skipped on all ranks, whichever optimizer the gradient belongs to; ``skipped_steps``
    counts them, and rank 0 warns of the first and, where that is known, of why. ``zero_grad(set_to_none=False)`` sets
    to None all the same where gradients are sharded.

    Args:
        params: as in :func:`fxpipe.groups.resolve_groups`; None for all.
        store: pieces and their gradients. transport: asks all ranks whether one of them has an inf or nan.
        held, whole: this rank's and the whole model's parameters, under all their names.
        precision: steps masters of this type. offload: steps on the CPU, with masters and state there.
        originals: parameters before they were rounded, by name, for the masters.
        elementwise: whether ``cls`` steps each element by itself; None: whether it is known to, see ``ELEMENTWISE``.
        cause: what is known of why a step is left out, the same on every rank; called by all of them.

    Raises:
        RunError: ``cls`` is LBFGS or SparseAdam; or a group asks for what is no parameter of the model.
    """

    def __init__(
        self,
        cls: Maker,
        params: Any,
        kw: Mapping[str, Any],
        store: Store,
        transport: Transport,
        *,
        held: Mapping[str, Tensor],
        whole: Mapping[str, Tensor] | None = None,
        precision: Precision | None = None,
        offload: bool = False,
        device: torch.device | None = None,
        originals: Mapping[str, Tensor] | None = None,
        elementwise: bool | None = None,
        cause: Callable[[], str] = str,
    ) -> None:
        check_class(cls)
        self._inner: torch.optim.Optimizer | None = None
        self._cls, self._kw = cls, dict(kw)
        self._store, self._transport = store, transport
        self._held, self._all = held, held if whole is None else whole
        self._names: dict[int, list[str]] = {}
        for name, parameter in held.items():
            self._names.setdefault(id(parameter), []).append(name)
        self._precision, self._offload = precision, offload
        self._device = transport.device if device is None else device
        self._elementwise = is_elementwise(cls) if elementwise is None else elementwise
        self._cause = cause
        self._claims: list[Claim] = []
        self._steps = self.skipped_steps = 0
        super().__init__(resolve_groups(params, held, self._all), {})
        self._targets = self._claim(self.param_groups, originals or {})
        self._inner = cls(
            [{**_options(g), "params": _tensors(t)} for g, t in zip(self.param_groups, self._targets, strict=True)],
            **self._kw,
        )
        self.state, self.defaults = self._inner.state, self._inner.defaults
        self._exchange(self._inner.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; parameters may be given as to the constructor. A collective call of all ranks."""
        (group,) = resolve_groups([param_group], self._held, self._all)
        parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
        for parameter in parameters:
            if isinstance(parameter, Tensor) and id(parameter) not in self._names:
                raise RunError(
                    f"a parameter of shape {list(parameter.shape)} is not among this rank's; "
                    "take it from forward_backward.named_parameters()"
                )
        super().add_param_group(group)
        if self._inner is not None:
            (targets,) = self._claim([group], {})
            self._inner.add_param_group({**_options(group), "params": _tensors(targets)})
            self._targets.append(targets)

    def _claim(self, groups: Sequence[Mapping[str, Any]], originals: Mapping[str, Tensor]) -> list[list[Target]]:
        """What this rank steps of these groups' parameters, group by group."""
        names = [name for group in groups for parameter in group["params"] for name in self._names[id(parameter)]]
        claim = self._store.claim(names, not self._elementwise)
        self._claims.append(claim)
        pieces: dict[int, list[Piece]] = {}
        for piece in claim.pieces:
            pieces.setdefault(id(piece.parameter), []).append(piece)
        return [
            [
                target_of(piece, originals_of(originals, self._names[id(p)]), self._precision, self._offload)
                for p in group["params"]
                for piece in pieces.get(id(p), ())
            ]
            for group in groups
        ]

    @staticmethod
    def _exchange(source: Sequence[Mapping[str, Any]], sink: Sequence[dict[str, Any]]) -> None:
        """Copies hyperparameters from the outer groups to the inner ones, or back."""
        for given, taken in zip(source, sink, strict=True):
            taken.update(_options(given))

    @property
    def _flat(self) -> list[Target]:
        return [target for group in self._targets for target in group]

    # stepping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's pieces, and starts bringing them to the other ranks. A collective call of all ranks.

        ``closure``, if given, is called first, with gradients enabled, and its loss returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number, self._steps = self._steps, self._steps + 1
        with torch.no_grad():
            broken = self._broken_ranks() if self._precision is not None else ()
            if broken:
                self._skip(number, broken)
            else:
                self._step()
        return loss

    def _step(self) -> None:
        assert self._inner is not None
        self._store.settle()  # what the step before has sent may still be on its way
        targets = self._flat
        stepped = [target for target in targets if target.take_gradient()]
        self._wait()
        self._exchange(self.param_groups, self._inner.param_groups)
        self._inner.step()
        self._exchange(self._inner.param_groups, self.param_groups)  # some optimizers keep numbers in their groups
        for target in targets:
            target.tensor.grad = None
        for target in stepped:
            target.write_back()
        self._wait()
        for claim in self._claims:
            self._store.publish(claim)

    def _wait(self) -> None:
        """Until copies to and from the CPU are done."""
        if self._offload and self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()

    def _broken_ranks(self) -> tuple[int, ...]:
        """The ranks of the world whose gradients have an inf or nan, the same on all."""
        found = [local(g) for piece in self._store.pieces() if (g := gradient_of(piece)) is not None]
        largest = torch.nn.utils.get_total_norm([gradient for gradient in found if gradient.numel()], math.inf)
        flags = self._transport.gather_int("all", int(not math.isfinite(largest.item())))
        return tuple(rank for rank, flag in zip(self._transport.ranks("all"), flags, strict=True) if flag)

    def _skip(self, number: int, broken: Sequence[int]) -> None:
        self.skipped_steps += 1
        cause = self._cause()
        if self._transport.rank == 0 and (self.skipped_steps == 1 or cause):
            ranks = f"rank{'s' * (len(broken) > 1)} {', '.join(map(str, broken))}"
            warnings.warn(
                f"step {number} (from 0) was skipped on all ranks: the gradient on {ranks} has an inf or nan"
                f"{cause and f', for {cause}'}. Further ones are counted in optimizer.skipped_steps",
                RuntimeWarning,
                stacklevel=4,  # behind step() and torch's wrapper around it
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of its parameters, and those not summed yet along with them."""
        super().zero_grad(set_to_none or self._store.way.sharded)

    # state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: the state of each piece by name, ``"layer.weight[64:128]"`` where it is a slice.

        Ranks have the same name only for the same thing, so that torch.distributed.checkpoint can save all parts as
        one. A piece that was never stepped is there with a state to load into, and ``stepped`` False.
        """
        return {
            "state": {
                target.key: self._entry(group, target)
                for group, targets in zip(self.param_groups, self._targets, strict=True)
                for target in targets
            },
            "param_groups": [_options(group) for group in self.param_groups],
            "steps": self._steps,
            "skipped_steps": self.skipped_steps,
        }

    def _entry(self, group: Mapping[str, Any], target: Target) -> dict[str, Any]:
        state = self.state.get(target.tensor)
        entry = {**(state or self._blank(group, target)), "stepped": bool(state)}
        return {**entry, "master": target.tensor} if target.master else entry

    def _blank(self, group: Mapping[str, Any], target: Target) -> dict[str, Any]:
        """The state of a tensor like this one after a first step: what a loader needs to know of names and shapes."""
        scratch = torch.zeros_like(target.tensor)
        scratch.grad = torch.zeros_like(scratch)
        optimizer = self._cls([{**_options(group), "params": [scratch]}], **self._kw)
        with torch.no_grad():
            optimizer.step()
        return dict(optimizer.state[scratch])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads this rank's part: hyperparameters, state and masters, not parameters, which are the model's.

        Raises:
            CheckpointError: it does not fit; then nothing has been changed.
        """
        assert self._inner is not None
        saved, groups = self._checked(state_dict)
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        masters: list[tuple[Tensor, Tensor]] = []
        for group, targets in zip(self.param_groups, self._targets, strict=True):
            for target in targets:
                entry = _fitting(target.key, saved[target.key], self._entry(group, target))
                if target.master:
                    masters.append((target.tensor, entry.pop("master")))
                if entry.pop("stepped"):
                    state[target.tensor] = entry
        with torch.no_grad():
            for master, values in masters:
                master.copy_(values)
        self._inner.__setstate__({"state": state, "param_groups": self._inner.param_groups})
        self.state = self._inner.state
        self._exchange(copy.deepcopy(groups), self.param_groups)
        self._steps, self.skipped_steps = state_dict["steps"], state_dict["skipped_steps"]

    def _checked(self, state_dict: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
        lacking = [key for key in ("state", "param_groups", "steps", "skipped_steps") if key not in state_dict]
        if lacking:
            raise CheckpointError(f"the state dict has no {lacking[0]!r}; load what optimizer.state_dict() gave")
        saved, groups = state_dict["state"], list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise CheckpointError(
                f"the state dict has {len(groups)} parameter groups, this optimizer {len(self.param_groups)}"
            )
        keys = [target.key for target in self._flat]
        missing = [key for key in keys if key not in saved]
        if missing:
            raise CheckpointError(
                f"the state dict lacks {len(missing)} of the {len(keys)} pieces that this rank steps, first "
                f"{missing[0]!r}{nearest(missing[0], saved)}; load on as many ranks, and with the same zero= and groups"
            )
        unknown = [key for key in saved if key not in keys and str(key).partition("[")[0] not in self._all]
        if unknown:
            raise CheckpointError(f"the model has no {unknown[0]!r}{nearest(str(unknown[0]), keys)}")
        return saved, groups

    def reload(self, values: Mapping[str, Tensor] | None = None) -> None:
        """To be called after somebody has written parameters: masters follow them.

        ``values``: the parameters before they were rounded, by name. A master without one keeps its bits where it
        rounds to the parameter's value, so that optimizer and model may be loaded in any order.
        """
        with torch.no_grad():
            for target in self._flat:
                target.refresh(originals_of(values or {}, self._names[id(target.piece.parameter)]))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _tensors(targets: Iterable[Target]) -> list[Tensor]:
    return [target.tensor for target in targets]


def _fitting(key: str, saved: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a saved entry, where and of the types that this optimizer has its own."""
    if set(saved) != set(like):
        raise CheckpointError(
            f"{key} was saved with {', '.join(sorted(saved))}, this optimizer has {', '.join(sorted(like))}; "
            "load into the same class, with the same arguments"
        )
    entry: dict[str, Any] = {}
    for name, mine in like.items():
        value = saved[name]
        if not (isinstance(value, Tensor) and isinstance(mine, Tensor)):
            entry[name] = copy.deepcopy(value)
        elif value.shape != mine.shape:
            raise CheckpointError(
                f"{name} of {key} has shape {list(mine.shape)}, the state dict has {list(value.shape)}"
            )
        else:
            entry[name] = torch.empty_like(mine).copy_(value)
    return entry
