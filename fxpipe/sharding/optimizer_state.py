"""Optimizer state: a state dict in the form of torch's ``get_optimizer_state_dict``, whatever a rank has of the model.

``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], "lr": ...}]}`` with the plain model's names.
Ranks have the same name only for the same thing: torch.distributed.checkpoint merges by name. A slice of a parameter
has slices of its state, which are resharded; ``params`` name the whole model's, for one rank's list is what is kept.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError, nearest
from fxpipe.parameters.dtensors import is_dtensor
from fxpipe.sharding.parameter_groups import options_of
from fxpipe.sharding.slices import Slice, memory_order
from fxpipe.sharding.stepped_piece import Target
from fxpipe.torch_compat import pytree

MASTER = "master"
"""The key of a parameter in the type that it is stepped in."""

Entry = dict[str, Any]
"""What an optimizer keeps of one parameter, by its own keys."""


def initial_state(cls: Callable[..., Any], kw: Mapping[str, Any], options: Mapping[str, Any], like: Tensor) -> Entry:
    """The state of a tensor like this one that has never been stepped, under the names that a first step gives it.

    Optimizers make their state in the first step, which for a gradient of 0 leaves zeros; what counts steps, or has
    decayed in it, is set back. What such a step draws, the random state does not show. Integers have none.
    """
    if not (like.is_floating_point() or like.is_complex()):
        return {}
    scratch = torch.zeros_like(like)
    optimizer = cls([{**options, "params": [scratch]}], **kw)
    if not optimizer.state:
        zeros = torch.zeros_like(scratch)
        scratch.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros
        device = like.device
        with torch.no_grad(), torch.random.fork_rng(() if device.type == "cpu" else (device,), device_type=device.type):
            optimizer.step()
    state: Entry = dict(optimizer.state[scratch])
    for key, value in {"step": 0, "mu_product": 1, "eta": options.get("lr")}.items():  # the last two: NAdam, ASGD
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = value
    return state


def is_initial(entry: Entry, initial: Entry) -> bool:
    """Whether a state is that of a parameter that was never stepped."""
    values, form = pytree.tree_flatten(entry)
    starts, wanted = pytree.tree_flatten(initial)
    return form == wanted and all(map(_equal, values, starts))


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and bool((value == other).all())
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and bool(value == other)


def shown(name: str, entry: Entry, target: Target) -> Entry:
    """An entry for a state dict: what has a slice's elements becomes a slice of the whole."""
    return {
        key: pytree.tree_map_only(Tensor, lambda tensor: _shown(name, tensor, target), value)
        for key, value in entry.items()
    }


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


def taken(name: str, saved: Mapping[str, Any], like: Entry, asked: Entry, target: Target) -> Entry:
    """A copy of a saved entry, where and of the types that this optimizer has its own.

    ``like``: an entry under the options that were saved. ``asked``: under the optimizer's own, which are what a
    checkpoint is asked for, so that it cannot have more.
    """
    keys = set(saved) - {MASTER}  # none where it was frozen
    wrong = keys != set(like) - {MASTER} if keys else set(like) != set(asked)
    if wrong or MASTER in set(saved) - set(like):
        raise CheckpointError(
            f"{name} comes with {_listed(saved)}; under the options that were saved this optimizer needs "
            f"{_listed(like)}; make it of the same class, with the same arguments and precision=, and load again"
        )
    return {key: _taken(f"{key} of {name}", value, like[key], target) for key, value in saved.items()}


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
