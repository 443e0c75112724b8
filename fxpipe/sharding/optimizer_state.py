"""Optimizer state: a state dict in the form of torch's ``get_optimizer_state_dict``, whatever a rank has of the model.

``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], "lr": ...}]}`` with the plain model's names.
Ranks have the same name only for the same thing: torch.distributed.checkpoint merges by name. A slice of a parameter
has slices of its state, which are resharded; ``params`` name the whole model's, for one rank's list is what is kept.
"""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError, nearest
from fxpipe.parameters.dtensors import is_dtensor, local
from fxpipe.sharding.optimizer_class import Entry, OptimizerMaker, initial_state, is_initial
from fxpipe.sharding.parameter_groups import options_of
from fxpipe.sharding.stepped_piece import Target
from fxpipe.torch_compat import TO_COPY, plain_results, pytree, version_of, wrapper
from fxpipe.validation import Expected, check, is_list, is_mapping, list_of, shown

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


MASTER = "master"
"""The key of a parameter in the type that it is stepped in."""


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

    def show(self, name: str, state: Entry | None, options: Mapping[str, Any], target: Target, wanted: bool) -> Entry:
        """A target's entry of a state dict: nothing where it is frozen and has never been stepped, unless it is
        ``wanted`` to be filled."""
        entry = dict(state or {})
        if not state and (wanted or target.piece.parameter.requires_grad):
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


class Box(NamedTuple):
    """A part of a tensor: where it begins, and how long it is, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements ``start`` to ``stop`` of a row-major tensor as boxes, each of them a run, in this order.

    >>> boxes((4, 3), 2, 10)
    [Box(offsets=(0, 2), sizes=(1, 1)), Box(offsets=(1, 0), sizes=(2, 3)), Box(offsets=(3, 0), sizes=(1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    length = math.prod(shape[1:])
    first, last = -(-start // length), stop // length  # the whole rows
    if first > last:
        return _in_row(shape, last, start - last * length, stop - last * length)
    found = _in_row(shape, first - 1, start - (first - 1) * length, length) if start < first * length else []
    if first < last:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + _in_row(shape, last, 0, stop - last * length)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes(shape[1:], start, stop)]


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """A dense tensor's dimensions from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))


class Slice(Tensor):
    """One rank's run of elements of a tensor that has the shape ``shape`` as a whole.

    ``local``: the elements from ``start`` on, 1-dimensional. They count in the order of memory: ``order`` names the
    dimensions from the outermost in memory to the innermost, (0, 1, …) for a contiguous tensor.

    torch.distributed.checkpoint saves and loads it by its boxes, so that ranks that cut the tensor otherwise, or not
    at all, read their own part of it. Beyond that it can be copied and moved; calculate with ``local``.
    """

    local: Tensor
    start: int
    order: tuple[int, ...]

    def __new__(cls, local: Tensor, start: int, shape: Sequence[int], order: Sequence[int]) -> Slice:
        made: Slice = wrapper(cls, shape, local.dtype, local.device)
        made.local, made.start, made.order = local, start, tuple(order)
        return made

    __torch_function__ = plain_results

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        copied = _COPIES.get(func)
        if copied is None:
            raise NotImplementedError(
                f"{func} on a slice of a tensor of shape {list(args[0].shape)}, of which this rank has only a part; "
                "write .local"
            )
        return copied(*args, **(kwargs or {}))

    def alike(self, local: Tensor) -> Slice:
        """The same elements with other values."""
        return Slice(local, self.start, self.shape, self.order)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slice({list(self.shape)}, elements {self.start} to {self.start + len(self.local)}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Slice, (self.local, self.start, tuple(self.shape), self.order)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slice:
        return self.alike(self.local.clone())

    # what torch.distributed.checkpoint asks of a tensor that it does not know

    def _boxes(self) -> list[Box]:
        stored = [self.shape[dim] for dim in self.order]
        return boxes(stored, self.start, self.start + len(self.local))

    def _logical(self, numbers: Sequence[int]) -> torch.Size:
        """Offsets or sizes of a box, by the tensor's own dimensions."""
        return torch.Size(numbers[self.order.index(dim)] for dim in range(self.ndim))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(self._logical(box.offsets), self._logical(box.sizes)) for box in self._boxes()]

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        begin = 0
        for box in self._boxes():
            end = begin + math.prod(box.sizes)
            if index.offset is not None and self._logical(box.offsets) == index.offset:
                stored = self.local[begin:end].view(box.sizes)
                return stored.permute([self.order.index(dim) for dim in range(self.ndim)])
            begin = end
        raise ValueError(f"{index} is no box of {self!r}")


def _copy_into(target: Slice, source: Slice, non_blocking: bool = False) -> Slice:
    if not isinstance(source, Slice) or (source.start, source.shape) != (target.start, target.shape):
        raise NotImplementedError(f"{target!r} takes the values of the same slice alone; write .local")
    target.local.copy_(source.local, non_blocking=non_blocking)
    return target


def _new_empty(one: Slice, size: Sequence[int], **kwargs: Any) -> Tensor:
    """A place for a copy, where it has the same shape; torch's staging fills it by its attributes."""
    if tuple(size) == tuple(one.shape):
        return one.alike(one.local.new_empty(one.local.shape, **kwargs))
    return one.local.new_empty(size, **kwargs)


_COPIES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.detach.default: lambda one: one.alike(one.local.detach()),
    torch.ops.aten.clone.default: lambda one, **kwargs: one.alike(one.local.clone()),
    TO_COPY: lambda one, **kwargs: one.alike(
        one.local.to(**{key: value for key, value in kwargs.items() if key != "memory_format"}, copy=True)
    ),
    torch.ops.aten.empty_like.default: lambda one, **kwargs: one.alike(
        torch.empty_like(one.local, **{key: value for key, value in kwargs.items() if key != "memory_format"})
    ),
    torch.ops.aten.new_empty.default: _new_empty,
    torch.ops.aten.copy_.default: _copy_into,
}
"""What a checkpoint does with tensors on its way to a file."""

torch.serialization.add_safe_globals([Slice])  # so that torch.load reads what torch.save has written
