"""Optimizer state: the tensors that an optimizer steps, and their saved state, for any sharding of the model.

State dicts have the form of torch's ``get_optimizer_state_dict``:
``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], "lr": ...}]}`` with the plain model's names.
Ranks use a name for a single object only: torch.distributed.checkpoint merges by name. A slice of a parameter has
slices of its state, which can be resharded; ``params`` lists the whole model's names, since a rank's list is saved.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError, RunError, nearest
from fxpipe.precision import Precision, merged
from fxpipe.sharding.gradients import Piece
from fxpipe.sharding.optimizer_class import Entry
from fxpipe.sharding.parameter_groups import options_of
from fxpipe.tensors.dtensors import is_dtensor, local
from fxpipe.tensors.pieces import Slice, in_parts, is_parts, memory_order, out_of_parts
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.tensors import storage_id
from fxpipe.validation import Expected, check, is_list, is_mapping, list_of


class Target:
    """``tensor``: the tensor that an optimizer steps for a parameter. ``is_copy``: it is a copy of another dtype or
    device, to be written back. ``saves_master``: a state dict has its values, since the parameter may be rounded.

    ``original``: the parameter before rounding. ``offload``: the optimizer steps a copy on the CPU. ``sharded``: ranks
    step parts, so that the step does not use ``parameter.grad``.
    """

    def __init__(
        self, piece: Piece, original: Tensor | None, precision: Precision | None, offload: bool, sharded: bool
    ) -> None:
        self.piece, data = piece, piece.data
        self.saves_master = precision is not None and data.is_floating_point()
        dtype = precision.master if precision is not None and self.saves_master else data.dtype
        self.is_copy = offload or dtype != data.dtype
        self.tensor: Tensor = piece.parameter if precision is None and not sharded else data
        self._values = data  # the parameter's values on the copy's device: pinned memory on the CPU
        if self.is_copy:
            self.tensor = torch.empty_like(data, dtype=dtype, device="cpu" if offload else data.device)
            with torch.no_grad():
                self.tensor.copy_(data if original is None else piece.part_of(original))
                self.refresh(None)  # take the parameter's value if it was written since the rounding

    @property
    def whole(self) -> bool:
        """Whether this rank steps the whole parameter, in its own shape."""
        return self.tensor.shape == self.piece.parameter.shape

    def in_parts(self, value: Any, what: str) -> Any:
        """Returns a state value in the form of a checkpoint."""
        begin = self.piece.start
        return in_parts(value, what, "" if self.whole else f" {begin}:{begin + self.tensor.numel()}")

    def fetch(self) -> Tensor | None:
        """Starts copying the parameter and its gradient to the device of the step; returns the gradient's copy. On the
        CPU the copies are complete after a wait for the stream.

        RunError if the parameter was given other memory, which neither ``write_back`` nor the transfers to other ranks
        would reach.
        """
        if self.tensor is self.piece.parameter:
            return self.tensor.grad
        if storage_id(local(self.piece.parameter)) != storage_id(self.piece.data):
            raise RunError(
                f"{self.piece.name} was given other memory, as by parameter.data = ..., and the optimizer steps what "
                "it had; write into it, as parameter.data.copy_(...) does"
            )
        self._values = self.piece.data.to(self.tensor.device, non_blocking=True)
        gradient = self.piece.current_gradient()
        return None if gradient is None else gradient.to(self.tensor.device, non_blocking=True)

    def take(self, gradient: Tensor | None) -> bool:
        """Updates the copy with values that the user has written into the parameter since the last step. Sets the
        stepped tensor's ``.grad`` to ``fetch``'s result; returns whether there is a gradient."""
        if self.tensor is not self.piece.parameter:
            if self.is_copy:
                self._merge(self._values)
            self.tensor.grad = None if gradient is None else gradient.to(self.tensor.dtype)
        return gradient is not None

    def drop_gradient(self) -> None:
        """Drops the gradient that ``take`` has set; a parameter that is stepped itself keeps its gradient."""
        if self.tensor is not self.piece.parameter:
            self.tensor.grad = None

    def write_back(self) -> None:
        """Writes the stepped copy to the parameter's memory."""
        if not self.is_copy:
            return
        self._values.copy_(self.tensor)
        if self._values is not self.piece.data:
            # torch keeps pinned memory until the device has read it; the next step uses other memory
            self.piece.data.copy_(self._values, non_blocking=True)
            self._values = self.piece.data

    def refresh(self, original: Tensor | None) -> None:
        """Sets the copy to ``original``, or to the parameter's value if None. Elements that round to the new value keep
        their bits, so that rounded values do not overwrite exact values that were loaded before."""
        if self.is_copy:
            self._merge(self.piece.data if original is None else self.piece.part_of(original))

    def _merge(self, values: Tensor) -> None:
        self.tensor.copy_(merged(self.tensor, values.to(self.tensor.device), values.dtype))


def originals_of(originals: Mapping[str, Tensor], names: list[str]) -> Tensor | None:
    """Returns a parameter's original values, under any of its names; else None."""
    return next((originals[name] for name in names if name in originals), None)


def cut_to_fit(entry: Entry, target: Target, own_types: Callable[[], Mapping[str, torch.dtype]]) -> None:
    """Cuts the optimizer's values in an entry that the user has made like the parameter, for the stepped tensor.

    ``own_types``: returns the keys of the tensors that the optimizer keeps, and their types for a parameter in float32.
    """
    stepped, parameter = target.tensor, target.piece.parameter
    for key, value in entry.items() if stepped is not parameter else ():
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            continue
        other_type = value.dtype == parameter.dtype != stepped.dtype
        other_device = value.device == parameter.device != stepped.device
        if (other_type or other_device or value.shape != stepped.shape) and key in own_types():
            dtype = stepped.dtype if own_types()[key] == torch.float32 else value.dtype
            is_shard = is_dtensor(value) and not is_dtensor(stepped)
            part = local(value).view(-1) if is_shard else target.piece.part_of(value)
            entry[key] = part.to(stepped.device, dtype, copy=True)


MASTER = "master"
"""The key of the master copy, which has the dtype of the step, in an entry."""


def entry_to_save(name: str, entry: Entry, target: Target) -> Entry:
    """Returns a target's state dict entry from the optimizer's entry. Parts become ``Slice``s, and tensor subclasses
    their checkpoint form."""
    if target.saves_master:
        entry = {**entry, MASTER: target.tensor if target.is_copy else target.tensor.detach().clone()}
    shown = pytree.tree_map_only(Tensor, lambda tensor: _shown(name, tensor, target), dict(entry))
    return dict(target.in_parts(shown, name))


def entry_to_load(name: str, saved: Entry, initial: Entry, expected: Entry, target: Target, copies: bool) -> Entry:
    """Returns a saved entry, on the devices and in the dtypes of this optimizer's state; unless ``copies``, with the
    saved tensors themselves where they fit.

    ``initial``: the initial state under the saved options. ``expected``: the initial state under this optimizer's
    present options, which determine the keys that are read from a checkpoint.
    """
    # A parameter that was frozen when saved has no state, and starts with the initial state.
    like = {**initial, MASTER: target.tensor} if target.saves_master else initial
    keys = saved.keys() - {MASTER}
    # A saved entry may have more keys than a first step with zeros makes.
    fits = keys >= initial.keys() > set() if keys else expected.keys() == initial.keys()
    if not fits or MASTER in saved.keys() - like.keys():
        raise CheckpointError(
            f"{name} comes with {_listed(saved)}; under the options that were saved this optimizer needs "
            f"{_listed(like)}; make it of the same class, with the same arguments and precision=, and load again"
        )
    return {key: _taken(f"{key} of {name}", value, like.get(key), target, copies) for key, value in saved.items()}


def _shown(name: str, value: Tensor, target: Target) -> Tensor:
    if target.whole or not value.ndim or hasattr(value, "__tensor_flatten__"):
        return value
    if value.shape != target.tensor.shape:
        raise CheckpointError(
            f"the optimizer keeps a tensor of shape {list(value.shape)} for {name}, and this rank steps "
            f"{len(target.tensor)} elements of it, so that it does not step each element by itself; make it with "
            "forward_backward.optimizer(..., elementwise=False)"
        )
    parameter = target.piece.parameter
    return Slice(value.view(-1), target.piece.start, parameter.shape, memory_order(parameter))


def _listed(entry: Mapping[str, Any]) -> str:
    return ", ".join(sorted(entry)) or "no state"


def _taken(what: str, value: Any, mine: Any, target: Target, copies: bool) -> Any:
    """Returns a value of a saved entry, which may be a list or dict of tensors."""
    value = target.in_parts(value, what)
    if pytree.tree_structure(value, is_parts) != pytree.tree_structure(mine):
        mine = pytree.tree_map(lambda _: None, value, is_leaf=is_parts)
    return pytree.tree_map(lambda part, own: _one_taken(what, part, own, target, copies), value, mine, is_leaf=is_parts)


def _one_taken(what: str, value: Any, mine: Any, target: Target, copies: bool) -> Any:
    parts = target.in_parts(mine, what)
    if is_parts(value) or is_parts(parts):
        if pytree.tree_structure(value) != pytree.tree_structure(parts):
            kinds = [list(each) if is_parts(each) else "a plain one" for each in (parts, value)]
            raise CheckpointError(f"{what} is {kinds[0]}, the state dict has {kinds[1]}; load it as it was saved")
        return out_of_parts(mine, value, what)
    # A list that grows with the steps may not yet have a tensor here to take the shape from.
    is_part = not target.whole and isinstance(value, Tensor) and value.ndim
    if is_part and not (isinstance(mine, Tensor) and mine.ndim):
        mine = torch.empty_like(target.tensor, dtype=value.dtype)
    if not (isinstance(value, Tensor) and isinstance(mine, Tensor)):
        return copy.deepcopy(value)
    part = _part(value, mine, target)
    if part is None:
        whole = list(target.piece.parameter.shape if mine.ndim else mine.shape)
        shape = value if isinstance(value, Slice) else list(value.shape)
        raise CheckpointError(f"{what} has shape {whole}, the state dict has {shape}")
    if part.shape != mine.shape:
        mine = torch.empty(part.shape, dtype=mine.dtype, device=target.tensor.device if part.ndim else mine.device)
    if not copies and (part.dtype, part.device) == (mine.dtype, mine.device):
        return part
    like = target.tensor if 0 in mine.stride() else mine  # elements of ``mine`` that share memory have no order
    return torch.empty_like(like, dtype=mine.dtype).copy_(part)


def _part(value: Tensor, mine: Tensor, target: Target) -> Tensor | None:
    """Returns this rank's part of a saved value; None if the value does not fit."""
    if isinstance(value, Slice):
        fits = (value.start, value.local.shape) == (target.piece.start, mine.shape)
        return value.local if fits and value.shape == target.piece.parameter.shape else None
    if not target.whole and value.ndim and not is_dtensor(mine):
        return target.piece.part_of(value) if value.shape == target.piece.parameter.shape else None
    # A tensor without its parameter's shape may have a shape that depends on values: take the saved shape.
    free = not value.ndim or (target.whole and mine.shape != target.tensor.shape)
    return value if value.shape == mine.shape or (free and not is_dtensor(target.tensor)) else None


def check_saves_all(optimizer: torch.optim.Optimizer) -> None:
    """CheckpointError if an optimizer keeps or saves state outside of its parameters and groups."""
    # torch keeps state by parameter. A key that is no parameter would not be saved, and its value lost.
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
    """Returns a state dict's entries by name, and its hyperparameters for groups of these names; {} for an empty group.

    Raises:
        CheckpointError: the state dict is of another model; a name was not saved; or a group has names of several saved
            groups, or several groups have names of the same saved group.
    """
    check(CheckpointError, {"state_dict": _STATE_DICT}, state_dict=state_dict)
    entries, saved = state_dict["state"], state_dict["param_groups"]
    # A group takes the options of the saved group that has its names. Two groups cannot share a saved group.
    home = {name: number for number, group in enumerate(saved) for name in group["params"]}
    taken_by: dict[int, int] = {}
    options: list[dict[str, Any]] = []
    for number, names in enumerate(groups):
        # A frozen parameter need not have been saved.
        missing = [name for name in names if name not in home and parameters[name].requires_grad]
        if missing:
            raise CheckpointError(
                f"the state dict's parameter groups lack {missing[0]!r}{nearest(missing[0], home)}; {_SAVE}"
            )
        homes = {home[name]: name for name in names if name in home}
        if len(homes) > 1 or any(taken_by.setdefault(home_group, number) != number for home_group in homes):
            raise CheckpointError(
                f"parameter group {number} has {' and '.join(homes.values())}, of the groups {list(homes)} that were "
                "saved, and each of these belongs to one; make the optimizer with the groups that it was saved with"
            )
        options.append(options_of(saved[next(iter(homes))]) if homes else {})
    unknown = [name for name in entries if name not in parameters]
    if unknown:
        raise CheckpointError(f"the model has no {unknown[0]!r}{nearest(str(unknown[0]), list(parameters))}")
    return entries, options


_SAVE = 'save {"model": forward_backward, "optim": optimizer}, or a plain one by torch\'s get_optimizer_state_dict'
_are_groups = list_of(lambda value: is_mapping(value) and is_list(value.get("params")))
_STATE_DICT = Expected(
    lambda value: (
        is_mapping(value)
        and is_mapping(value.get("state"))
        and all(map(is_mapping, value["state"].values()))
        and _are_groups(value.get("param_groups"))
    ),
    "what optimizer.state_dict() gave",
)


def refuse_torchs_helpers() -> None:
    """CheckpointError if torch's get_state_dict or set_state_dict reads an optimizer's state.

    These functions take the keys of ``state`` for parameter numbers, and would assign states to wrong names.
    """
    if sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        raise CheckpointError(
            "this optimizer's state dict bears the plain model's names already; write "
            'dcp.save({"model": forward_backward, "optim": optimizer}), and dcp.load with the same'
        )
