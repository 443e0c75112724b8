"""Run state: the parts of a run that a checkpoint holds, and which saved rank's part a rank of another layout takes.

Tensors of the model and the optimizers have the same name on all ranks, and are resharded. Everything else is plain
data of each rank: the random state and the user's values. Equal values are saved once. On another layout of ranks, a
value that differs between ranks is loaded only if the rank that takes it is known; otherwise loading raises.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxpipe.checkpoint.files.plain import Tree, from_plain, to_plain
from fxpipe.distributed.grid import shape
from fxpipe.distributed.topology import Topology
from fxpipe.errors import CheckpointError
from fxpipe.sharding.distributed_optimizer import DistributedOptimizer
from fxpipe.sharding.optimizer_class import Entry, initial_state, is_initial
from fxpipe.sharding.optimizer_state import check_saves_all
from fxpipe.sharding.parameter_groups import first_names, options_of
from fxpipe.small_file import read_small

STATE = "state.json"
"""The file of all ranks' plain data."""
PLAIN = "plain"
"""The name of the tensors of plain data in a checkpoint."""
BUFFERS = "buffers"
"""The name in plain data of a replica's own buffers, for all replicas but the first."""


@dataclass(frozen=True)
class Layout:
    """The topology of a run and its number of processes: either 1, which plays every rank, or one per rank."""

    axes: tuple[tuple[str, int], ...]
    processes: int

    @property
    def replicas(self) -> list[list[int]]:
        """The processes that work on each replica's data."""
        return [[0]] if self.processes == 1 else Topology(self.axes).groups("model")

    def replica(self, rank: int) -> int:
        """The replica whose data a process works on."""
        return next(replica for replica, ranks in enumerate(self.replicas) if rank in ranks)

    def __str__(self) -> str:
        return f"{shape(self.axes)} in {self.processes} processes"


@dataclass(frozen=True)
class PlainParts:
    """All ranks' plain data: for each rank, part → digest of its value; and digest → value."""

    of_rank: Sequence[Mapping[str, str]]
    trees: Mapping[str, Tree]

    @staticmethod
    def read(path: Path) -> PlainParts:
        """Reads the file of plain data; CheckpointError if the file was altered."""
        try:
            read = json.loads(read_small(path, 2**40, os.O_NOFOLLOW))
            ranks: Sequence[dict[str, str]] = read["ranks"]
            trees = dict(read["trees"])
            whole = bool(ranks) and all(digest in trees for parts in ranks for digest in parts.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read, or was altered: {str(error)[:100]}") from error
        if not whole:
            raise CheckpointError(f"{path} was altered: it does not have what it names")
        return PlainParts(ranks, trees)

    def tree(self, part: str, saved: Layout, now: Layout, rank: int) -> Tree:
        """A rank's value of a part, as JSON.

        Raises:
            CheckpointError: nothing was saved under this name, or values differ by rank and the layout has changed.
        """
        if not any(part in parts for parts in self.of_rank):
            raise CheckpointError(f"the checkpoint has no state of {part}: it was saved without {part}=")
        digests = [parts.get(part, "") for parts in self.of_rank]
        if saved == now:
            return self.trees[digests[rank]]
        # On another layout a rank has no predecessor: it takes a part only if all candidate ranks saved equal values.
        same: list[Sequence[int]] = [range(len(digests))]  # sets of candidate ranks
        if len(saved.replicas) == len(now.replicas):
            same.append(saved.replicas[now.replica(rank)])
        for ranks in same:
            if len({digests[each] for each in ranks}) == 1:
                return self.trees[digests[ranks[0]]]
        raise CheckpointError(
            f"the {part} that was saved differs between ranks, which lay as {saved}, and lie as {now} now: who "
            f"gets which part is not known. Load it in that layout, or save the same {part} on all ranks"
        )


def check_place(loader: Any, saved: Layout, now: Layout) -> None:
    """Raises CheckpointError if a loader may count a replica's rows and the number of replicas has changed.

    A loader with ``any_replicas = True`` declares that its state holds for any number of replicas.
    """
    then, new = len(saved.replicas), len(now.replicas)
    if then == new or getattr(loader, "any_replicas", False) is True:
        return
    raise CheckpointError(
        f"the state of loader= was saved on {then} replicas, and there are {new} now: what counts a replica's own rows "
        "would go on at others. Count batches of the whole run, as Feed in examples/training_loop.py does, and write "
        f"any_replicas = True in the class {type(loader).__name__}; or load on {then} replicas"
    )


def plain_parts(parts: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Tree], dict[str, Tensor]]:
    """A rank's plain data: part → digest, digest → JSON, and name → tensor for the tensors in the values.

    Raises:
        CheckpointError: something is not plain data.
    """
    digests, trees, tensors = {}, {}, {}
    for part, value in parts.items():
        tree, inside = to_plain(value, part)
        digest = hashlib.blake2b(json.dumps(tree).encode(), digest_size=16).hexdigest()
        digests[part], trees[digest] = digest, tree
        tensors.update(inside)
    return digests, trees, tensors


def tensors_for(tree: Tree, stored: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Empty tensors to read a value's tensors into, by name; CheckpointError if ``stored`` lacks a name."""
    # Rebuilds the value with a defaultdict, which collects the names that the value looks up.
    tensors: defaultdict[str, Tensor] = defaultdict(lambda: torch.empty(0))
    value_of(tree, tensors)
    for name in tensors:
        if f"{PLAIN}.{name}" not in stored:
            raise CheckpointError(f"the checkpoint lacks the tensor {PLAIN}.{name}, which its plain data names")
        shape, dtype = stored[f"{PLAIN}.{name}"]
        tensors[name] = torch.empty(shape, dtype=dtype)
    return dict(tensors)


def value_of(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuilds the value from JSON and tensors; CheckpointError if the data was altered."""
    try:
        return from_plain(tree, tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's plain data was altered: {error}") from error


def ties_of(model: torch.nn.Module) -> dict[str, str]:
    """Further names of tied parameters → the first name, under which optimizers hold a parameter's state."""
    firsts = first_names(dict(model.named_parameters(remove_duplicate=False)))
    return {name: first for name, first in firsts.items() if name != first}


# --- optimizers


Savable: TypeAlias = "DistributedOptimizer | PlainOptimizer"


def savable(optimizer: Any, module: torch.nn.Module) -> dict[str, Savable]:
    """Name in the checkpoint → optimizer: "optim", or "optim.NAME" for each entry of a dict.

    Raises:
        CheckpointError: ``optimizer`` is neither an optimizer of this model, nor a dict of such optimizers, nor None.
    """
    if optimizer is None:
        return {}
    if isinstance(optimizer, dict) and optimizer and all(type(name) is str for name in optimizer):
        return {f"optim.{name}": _savable(each, module) for name, each in optimizer.items()}
    return {"optim": _savable(optimizer, module)}


def _savable(optimizer: Any, module: torch.nn.Module) -> Savable:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckpointError(
            f"optimizer= is a {type(optimizer).__name__}; give what forward_backward.optimizer(...) returned, a dict "
            "name → optimizer where there are several, or None"
        )
    own = set(map(id, module.parameters()))
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise CheckpointError(  # the state would be saved under this model's names
            "optimizer= steps parameters that are none of this forward_backward's; give what "
            "forward_backward.optimizer(...) returned"
        )
    return optimizer if isinstance(optimizer, DistributedOptimizer) else PlainOptimizer(module, optimizer)


# --- Plain optimizer: a torch optimizer, whose state has the plain model's names in a checkpoint ---


class PlainOptimizer:
    """A torch optimizer of ``forward_backward.parameters()``, with its state under the model's names."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def _parameters(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yields each parameter's name, the parameter and its group."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield self._names[id(parameter)], parameter, group

    def state_to_fill(self, saved: Container[str]) -> dict[str, Any]:
        """``{"state": {name: {key: value}}, "param_groups": {name: {key: value}}}``; leaves the optimizer unchanged.

        A parameter that was never stepped has an initial state; a frozen parameter that was never stepped has an
        initial state only if ``saved`` holds the parameter's name.
        """
        if isinstance(self._optimizer, torch.optim.LBFGS):
            raise CheckpointError(
                "LBFGS keeps what it has of all parameters with the first, which has no name of its own"
            )
        check_saves_all(self._optimizer)
        entries = {
            name: dict(self._optimizer.state.get(parameter) or self._initial(parameter, options_of(group)))
            for name, parameter, group in self._parameters()
            if parameter in self._optimizer.state or parameter.requires_grad or name in saved
        }
        return {
            "state": {name: entry for name, entry in entries.items() if entry},
            "param_groups": {name: options_of(group) for name, _, group in self._parameters()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the dict that ``state_to_fill`` returned, with the checkpoint's values.

        Raises:
            CheckpointError: parameters of one group were saved with different options.
        """
        for name, parameter, group in self._parameters():
            options, first = state["param_groups"][name], self._names[id(group["params"][0])]
            if options != state["param_groups"][first]:
                raise CheckpointError(
                    f"{first} and {name}, which are in one parameter group, were saved in groups with different "
                    "options; make the optimizer with the groups that it was saved with"
                )
            entry = state["state"].get(name, {})
            # A parameter that was never stepped stays without state, as in torch: some optimizers test for that.
            stepped = parameter in self._optimizer.state
            if stepped or (entry and not is_initial(entry, self._initial(parameter, options))):
                self._optimizer.state[parameter] = entry
        for group in self._optimizer.param_groups:
            for parameter in group["params"][:1]:
                group.update(copy.deepcopy(state["param_groups"][self._names[id(parameter)]]))

    def _initial(self, parameter: Tensor, options: Mapping[str, Any]) -> Entry:
        """The state with which a parameter's first step begins."""
        return initial_state(self._like_it, options, parameter.detach(), kind=type(self._optimizer))

    def _like_it(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """A new optimizer of the same class, without state, hooks and the schedulers' wrapper of ``step``."""
        other = copy.copy(self._optimizer)
        # A scheduler sets a wrapped ``step`` in the instance: a copy with that wrapper would step this optimizer.
        own = {key: value for key, value in vars(self._optimizer).items() if key != "step"}
        fresh = {"state": defaultdict(dict), "param_groups": groups}
        other.__dict__.update({**own, **vars(other), **fresh})
        return other
