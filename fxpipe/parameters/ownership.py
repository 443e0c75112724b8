"""Ownership: which pipe rank holds which parameters and buffers, under the model's own names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxpipe.distributed.collective import Collective
from fxpipe.distributed.transport import Transport, broadcast, overwrite
from fxpipe.errors import CheckpointError, RunError, nearest
from fxpipe.graph.ranks import rank_count
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.stage.elsewhere import Elsewhere
from fxpipe.stage.with_loss import plain_model
from fxpipe.tensors.dtensors import check_fits, is_dtensor, local, part_of, whole_of
from fxpipe.tensors.pieces import pairs
from fxpipe.torch_compat.modules import undone_by_hooks
from fxpipe.torch_compat.tensors import plain_results
from fxpipe.validation import shown


@dataclass(frozen=True)
class Ownership:
    """``names[rank]``: the names of the tensors that a rank holds. ``tied``: ranks → names of tensors they share."""

    names: tuple[frozenset[str], ...]
    tied: Mapping[tuple[int, ...], tuple[str, ...]]

    def of(self, rank: int | None) -> frozenset[str]:
        """The names of the tensors that a rank holds; with None, for a process that plays every rank, all names."""
        return frozenset().union(*self.names) if rank is None else self.names[rank]


def ownership(graph: StageGraph) -> Ownership:
    """Assigns each tensor, with all its names, to the ranks whose stages use it; unused tensors to the first stage."""
    ranks = rank_count(graph.placement)
    aliases: dict[int, list[str]] = {}
    for name, tensor in all_tensors(graph.module).items():
        aliases.setdefault(id(tensor), []).append(name)
    owners: dict[int, set[int]] = {}
    for stage in graph:
        for tensor in stage.tensors.values():
            owners.setdefault(id(tensor), set()).update(graph.ranks(stage.index))
    names: list[set[str]] = [set() for _ in range(ranks)]
    tied: dict[tuple[int, ...], list[str]] = {}
    for key, group in aliases.items():
        # All names of a tensor go to all its owners, so that each rank finds the name that its stages use.
        holders = sorted(owners.get(key, graph.ranks(0)[:1]))
        for rank in holders:
            names[rank].update(group)
        if len(holders) > 1:
            tied.setdefault(tuple(holders), []).append(group[0])
    return Ownership(tuple(map(frozenset, names)), {holders: tuple(group) for holders, group in sorted(tied.items())})


_ORIGINAL, _HELD = "the model's part", "held as"
"""Attributes of a part, by names that no submodule can have. The second holds the part's id, which a copy lacks."""


def _reaches_nothing(name: str, instead: str) -> Any:
    """A method of ``nn.Module`` that raises RunError for a part that a rank holds."""
    original = getattr(nn.Module, name)

    @functools.wraps(original)
    def method(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_original(part):
            raise RunError(f"{name}() of forward_backward.module reaches nothing: its parts {instead}")
        return original(part, *args, **kwargs)

    return method


class _LooksLike(nn.Module):
    """For ``isinstance``, a part is of its original's class, as loops over ``modules()`` expect; the root is not."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[nn.Module]:  # type: ignore[override]
        return type(vars(self).get(_ORIGINAL, self)) if type(self) is _RankPart else type(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (type(self),), vars(self)  # the default's check compares __class__


class _RankPart(_LooksLike):
    """A part of ``RankModule`` that holds tensors of the stages. The part raises RunError for changes that the stages
    would not see. A copy of the part, such as for weight averaging, behaves like any module."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        vars(self).update({_ORIGINAL: original, _HELD: id(self)})

    apply = _reaches_nothing("apply", "hold this rank's tensors alone; call it on the model itself")

    def __getattr__(self, name: str) -> Any:
        """The original's plain attributes, such as ``in_features``, for reading."""
        original = vars(self).get(_ORIGINAL)
        # a model's own __getattr__ is not asked for a submodule: under Lightning it refuses metrics in a capture
        is_plain = original is not None and name[:2] != "__" and name not in original._modules
        found = getattr(original, name, None) if is_plain else None
        if found is None or isinstance(found, (Tensor, nn.Module)):
            return super().__getattr__(name)
        if callable(found):
            update = "; fxpipe.update_batch_norm(forward_backward, loader) is torch's update_bn"
            raise AttributeError(
                f"{name}() is not in forward_backward.module, which holds this rank's tensors; call it on the model "
                f"before fxpipe.compile{update * (name == 'reset_running_stats')}"
            )
        return found

    def __len__(self) -> int:
        return len(self._modules)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        """The rank's parts of a container, or their names in an ``nn.ModuleDict``."""
        return iter(self._modules if isinstance(self, nn.ModuleDict) else self._modules.values())

    @property
    def training(self) -> bool:
        """The mode of the model's own module, which a stage runs in."""
        return bool(vars(self)[_ORIGINAL].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if _ORIGINAL in vars(self):  # nn.Module.__init__ sets the mode, too
            vars(self)[_ORIGINAL].training = mode

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the model's own module, by its own method: a model may freeze some submodules."""
        vars(self)[_ORIGINAL].train(mode)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        own = self._parameters | self._buffers | self._modules
        if not _is_original(self) or own.get(name) is value:
            super().__setattr__(name, value)
            return
        if name in own:
            kind = "module" if name in self._modules else "tensor"
            raise RunError(
                f"{name} is set to another {kind} than the stages hold, and they would go on with the old one; change "
                "the model before fxpipe.compile, or write values into what there is: with torch.no_grad(): "
                "module.get_parameter(name).copy_(value), or get_buffer(name)"
            )
        if name != "training" and not name.startswith("_") and hasattr(vars(self)[_ORIGINAL], name):
            raise RunError(
                f"{name} is set in forward_backward.module, but stages use nothing of that but tensors; set it in the "
                "model that was given to fxpipe.compile"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if _is_original(self) and name in self._parameters | self._buffers | self._modules:
            raise RunError(
                f"{name} is what the stages hold, and they would go on with it; change the model before fxpipe.compile"
            )
        super().__delattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if _is_original(self):
            raise RunError("move or cast the model before fxpipe.compile; its stages hold these very tensors")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _is_original(part: nn.Module) -> bool:
    return vars(part).get(_HELD) == id(part)


for _hook in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
    _instead = "are never called; register it on the model that is given to fxpipe.compile, before"
    setattr(_RankPart, f"register_{_hook}", _reaches_nothing(f"register_{_hook}", _instead))


class RankModule(_RankPart):
    """One rank's part of a model: the parameters and buffers that the rank holds, under the model's own names.

    ``train()`` and ``eval()`` set the mode of the whole model, so that functional dropout follows. ``replica``: the
    replica's number, from 0; a checkpoint holds the buffers of replica 0.
    """

    def __init__(self, model: nn.Module, names: frozenset[str], replica: int = 0) -> None:
        super().__init__(model)
        for name in all_tensors(model):
            if name not in names:
                continue
            path, _, leaf = name.rpartition(".")
            home, original = _submodule(self, path), model.get_submodule(path)
            if leaf in original._parameters:
                home.register_parameter(leaf, original._parameters[leaf])
            else:
                persistent = leaf not in original._non_persistent_buffers_set
                home.register_buffer(leaf, original._buffers[leaf], persistent=persistent)
        parts = dict(self.named_modules())
        for path, original in model.named_modules():  # a part without tensors, such as dropout, is in its parent
            parent = parts.get(path.rpartition(".")[0])
            if path not in parts and parent is not None and not all_tensors(original):
                parts[path] = _submodule(self, path)
        if replica:
            self.register_state_dict_post_hook(mark_own_buffers)  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if assign and _is_original(self):
            raise RunError(
                "load_state_dict(assign=True) would put other tensors here than the stages hold; leave it out"
            )
        return super().load_state_dict(state_dict, strict, assign)


def _submodule(root: _RankPart, path: str) -> nn.Module:
    part: nn.Module = root
    for name in path.split(".") if path else ():
        if name not in part._modules:
            part.add_module(name, _RankPart(vars(part)[_ORIGINAL]._modules[name]))
        part = part.get_submodule(name)
    return part


def release(
    model: nn.Module,
    keep: frozenset[str],
    why: Mapping[str, str] = MappingProxyType({}),
    device: torch.device | None = None,
) -> None:
    """Replaces every parameter and buffer whose name is not in ``keep`` by an ``Elsewhere``, which has no memory.

    ``why``: name → error message for a use of its values. ``device``: replaces the meta device.
    """
    tensors = all_tensors(model)
    # A tensor is kept if any of its names is in keep: this rank may hold a tied tensor under another name.
    done = {id(tensor) for name, tensor in tensors.items() if name in keep or isinstance(tensor, Elsewhere)}
    empty: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in done | empty.keys():
            at = device if tensor.is_meta and device is not None else tensor.device
            empty[id(tensor)] = Elsewhere.in_place_of(tensor, why.get(name, f"{name} is held by another rank"), at)
    replace_tensors(model, empty)


def replace_tensors(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Replaces each parameter and buffer of the module by ``new[id(tensor)]``, in every submodule that holds it."""
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in list(table.items()):
                if id(tensor) in new:
                    setattr(submodule, name, new[id(tensor)])  # by its setter: nn.LSTM keeps a list as well


def why_elsewhere(graph: StageGraph, owners: Ownership) -> dict[str, str]:
    """Name → error message for a use of values that this rank does not hold; for every parameter and buffer."""
    tensors, why = all_tensors(graph.module), {}
    users: dict[int, list[str]] = {id(tensor): [] for tensor in tensors.values()}
    for stage in graph:
        for name in stage.tensors:
            users[id(tensors[name])].append(stage.name)
    for name, tensor in tensors.items():
        ranks = ", ".join(str(rank) for rank, own in enumerate(owners.names) if name in own)
        stages = ", ".join(users[id(tensor)]) or "none uses it"
        why[name] = f"{name} is held by pipe rank {ranks} (stage {stages}), {_NO_VALUES}"
    return why


_NO_VALUES = (
    "and this rank has no values of it. forward_backward(...) and .evaluate(...) run the model on all ranks; "
    "forward_backward.named_parameters() are what this rank holds, and .clip_grad_norm_(max_norm) clips the whole "
    "model; .state_dict(full=True) has all values, for model.save_pretrained(folder, state_dict=dict(...)), or for a "
    "plain model that generates; placement= puts stages that need each other's parameters on one rank"
)


def on_meta(tensor: Tensor) -> Tensor:
    """A plain meta tensor or parameter like ``tensor``, which may be a DTensor."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


# --- buffers that differ between replicas, such as BatchNorm's statistics; a checkpoint holds one replica's


def own_buffers(module: nn.Module, state: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The names in a state dict of ``module`` whose values differ between replicas: buffers that are not spread."""
    names = {prefix + name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name for name in names & state.keys() if not is_dtensor(state[name])}


class OwnBuffer(Tensor):
    """A buffer in the state dict of any replica but the first: the checkpoint holds the first replica's buffer.

    torch.distributed.checkpoint would take each buffer from the replica with the fewest bytes to write, so that a mean
    and its variance could be of different rows. For other code it is a tensor; results computed from it are plain.
    """

    __torch_function__ = plain_results

    def __create_write_items__(self, fqn: str, obj: Any) -> list[Any]:
        return []

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """An empty ``OwnBuffer``, which torch's staging and ``copy.deepcopy`` then fill."""
        return super().new_empty(*args, **kwargs).as_subclass(OwnBuffer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def mark_own_buffers(module: nn.Module, state: dict[str, Any], prefix: str = "", metadata: Any = None) -> None:
    """Turns the replica's own buffers in its state dict into ``OwnBuffer``s; for all replicas but the first."""
    for name in own_buffers(module, state, prefix):
        state[name] = state[name].as_subclass(OwnBuffer)


# --- state dicts in the plain model's own names; with zero=3 a rank holds shards, as DTensors


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, and the buffers that are saved, by each of their own names."""
    tensors = all_tensors(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf in module._non_persistent_buffers_set:
            tensors.pop(f"{path}.{leaf}".removeprefix("."), None)
    return tensors


def check_no_extra_state(model: nn.Module) -> None:
    """Raises RunError if a module has ``get_extra_state``: no rank owns such a state, and checkpoints would lose it."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name, cls = f"{path}._extra_state".removeprefix("."), type(module).__name__
            raise RunError(
                f"{name} is the state of {cls}.get_extra_state, and no rank would save it; keep it in a buffer, "
                f"or, if a resumed run may lose it, write {cls}.get_extra_state = torch.nn.Module.get_extra_state"
            )


def full_state_dict(
    model: nn.Module, mine: nn.Module, owners: Ownership, transport: Transport, device: torch.device
) -> dict[str, Tensor]:
    """The whole model's state dict, on every rank: each tensor comes from the first rank that holds it.

    A collective call of the pipe group; with shards, of all ranks. The tensors are on ``device``, except in a process
    that plays every rank.
    """
    own, whole = mine.state_dict(), dict[int, Tensor]()
    saved = saved_tensors(model) if transport.pipe_rank is not None else {}
    # forward may have given a buffer a shape that the other ranks do not know
    buffers = {name: tuple(like.shape) for name, like in saved.items() if not isinstance(like, nn.Parameter)}
    shapes = transport.gather("pipe", buffers) if transport.pipe_rank is not None else []
    # Broadcasts one tensor at a time, so that memory holds the result and at most one more tensor.
    for name, like in saved.items():
        if id(like) in whole:
            continue
        owner = next(rank for rank, names in enumerate(owners.names) if name in names)
        if transport.pipe_rank == owner:
            tensor = _whole(own[name], transport).to(device)
        elif (shape := shapes[owner].get(name, like.shape)) != like.shape:
            tensor = torch.empty(shape, dtype=like.dtype, device=device)
        else:
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        broadcast([tensor], transport, "pipe", owner)
        whole[id(like)] = nn.Parameter(tensor, False) if isinstance(like, nn.Parameter) else tensor
    # The model's own state_dict, since hooks of its modules may rename, split or join entries.
    replace_tensors(model, whole)
    try:
        state: dict[str, Tensor] = model.state_dict()
    finally:
        replace_tensors(model, {id(whole[id(like)]): like for like in saved.values()})
    if transport.data_rank:
        mark_own_buffers(model, state)
    return state


def _whole(tensor: Tensor, transport: Transport) -> Tensor:
    """A shard's full tensor; a collective call of the ranks that hold the shards.

    ``full_tensor`` is not used: fxpipe does not close its groups when a rank fails, and torch caches the mesh beyond
    the end of the process group.
    """
    if not is_dtensor(tensor):
        return tensor
    mesh = tensor.device_mesh.mesh.tolist()
    if mesh != list(transport.ranks("gather")) or not tensor.placements[0].is_shard(0):  # the user's parallelize=
        return whole_of(tensor)
    own = local(tensor)
    # FSDP2's chunks have ceil(rows / ranks) rows, the last chunks fewer: pads them, gathers, and cuts the padding off.
    ranks = len(transport.ranks("gather"))
    part = own.new_zeros((-(-tensor.shape[0] // ranks), *tensor.shape[1:]))
    part[: len(own)] = own
    whole = part.new_empty((ranks * len(part), *tensor.shape[1:]))
    transport.start([Collective("all_gather", "gather", whole, part)], "a parameter for the state dict").wait()
    return whole[: tensor.shape[0]].clone()


def load_into(model: nn.Module, module: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Copies the tensors of ``module`` from a state dict of ``module`` or of the whole ``model``; all of them or none.

    The parameters of a loss function may be missing, as in a plain model's state dict. Returns the state dict under the
    names of the parameters and buffers.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state dict is {shown(state)}; it is what model.state_dict() gives, name -> tensor")
    whole = saved_tensors(model)
    if not state.keys() <= whole.keys():  # hooks of modules, as of torch's checkpoint_wrapper, undo their changes
        state = undone_by_hooks(model, state)
    unknown = [name for name in state if name not in whole]
    if unknown:
        raise CheckpointError(f"the model has no {unknown[0]!r}{nearest(unknown[0], whole)}")
    plain = saved_tensors(plain_model(model))
    if any(type(part).state_dict is not nn.Module.state_dict for part in model.modules()):
        plain = {name: tensor for name, tensor in plain.items() if name in state}  # it may leave tensors out
    own = module.state_dict(keep_vars=True)
    targets = {name: tensor for name, tensor in own.items() if name in state or name in plain}
    missing = [name for name in targets if name not in state]
    if missing:
        raise CheckpointError(
            f"the state dict lacks {len(missing)} of {len(targets)} tensors, first {missing[0]!r}"
            f"{nearest(missing[0], state)}; load a plain model's state dict, or this rank's own part"
        )
    for name, tensor in targets.items():
        if not isinstance(state[name], Tensor) or state[name].is_meta or state[name].layout is not torch.strided:
            raise CheckpointError(f"{name} of the state dict is {shown(state[name])}; it is a dense tensor with values")
        check_fits(name, tensor, "the state dict", state[name].shape, state[name].dtype)
    # No tensor is written until all have been checked.
    with torch.no_grad():
        for name, tensor in targets.items():
            for into, source in pairs(local(tensor), part_of(tensor, state[name])):
                overwrite(into, source)
    return state
