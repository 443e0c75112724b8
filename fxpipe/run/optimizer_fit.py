"""Optimizer fit: an optimizer's state dict as a checkpoint can fill it, or a refusal in the optimizer's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.parameters.saving.reader import FolderReader
from fxpipe.run.run_state import Savable
from fxpipe.sharding.distributed_optimizer import DistributedOptimizer
from fxpipe.sharding.optimizer_state import MASTER

_NEW = "initial_lr"  # what a scheduler that was not saved has put into the groups


def fitted(name: str, optimizer: Savable, reader: FolderReader) -> dict[str, Any]:
    """The optimizer's state dict, with what the checkpoint has under ``name`` to be read into it.

    Options come as they were saved, a number where there is a tensor now and a tensor where there is a number. What was
    frozen has no state in it, and begins anew; what was kept in full precision has no master, which then follows the
    model.

    Raises:
        CheckpointError: it was saved without this optimizer, or with one of another kind.
    """
    state = optimizer.state_dict()
    known = set(reader.names)  # and what they are in
    known |= {part for saved in reader.names if saved.startswith(f"{name}.") for part in _parents(saved)}
    if f"{name}.param_groups" not in known:
        raise CheckpointError(f"{reader.folder} has no state of optimizer= ({name}): it was saved without it")
    for key, group in _groups(state["param_groups"]):
        _fit_options(f"{name}.param_groups.{key}", group, reader, known)
    entries: dict[str, dict[str, Any]] = state["state"]
    for parameter in [one for one in entries if f"{name}.state.{one}" not in known]:
        del entries[parameter]
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, entry in entries.items():
            if f"{name}.state.{parameter}.{MASTER}" not in known:
                entry.pop(MASTER, None)
    return state


def _parents(name: str) -> Iterator[str]:
    """ "a.b.c" → "a.b", "a"."""
    while name := name.rpartition(".")[0]:
        yield name


def _groups(groups: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield from groups.items() if isinstance(groups, Mapping) else enumerate(groups)


def _fit_options(name: str, group: dict[str, Any], reader: FolderReader, known: set[str]) -> None:
    if f"{name}.{_NEW}" not in known:
        group.pop(_NEW, None)
    for option, value in group.items():
        there = f"{name}.{option}"
        if there not in known:
            raise CheckpointError(
                f"{reader.folder} has no {there!r}: the optimizer that was saved is of another class, has other "
                "groups, or one is torch's own and the other of forward_backward.optimizer(...); make it as it was"
            )
        is_tensor = there in reader.tensors
        if is_tensor != isinstance(value, Tensor):
            group[option] = torch.empty(reader.tensors[there][0], dtype=reader.tensors[there][1]) if is_tensor else 0.0
