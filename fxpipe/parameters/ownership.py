"""Ownership: which pipe rank holds which parameters and buffers, under the model's own names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.graph.elsewhere import Elsewhere
from fxpipe.graph.ranks import rank_count
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.parameters.own_buffers import mark_own_buffers


@dataclass(frozen=True)
class Ownership:
    """``names[rank]``: the names of what a rank holds. ``tied``: owners → names of what several ranks hold."""

    names: tuple[frozenset[str], ...]
    tied: Mapping[tuple[int, ...], tuple[str, ...]]

    def first_owner(self, name: str) -> int:
        return next(rank for rank, names in enumerate(self.names) if name in names)


def ownership(graph: StageGraph) -> Ownership:
    """A rank holds what its stages use, under all names that it bears; what nobody uses is with the first stage."""
    ranks = rank_count(graph.placement)
    aliases: dict[int, list[str]] = {}
    for name, tensor in all_tensors(graph.module).items():
        aliases.setdefault(id(tensor), []).append(name)
    owners: dict[int, set[int]] = {key: set() for key in aliases}
    for stage in graph:
        for tensor in stage.tensors.values():
            owners.setdefault(id(tensor), set()).update(graph.ranks(stage.index))
    names: list[set[str]] = [set() for _ in range(ranks)]
    tied: dict[tuple[int, ...], list[str]] = {}
    for key, group in aliases.items():
        holders = sorted(owners[key]) or [graph.ranks(0)[0]]
        for rank in holders:
            names[rank].update(group)
        if len(holders) > 1:
            tied.setdefault(tuple(holders), []).append(group[0])
    return Ownership(tuple(map(frozenset, names)), {holders: tuple(group) for holders, group in sorted(tied.items())})


_ORIGINAL, _HELD = "the model's part", "held as"
"""Under names that no part of a model can bear. The second is the part's own number, which a copy of it has not."""
_BEFORE = "change the model before fxpipe.compile"
_HOOK = "are never called; register it on the model that is given to fxpipe.compile, before"


def _reaches_nothing(name: str, instead: str) -> Any:
    """The method of this name, refused for what a rank holds."""
    original = getattr(nn.Module, name)

    @functools.wraps(original)
    def method(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_held(part):
            raise RunError(f"{name}() of forward_backward.module reaches nothing: its parts {instead}")
        return original(part, *args, **kwargs)

    return method


class _HeldPart(nn.Module):
    """A part of what a rank holds, whose tensors are those that the stages use. What would be set here and reach
    nothing is refused; a copy, such as one that averages weights, is like any module."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        vars(self).update({_ORIGINAL: original, _HELD: id(self)})

    register_forward_hook = _reaches_nothing("register_forward_hook", _HOOK)
    register_forward_pre_hook = _reaches_nothing("register_forward_pre_hook", _HOOK)
    register_full_backward_hook = _reaches_nothing("register_full_backward_hook", _HOOK)
    register_full_backward_pre_hook = _reaches_nothing("register_full_backward_pre_hook", _HOOK)
    apply = _reaches_nothing("apply", "are of no class that a function would look for; call it on the model itself")

    def train(self, mode: bool = True) -> Self:
        """As the model's own part has it, which may keep parts of its own in another mode."""
        vars(self)[_ORIGINAL].train(mode)
        for part in self.modules():
            part.training = vars(part)[_ORIGINAL].training
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._check_tensor(name, param)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._check_tensor(name, tensor)
        super().register_buffer(name, tensor, persistent)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_tensor(name, value)
        if _is_held(self) and self._modules.get(name, value) is not value:
            raise RunError(f"{name} is set to another module, and the stages would go on with the old one; {_BEFORE}")
        if _is_held(self) and not name.startswith("_") and name not in (*self._tensors, *self._modules, "training"):
            self._check_attribute(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if _is_held(self) and name in (*self._tensors, *self._modules):
            raise RunError(f"{name} is what the stages hold, and they would go on with it; {_BEFORE}")
        super().__delattr__(name)

    @property
    def _tensors(self) -> dict[str, Tensor | None]:
        return self._parameters | self._buffers

    def _check_tensor(self, name: str, value: Any) -> None:
        if _is_held(self) and self._tensors.get(name, value) is not value:
            raise RunError(
                f"{name} is set to another tensor than the stages hold, and they would go on with the old one; "
                "write values into what there is: with torch.no_grad(): module.get_parameter(name).copy_(value), "
                "or get_buffer(name)"
            )

    def _check_attribute(self, name: str) -> None:
        if hasattr(vars(self)[_ORIGINAL], name):
            raise RunError(
                f"{name} is set in forward_backward.module, of which stages use tensors alone; set it in the model "
                "that was given to fxpipe.compile"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if _is_held(self):
            raise RunError("move or cast the model before fxpipe.compile; its stages hold these very tensors")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _is_held(part: nn.Module) -> bool:
    return vars(part).get(_HELD) == id(part)


class RankModule(_HeldPart):
    """One rank's part of a model: the parameters and buffers that it holds, under the model's own names.

    ``train()`` and ``eval()`` reach the whole model, so that functional dropout follows them, too. ``replica``: its
    number, from 0; a checkpoint has the first one's buffers.
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
        if replica:
            self.register_state_dict_post_hook(mark_own_buffers)  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if assign and _is_held(self):
            raise RunError(
                "load_state_dict(assign=True) would put other tensors here than the stages hold; leave it out"
            )
        return super().load_state_dict(state_dict, strict, assign)


def _submodule(root: _HeldPart, path: str) -> nn.Module:
    part: nn.Module = root
    for name in path.split(".") if path else ():
        if name not in part._modules:
            part.add_module(name, _HeldPart(vars(part)[_ORIGINAL].get_submodule(name)))
        part = part.get_submodule(name)
    return part


def release(
    model: nn.Module,
    keep: frozenset[str],
    why: Mapping[str, str] = MappingProxyType({}),
    device: torch.device | None = None,
) -> None:
    """Frees every parameter and buffer whose name is not kept: an ``Elsewhere`` remains, without memory.

    ``why``: a name → what is said where its values are used. ``device``: what stands for the meta device.
    """
    tensors = all_tensors(model)
    kept = {id(tensor) for name, tensor in tensors.items() if name in keep}
    empty: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) in kept or isinstance(tensor, Elsewhere):
            continue
        if id(tensor) not in empty:
            at = device if tensor.is_meta and device is not None else tensor.device
            empty[id(tensor)] = Elsewhere.of(tensor, why.get(name, f"{name} is held by another rank"), at)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, empty[id(tensor)])  # by its setter: nn.LSTM keeps a list as well


def why_elsewhere(graph: StageGraph, owners: Ownership) -> dict[str, str]:
    """What is said where a rank uses the values of a parameter or buffer that it does not hold, by each name of it."""
    tensors, why = all_tensors(graph.module), {}
    users: dict[int, list[str]] = {id(tensor): [] for tensor in tensors.values()}
    for stage in graph:
        for name in stage.tensors:
            users[id(tensors[name])].append(stage.name)
    for name, tensor in tensors.items():
        ranks = ", ".join(str(rank) for rank, held in enumerate(owners.names) if name in held)
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
    """Another tensor or parameter like it, without memory."""
    meta = torch.empty_like(tensor, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
