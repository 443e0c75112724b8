"""Optimizer state: what an optimizer steps of a parameter, and what is saved of it, whatever a rank has of the model.

State dicts have the form of torch's ``get_optimizer_state_dict``:
``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], "lr": ...}]}`` with the plain model's names.
Ranks have the same name only for the same thing: torch.distributed.checkpoint merges by name. A slice of a parameter
has slices of its state, which are resharded; ``params`` name the whole model's, for one rank's list is what is kept.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError, RunError, nearest
from fxpipe.parameters.checkpoint.plain import in_parts, is_parts, out_of_parts
from fxpipe.parameters.dtensors import is_dtensor, local
from fxpipe.precision import Precision, merged
from fxpipe.sharding.gradients import Piece
from fxpipe.sharding.optimizer_class import Entry
from fxpipe.sharding.parameter_groups import options_of
from fxpipe.torch_compat import TO_COPY, plain_results, pytree, storage_id, wrapper
from fxpipe.validation import Expected, check, is_list, is_mapping, list_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Target:
    """What an optimizer steps of a parameter: ``tensor``. ``is_copy``: it is one, of another type or on another device,
    to be written back. ``saves_master``: whether a state dict has its values, too, since parameters may be rounded.

    ``original``: the parameter before it was rounded. ``offload``: a copy on the CPU is stepped. ``sharded``: ranks
    step parts, so that ``parameter.grad`` is not what is stepped with.
    """

    def __init__(
        self, piece: Piece, original: Tensor | None, precision: Precision | None, offload: bool, sharded: bool
    ) -> None:
        self.piece, data = piece, piece.data
        self.saves_master = precision is not None and data.is_floating_point()
        dtype = precision.master if precision is not None and self.saves_master else data.dtype
        self.is_copy = offload or dtype != data.dtype
        self.tensor: Tensor = piece.parameter if precision is None and not sharded else data
        self._values = data  # of the parameter, where the copy is stepped: pinned memory on the CPU
        if self.is_copy:
            self.tensor = torch.empty_like(data, dtype=dtype, device="cpu" if offload else data.device)
            with torch.no_grad():
                self.tensor.copy_(data if original is None else piece.part_of(original))
                self.refresh(None)  # where the parameter has been written since, it counts

    @property
    def whole(self) -> bool:
        """Whether all of the parameter is stepped here, in its own shape."""
        return self.tensor.shape == self.piece.parameter.shape

    def in_parts(self, value: Any, what: str) -> Any:
        """Its state as a checkpoint has it."""
        begin = self.piece.start
        return in_parts(value, what, "" if self.whole else f" {begin}:{begin + self.tensor.numel()}")

    def fetch(self) -> Tensor | None:
        """Starts copies of the parameter and of its gradient, which it returns, to where the copy is stepped. On the
        CPU they are there once the stream was waited for.

        RunError where the parameter has other memory by now, which ``write_back`` would not reach, nor the ranks that
        share it.
        """
        if self.tensor is self.piece.parameter:
            return self.tensor.grad
        if storage_id(local(self.piece.parameter.detach())) != storage_id(self.piece.data):
            raise RunError(
                f"{self.piece.name} was given other memory, as by parameter.data = ..., and the optimizer steps what "
                "it had; write into it, as parameter.data.copy_(...) does"
            )
        self._values = self.piece.data.to(self.tensor.device, non_blocking=True)
        gradient = self.piece.current_gradient()
        return None if gradient is None else gradient.to(self.tensor.device, non_blocking=True)

    def take(self, gradient: Tensor | None) -> bool:
        """A copy takes what somebody has written into the parameter by hand since the last step. Shows the optimizer
        the gradient, what ``fetch`` has returned, and says whether there is one."""
        if self.tensor is not self.piece.parameter:
            if self.is_copy:
                self._merge(self._values)
            self.tensor.grad = None if gradient is None else gradient.to(self.tensor.dtype)
        return gradient is not None

    def drop_gradient(self) -> None:
        """Lets go of what ``take`` has shown; a parameter keeps its own."""
        if self.tensor is not self.piece.parameter:
            self.tensor.grad = None

    def write_back(self) -> None:
        """The parameter's memory becomes what the optimizer has made of the master."""
        if not self.is_copy:
            return
        self._values.copy_(self.tensor)
        if self._values is not self.piece.data:
            # torch keeps pinned memory until the device has read it; the next step's is other memory
            self.piece.data.copy_(self._values, non_blocking=True)
            self._values = self.piece.data

    def refresh(self, original: Tensor | None) -> None:
        """The copy becomes ``original``, or the parameter's value where there is none; but it keeps its bits where
        they round to that, so that rounded values undo no exact ones that were loaded before."""
        if self.is_copy:
            self._merge(self.piece.data if original is None else self.piece.part_of(original))

    def _merge(self, values: Tensor) -> None:
        self.tensor.copy_(merged(self.tensor, values.to(self.tensor.device), values.dtype))


def originals_of(originals: Mapping[str, Tensor], names: list[str]) -> Tensor | None:
    """A parameter's values, under any of its names."""
    return next((originals[name] for name in names if name in originals), None)


MASTER = "master"
"""The key of a parameter in the type that it is stepped in."""


def entry_to_save(name: str, entry: Entry, target: Target) -> Entry:
    """A target's entry in a state dict, made of the entry that the optimizer keeps. Parts become ``Slice``s, and tensor
    subclasses what a checkpoint has of them."""
    if target.saves_master:
        entry = {**entry, MASTER: target.tensor if target.is_copy else target.tensor.detach().clone()}
    shown = pytree.tree_map_only(Tensor, lambda tensor: _shown(name, tensor, target), dict(entry))
    return dict(target.in_parts(shown, name))


def entry_to_load(name: str, saved: Mapping[str, Any], initial: Entry, asked: Entry, target: Target) -> Entry:
    """A copy of a saved entry, where and of the types that this optimizer has its own.

    ``initial``: the state that the saved options ask for. ``asked``: that of this optimizer's own options, under which
    a checkpoint is asked for entries, so that it cannot have more.
    """
    # A parameter that was frozen when it was saved has no state, and begins anew.
    like = {**initial, MASTER: target.tensor} if target.saves_master else initial
    keys = saved.keys() - {MASTER}
    # There may be more than a first step makes of zeros.
    fits = keys >= initial.keys() > set() if keys else asked.keys() == initial.keys()
    if not fits or MASTER in saved.keys() - like.keys():
        raise CheckpointError(
            f"{name} comes with {_listed(saved)}; under the options that were saved this optimizer needs "
            f"{_listed(like)}; make it of the same class, with the same arguments and precision=, and load again"
        )
    return {key: _taken(f"{key} of {name}", value, like.get(key), target) for key, value in saved.items()}


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


def _taken(what: str, value: Any, mine: Any, target: Target) -> Any:
    """The same for the value under one key of an entry, which may be a list or dict of tensors."""
    value = target.in_parts(value, what)
    if pytree.tree_structure(value, is_parts) != pytree.tree_structure(mine):
        mine = pytree.tree_map(lambda _: None, value, is_leaf=is_parts)
    return pytree.tree_map(lambda one, place: _one_taken(what, one, place, target), value, mine, is_leaf=is_parts)


def _one_taken(what: str, value: Any, mine: Any, target: Target) -> Any:
    parts = target.in_parts(mine, what)
    if is_parts(value) or is_parts(parts):
        if pytree.tree_structure(value) != pytree.tree_structure(parts):
            kinds = [list(each) if is_parts(each) else "a plain one" for each in (parts, value)]
            raise CheckpointError(f"{what} is {kinds[0]}, the state dict has {kinds[1]}; load it as it was saved")
        return out_of_parts(mine, value, what)
    # A list that grows with the steps has no tensor here yet to say the shape.
    is_part = not target.whole and isinstance(value, Tensor) and value.ndim
    if is_part and not (isinstance(mine, Tensor) and mine.ndim):
        mine = torch.empty_like(target.tensor, dtype=value.dtype)
    if not (isinstance(value, Tensor) and isinstance(mine, Tensor)):
        return copy.deepcopy(value)
    part = _part(value, mine, target)
    if part is None:
        whole = list(target.piece.parameter.shape if mine.ndim else mine.shape)
        found = value if isinstance(value, Slice) else list(value.shape)
        raise CheckpointError(f"{what} has shape {whole}, the state dict has {found}")
    if part.shape != mine.shape:
        mine = torch.empty(part.shape, dtype=mine.dtype, device=target.tensor.device if part.ndim else mine.device)
    return torch.empty_like(mine).copy_(part)


def _part(value: Tensor, mine: Tensor, target: Target) -> Tensor | None:
    """This rank's part of a saved value; None where it does not fit."""
    if isinstance(value, Slice):
        fits = (value.start, value.local.shape) == (target.piece.start, mine.shape)
        return value.local if fits and value.shape == target.piece.parameter.shape else None
    if not target.whole and value.ndim and not is_dtensor(mine):
        return target.piece.part_of(value) if value.shape == target.piece.parameter.shape else None
    # What has not its parameter's shape may have one that depends on values: that which was saved.
    free = not value.ndim or (target.whole and mine.shape != target.tensor.shape)
    return value if value.shape == mine.shape or (free and not is_dtensor(target.tensor)) else None


def check_saves_all(optimizer: torch.optim.Optimizer) -> None:
    """CheckpointError where an optimizer keeps, or saves, more than it has by parameter and group."""
    # torch keeps state by parameter. A key that is none would be saved under no parameter's name, and be lost.
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
    """The entries of a state dict by name, and its hyperparameters for groups of these names; {} for an empty group.

    Raises:
        CheckpointError: it is of another model; a name was not saved; or names of one group were saved in several, or
            of several in one.
    """
    check(CheckpointError, {"state_dict": _STATE_DICT}, state_dict=state_dict)
    entries, saved = state_dict["state"], state_dict["param_groups"]
    # A group takes the options of the one saved group that has its names. No saved group goes to two.
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
        if len(homes) > 1 or any(taken_by.setdefault(one, number) != number for one in homes):
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
    if not shape:
        return [Box((), ())] * (start < stop)
    lengths = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # of a row, in elements
    found = []
    while start < stop:
        # Whole rows of the outermost dimension in which one begins here: as many as end before the run, and in one row
        # of the dimension outside of it.
        offsets = tuple(start // length % size for length, size in zip(lengths, shape, strict=True))
        dim, length = next(one for one in enumerate(lengths) if start % one[1] == 0 and start + one[1] <= stop)
        rows = min((stop - start) // length, shape[dim] - offsets[dim])
        found.append(Box(offsets, (*[1] * dim, rows, *shape[dim + 1 :])))
        start += rows * length
    return found


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
        """What a checkpoint does with tensors on its way to a file."""
        # Copies of the local part alone: whatever else torch computes would need the whole tensor, and is refused.
        one, *others = args
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "memory_format"}
        if func in _COPIES:
            return one.alike(func(one.local, **kwargs))
        if func is torch.ops.aten.new_empty.default and tuple(others[0]) == tuple(one.shape):
            return one.alike(one.local.new_empty(one.local.shape, **kwargs))  # torch's staging fills it
        source = others[0] if func is torch.ops.aten.copy_.default else None
        if not isinstance(source, Slice) or (source.start, source.shape) != (one.start, one.shape):
            raise NotImplementedError(f"{func} on {one!r}, a part of a tensor; write .local")
        one.local.copy_(source.local, *others[1:])
        return one

    def alike(self, local: Tensor) -> Slice:
        """The same elements with other values."""
        return Slice(local, self.start, self.shape, self.order)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slice({list(self.shape)}, elements {self.start} to {self.start + len(self.local)}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Slice, (self.local, self.start, tuple(self.shape), self.order)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slice:
        return self.alike(self.local.clone())

    # What torch.distributed.checkpoint asks of a tensor subclass (its _Checkpointable): boxes to save and to fill.

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
        # Boxes follow each other in memory, so each is a view of the next elements.
        begin = 0
        for box in self._boxes():
            end = begin + math.prod(box.sizes)
            if index.offset is not None and self._logical(box.offsets) == index.offset:
                stored = self.local[begin:end].view(box.sizes)
                return stored.permute([self.order.index(dim) for dim in range(self.ndim)])
            begin = end
        raise ValueError(f"{index} is no box of {self!r}")


_COPIES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.empty_like.default,
    TO_COPY,
}

torch.serialization.add_safe_globals([Slice])  # so that torch.load reads what torch.save has written
