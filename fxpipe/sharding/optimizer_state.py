"""Optimizer state: a state dict in the form of torch's ``get_optimizer_state_dict``, whatever a rank has of the model.

``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], "lr": ...}]}`` with the plain model's names.
Ranks have the same name only for the same thing: torch.distributed.checkpoint merges by name. A slice of a parameter
has slices of its state, which are resharded; ``params`` name the whole model's, for one rank's list is what is kept.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError, RunError, nearest
from fxpipe.kinds import Expected, check, is_list, is_mapping, list_of, shown
from fxpipe.parameters.dtensors import is_dtensor, local
from fxpipe.sharding.parameter_groups import options_of
from fxpipe.sharding.slices import Slice, memory_order
from fxpipe.sharding.stepped_piece import Target
from fxpipe.torch_compat import pytree, version_of

OptimizerMaker = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, or what stands for one: ``cls(groups, **kw)``."""

MASTER = "master"
"""The key of a parameter in the type that it is stepped in."""

Entry = dict[str, Any]
"""What an optimizer keeps of one parameter, by its own keys."""


class Loaded(NamedTuple):
    """What a state dict has for a target. ``state``: None for one that was never stepped, and has none before it is."""

    state: Entry | None
    master: Tensor | None


class TargetStates:
    """The states of one optimizer's targets, as state dicts show them.

    ``make``: makes an optimizer of groups. ``masters``: whether parameters are stepped in a precision of their own.
    """

    def __init__(self, make: OptimizerMaker, masters: bool) -> None:
        self._make, self._masters = make, masters
        self._copies: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # masters that state dicts have copies of

    def show(self, name: str, state: Entry | None, options: Mapping[str, Any], target: Target) -> Entry:
        """A target's entry of a state dict: nothing where it is frozen and has never been stepped."""
        entry = dict(state or {})
        if not state and target.piece.parameter.requires_grad:
            entry = initial_state(self._make, options, target.tensor)
        if self._has_master(target):
            with torch.inference_mode(False):  # so that what is written is counted, see ``_is_unread``
                entry[MASTER] = target.tensor if target.master else target.tensor.detach().clone()
        entry = {
            key: pytree.tree_map_only(Tensor, lambda tensor: _shown(name, tensor, target), value)
            for key, value in entry.items()
        }
        if MASTER in entry and not target.master:
            self._copies[name] = weakref.ref(entry[MASTER]), _version_of(entry[MASTER])
        return entry

    def _has_master(self, target: Target) -> bool:
        return self._masters and target.tensor.is_floating_point()

    def load(
        self,
        name: str,
        saved: Mapping[str, Any],
        options: Mapping[str, Any],
        own: Mapping[str, Any],
        target: Target,
        lazy: bool,
    ) -> Loaded:
        """A copy of an entry, where and of the types that this optimizer has its own.

        ``options``: those that were saved. ``own``: this optimizer's, under which a checkpoint is asked for entries, so
        that it cannot have more. ``lazy``: whether the optimizer makes a target's state when it first steps it.
        """
        saved = {key: value for key, value in saved.items() if key != MASTER or not self._is_unread(name, value)}
        initial = initial_state(self._make, options, target.tensor)
        like = {**initial, MASTER: target.tensor} if self._has_master(target) else initial
        keys = saved.keys() - {MASTER}  # none where it was frozen
        fits = (
            keys == initial.keys() if keys else initial.keys() == initial_state(self._make, own, target.tensor).keys()
        )
        if not fits or MASTER in saved.keys() - like.keys():
            raise CheckpointError(
                f"{name} comes with {_listed(saved)}; under the options that were saved this optimizer needs "
                f"{_listed(like)}; make it of the same class, with the same arguments and precision=, and load again"
            )
        entry = {key: _taken(f"{key} of {name}", value, like[key], target) for key, value in saved.items()}
        master = entry.pop(MASTER, None)
        if lazy:
            return Loaded(None if not entry or is_initial(entry, initial) else entry, master)
        return Loaded(entry or initial, master)

    def _is_unread(self, name: str, value: Any) -> bool:
        """Whether this is a copy of a parameter that a state dict had, and nobody has written anything into it: the
        checkpoint had none (``allow_partial_load``), and the parameter may have been loaded since."""
        if name not in self._copies or not isinstance(value, Tensor):
            return False
        copied, version = self._copies[name]
        return copied() is value and _version_of(value) == version


def _version_of(value: Tensor) -> int:
    """How often a tensor, or this rank's part of it, has been written to."""
    return version_of(value.local if isinstance(value, Slice) else local(value))


def initial_state(make: OptimizerMaker, options: Mapping[str, Any], like: Tensor) -> Entry:
    """The state of a tensor like this one that has never been stepped, under the names that a first step gives it.

    Optimizers make their state in the first step, which for a gradient of 0 leaves zeros; what counts steps, or has
    decayed in it, is set back. What such a step draws, the random state does not show. Integers have none.
    """
    if not (like.is_floating_point() or like.is_complex()):
        return {}
    scratch = torch.zeros_like(like)
    optimizer = make([{**options, "params": [scratch]}])
    if not optimizer.state:
        zeros = torch.zeros_like(scratch)
        scratch.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros
        device = like.device
        with torch.no_grad(), torch.random.fork_rng(() if device.type == "cpu" else (device,), device_type=device.type):
            optimizer.step()
    state: Entry = dict(optimizer.state[scratch])
    starts = {"step": 0, "mu_product": 1, "eta": options.get("lr", optimizer.defaults.get("lr"))}  # NAdam's, ASGD's
    for key, value in starts.items():
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = value
    return state


def class_of(optimizer: str | OptimizerMaker) -> OptimizerMaker:
    """A class of torch.optim by its name, in any case, or what makes one as it is. RunError where it is none."""
    make: Any = optimizer
    if isinstance(optimizer, str):
        known = {name.lower(): one for name, one in vars(torch.optim).items() if _is_optimizer(one)}
        if optimizer.lower() not in known:
            raise RunError(f"optimizer is {shown(optimizer)}, which torch.optim has not{nearest(optimizer, known)}")
        make = known[optimizer.lower()]
    if not callable(make):
        raise RunError(f'optimizer is {shown(make)}; write a name such as "adamw", or a class of optimizers')
    return cast(OptimizerMaker, make)


def states_of(optimizer: str | OptimizerMaker) -> float:
    """How many numbers an optimizer keeps of each that it steps, counted on a matrix: Adam two.

    ``optimizer``: a class of torch.optim by its name, in any case, or what makes one. RunError where it is none.
    """
    make = class_of(optimizer)
    like = torch.zeros(64, 64)
    try:
        entry = initial_state(make, {}, like)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise RunError(f"optimizer={shown(make)} cannot step a matrix of zeros: {error}") from error
    kept = [leaf for leaf in pytree.tree_leaves(entry) if isinstance(leaf, Tensor) and leaf.ndim]
    return sum(leaf.nbytes for leaf in kept) / like.nbytes


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def is_initial(entry: Entry, initial: Entry) -> bool:
    """Whether a state is that of a parameter that was never stepped."""
    values, form = pytree.tree_flatten(entry)
    starts, wanted = pytree.tree_flatten(initial)
    return form == wanted and all(map(_equal, values, starts))


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and bool((value == other).all())
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and bool(value == other)


def _shown(name: str, value: Tensor, target: Target) -> Tensor:
    if target.whole or not value.ndim:
        return value
    if value.shape != target.tensor.shape:
        raise CheckpointError(
            f"the optimizer keeps a tensor of shape {list(value.shape)} for {name}, of which this rank steps "
            f"{len(target.tensor)} elements, so that it does not step each element by itself; make it with "
            "forward_backward.optimizer(..., elementwise=False)"
        )
    parameter = target.piece.parameter
    return Slice(value.view(-1), target.piece.start, parameter.shape, memory_order(parameter))


def _listed(entry: Mapping[str, Any]) -> str:
    return ", ".join(sorted(entry)) or "no state"


def _taken(what: str, value: Any, mine: Any, target: Target) -> Any:
    """The same for what an entry has under one key, which may be a list or dict of tensors."""
    values, form = pytree.tree_flatten(value)
    places, wanted = pytree.tree_flatten(mine)
    if form != wanted:
        places = [None] * len(values)
    return pytree.tree_unflatten([_one_taken(what, *pair, target) for pair in zip(values, places, strict=True)], form)


def _one_taken(what: str, value: Any, mine: Any, target: Target) -> Any:
    if isinstance(value, Slice) and not isinstance(mine, Tensor):
        mine = torch.empty_like(target.tensor, dtype=value.dtype)
    if not (isinstance(value, Tensor) and isinstance(mine, Tensor)):
        return copy.deepcopy(value)
    part = _part(value, mine, target)
    if part is None:
        whole = list(target.piece.parameter.shape if mine.ndim else mine.shape)
        raise CheckpointError(f"{what} has shape {whole}, the state dict has {_words(value)}")
    return torch.empty_like(mine).copy_(part)


def _words(value: Tensor) -> str:
    if isinstance(value, Slice):
        return f"elements {value.start} to {value.start + len(value.local)} of {list(value.shape)}"
    return str(list(value.shape))


def _part(value: Tensor, mine: Tensor, target: Target) -> Tensor | None:
    """What of a saved value this rank has; None where it does not fit."""
    if isinstance(value, Slice):
        fits = (value.start, value.local.shape) == (target.piece.start, mine.shape)
        return value.local if fits and value.shape == target.piece.parameter.shape else None
    if target.whole or not mine.ndim or is_dtensor(mine):
        return value if value.shape == mine.shape else None
    return target.part_of(value) if value.shape == target.piece.parameter.shape else None


def check_saves_all(optimizer: torch.optim.Optimizer) -> None:
    """CheckpointError where an optimizer keeps, or saves, more than it has by parameter and group."""
    foreign = next((key for key in optimizer.state if not isinstance(key, Tensor)), None)
    if foreign is not None:
        raise CheckpointError(
            f"the optimizer's state has {foreign!r}, which belongs to no parameter; keep it in its parameter groups"
        )
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return
    further = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    if further:
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() has {further[0]!r} beside 'state' and 'param_groups', which "
            "would be lost; keep it in the state of its parameters, or in its parameter groups"
        )


def read_state_dict(
    state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]], parameters: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The entries of a state dict by name, and its hyperparameters for groups of these names.

    CheckpointError where it does not fit a model of these parameters.
    """
    check(CheckpointError, _KINDS, state_dict=state_dict)
    lacking = [key for key in ("state", "param_groups") if key not in state_dict]
    if lacking:
        raise CheckpointError(f"the state dict has no {lacking[0]!r}; load what optimizer.state_dict() gave")
    check(CheckpointError, _KINDS, state=state_dict["state"], param_groups=state_dict["param_groups"])
    saved = state_dict["state"]
    options = group_options(state_dict["param_groups"], groups, lambda name: parameters[name].requires_grad)
    unknown = [name for name in saved if name not in parameters]
    if unknown:
        raise CheckpointError(f"the model has no {unknown[0]!r}{nearest(str(unknown[0]), list(parameters))}")
    return saved, options


def group_options(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]], trained: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """The hyperparameters saved for groups of these names, group by group; {} for a group that has no names.

    ``trained``: whether a parameter is; others need not have been saved.

    Raises:
        CheckpointError: a name was not saved, or names of one group were saved in several, or of several in one.
    """
    home: dict[str, int] = {}
    taken_by: dict[int, int] = {}
    for number, group in enumerate(saved):
        if not is_list(group.get("params", ())):
            raise CheckpointError(
                f"parameter group {number} of the state dict has params={shown(group['params'])}; {_SAVE}"
            )
        if "params" not in group:
            raise CheckpointError(f"parameter group {number} of the state dict has no 'params'; {_SAVE}")
        home |= dict.fromkeys(group["params"], number)
    found = []
    for number, names in enumerate(groups):
        missing = [name for name in names if name not in home and trained(name)]
        if missing:
            raise CheckpointError(
                f"the state dict's parameter groups lack {missing[0]!r}{nearest(missing[0], list(map(str, home)))}"
                + (f"; {_SAVE}" if any(isinstance(name, int) for name in home) else "")
            )
        homes = {home[name]: name for name in names if name in home}
        if len(homes) > 1:
            (one, first), (other, second) = list(homes.items())[:2]
            raise CheckpointError(
                f"parameter group {number} has {first!r} and {second!r}, which were saved in groups {one} and {other}; "
                "make the optimizer with the groups that it was saved with"
            )
        for one in homes:
            if taken_by.setdefault(one, number) != number:
                raise CheckpointError(
                    f"parameter groups {taken_by[one]} and {number} were saved as one, with the same options; "
                    "make the optimizer with the groups that it was saved with"
                )
        found.append(options_of(saved[next(iter(homes))]) if homes else {})
    return found


_KINDS = {
    "state_dict": Expected(is_mapping, "what optimizer.state_dict() gave"),
    "state": Expected(
        lambda value: is_mapping(value) and all(map(is_mapping, value.values())), "a dict parameter name -> its state"
    ),
    "param_groups": Expected(list_of(is_mapping), "a list of dicts"),
}
_SAVE = 'save {"model": forward_backward, "optim": optimizer}, or a plain one by torch\'s get_optimizer_state_dict'


def refuse_torchs_helpers() -> None:
    """CheckpointError where torch's get_state_dict or set_state_dict asks an optimizer for its state.

    They take the keys of ``state`` for numbers of parameters, and would give names to other parameters' state.
    """
    if sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        raise CheckpointError(
            "this optimizer's state dict bears the plain model's names already; write "
            'dcp.save({"model": forward_backward, "optim": optimizer}), and dcp.load with the same'
        )
