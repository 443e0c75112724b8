"""Ownership: which pipe rank holds which parameters and buffers, under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
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
    ranks = 1 + max(graph.placement)
    aliases: dict[int, list[str]] = {}
    for name, tensor in all_tensors(graph.module).items():
        aliases.setdefault(id(tensor), []).append(name)
    owners: dict[int, set[int]] = {key: set() for key in aliases}
    for stage in graph:
        for tensor in stage.tensors.values():
            owners.setdefault(id(tensor), set()).add(graph.placement[stage.index])
    names: list[set[str]] = [set() for _ in range(ranks)]
    tied: dict[tuple[int, ...], list[str]] = {}
    for key, group in aliases.items():
        holders = sorted(owners[key]) or [graph.placement[0]]
        for rank in holders:
            names[rank].update(group)
        if len(holders) > 1:
            tied.setdefault(tuple(holders), []).append(group[0])
    return Ownership(tuple(map(frozenset, names)), {holders: tuple(group) for holders, group in sorted(tied.items())})


class _HeldPart(nn.Module):
    """A part of what a rank holds, whose tensors are those that the stages use."""

    def __setattr__(self, name: str, value: Any) -> None:
        for table in ("_parameters", "_buffers"):
            held = self.__dict__.get(table, {}).get(name)
            if held is not None and value is not held:
                raise RunError(
                    f"{name} is set to another tensor than the stages hold, and they would go on with the old one; "
                    "write values into what there is: with torch.no_grad(): module.get_parameter(name).copy_(value), "
                    "or get_buffer(name)"
                )
        super().__setattr__(name, value)


class RankModule(_HeldPart):
    """One rank's part of a model: the parameters and buffers that it holds, under the model's own names.

    ``train()`` and ``eval()`` reach the whole model, so that functional dropout follows them, too. ``replica``: its
    number, from 0; a checkpoint has the first one's buffers.
    """

    def __init__(self, model: nn.Module, names: frozenset[str], replica: int = 0) -> None:
        super().__init__()
        self.__dict__["the whole model"] = model  # under a name that no part of it can bear
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

    def train(self, mode: bool = True) -> RankModule:
        self.__dict__["the whole model"].train(mode)
        super().train(mode)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if assign:
            raise RunError(
                "load_state_dict(assign=True) would put other tensors here than the stages hold; leave it out"
            )
        return super().load_state_dict(state_dict, strict)

    def _apply(self, fn: Any, recurse: bool = True) -> RankModule:
        raise RunError("move or cast the model before fxpipe.compile; its stages hold these very tensors")


def _submodule(root: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if part not in root._modules:
            root.add_module(part, _HeldPart())
        root = root.get_submodule(part)
    return root


def release(model: nn.Module, keep: frozenset[str]) -> None:
    """Frees every parameter and buffer whose name is not kept: on the meta device it remains, without memory."""
    kept = {id(tensor) for name, tensor in all_tensors(model).items() if name in keep}
    empty: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None and not tensor.is_meta and id(tensor) not in kept:
                    table[name] = empty.setdefault(id(tensor), on_meta(tensor))  # type: ignore[assignment]


def on_meta(tensor: Tensor) -> Tensor:
    """Another tensor or parameter like it, without memory."""
    meta = torch.empty_like(tensor, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
