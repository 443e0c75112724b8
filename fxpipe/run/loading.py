"""Loading: loads a run's newest whole checkpoint into a model and its optimizer, on any layout of ranks.

1. The first rank lists the checkpoints. Each rank checks a share of the newest checkpoint's files; if a file was cut or
   altered, the ranks try the previous checkpoint.
2. Each rank checks that the checkpoint can fill its values, and only then fills them, in place.

An optimizer's state dict is converted to a form that a checkpoint can fill; otherwise loading raises.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.checkpoint.files import run_folder
from fxpipe.checkpoint.files.manifest import Manifest
from fxpipe.checkpoint.files.reader import MODEL, FolderReader, ModelValues, own_key
from fxpipe.checkpoint.gathering import TransportGathering, agreed
from fxpipe.distributed.activity import announced
from fxpipe.errors import CheckpointError, printable
from fxpipe.parameters.ownership import own_buffers, saved_tensors
from fxpipe.precision import converts
from fxpipe.progress import log
from fxpipe.run.forward_backward import ForwardBackward, steps_of
from fxpipe.run.run_state import (
    BUFFERS,
    PLAIN,
    STATE,
    Layout,
    PlainParts,
    Savable,
    check_place,
    savable,
    tensors_for,
    value_of,
)
from fxpipe.run.saving import claim, continues, path_of, wait_for_writes
from fxpipe.run.step.step import Steps
from fxpipe.schedules.costs import Costs
from fxpipe.seeds import RandomState, seed_of, seed_python, seed_torch, set_state
from fxpipe.sharding.distributed_optimizer import DistributedOptimizer
from fxpipe.sharding.optimizer_state import MASTER
from fxpipe.tensors.dtensors import is_dtensor
from fxpipe.tensors.pieces import is_parts


def load(
    folder: str | os.PathLike[str],
    forward_backward: ForwardBackward,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    average: Any = None,
    required: bool = True,
) -> dict[str, Any]:
    """Loads a checkpoint of ``fxpipe.save``, on any ranks, cut and ``zero``. A collective call of all ranks.

    ``load`` runs no code from the files. Before changing any value, ``load`` compares sizes and checksums of all files
    with the manifest, and names and shapes with the model. On the same layout of ranks the run goes on bit for bit. On
    another layout a rank takes the random state of the same replica. A rank takes ``loader``, ``scheduler`` and
    ``extra`` if these were equal on all ranks, or on all ranks of its replica and the number of replicas is the same.

    Args:
        folder: the run's folder, to load the newest whole checkpoint; its ``best``, to load the newest whole checkpoint
            that was saved as the best; or a checkpoint's own folder, to load that.
        forward_backward: the object that ``fxpipe.compile`` returned.
        optimizer: the optimizer, as it was saved; None: only the model is loaded, for example to evaluate it.
        scheduler: an object whose ``load_state_dict`` is called with the saved state.
        loader: likewise; on another number of replicas, its attribute ``any_replicas`` must be ``True``.
        average: a ``fxpipe.Average``, if one was saved.
        required: whether a folder without checkpoints is an error. Write False in a program that starts a run and
            restarts it after a failure. Without a checkpoint ``load`` then returns step 0, and locks the folder for
            this process, as ``save`` locks it. For evaluation write True, which locks nothing.

    Returns:
        ``extra``, with the number of steps made under "step".

    Raises:
        CheckpointError: the folder has no whole checkpoint, or none that fits; with ``required=False`` also if another
            process writes to the folder, or this process cannot. On all ranks.
    """
    steps = steps_of(forward_backward)
    gathering = TransportGathering(steps.transport)
    with (
        announced("load", extends=True),
        steps.failing.together(Exception),  # all ranks raise these errors, with no communication under way
        torch.inference_mode(False),  # an optimizer cannot step tensors of inference mode
        torch.no_grad(),
    ):
        steps.failing.check_open()
        path, ranks = path_of(folder), len(steps.transport.ranks("all"))
        if not required:  # a training run begins: what would make its first save fail is found now
            agreed(gathering, path, lambda: claim(forward_backward, path.absolute()) if gathering.rank == 0 else None)
        newest = _newest_whole(path, gathering, ranks, required)
        if newest is None:
            if gathering.rank == 0:  # only the first rank lists the folder
                continues(forward_backward, path.absolute())
            return {"step": 0}
        path, manifest = newest
        loading = _Loading(path, manifest, forward_backward, steps)
        # No value changes before every rank has checked that the checkpoint fits.
        takers = {"scheduler": scheduler, "loader": loader}
        agreed(gathering, path, lambda: loading.prepare(optimizer, average, takers))
        requested = {name for names in gathering.gather(sorted(loading.requested)) for name in names}
        if gathering.rank == 0:
            loading.warn_of_what_is_left(requested)
        agreed(gathering, path, lambda: loading.finish(bool(requested)))
        if gathering.rank == 0:
            continues(forward_backward, path.parent)
            log(f"fxpipe: loaded {path}")
        return loading.extra


def _newest_whole(
    folder: Path, gathering: TransportGathering, ranks: int, required: bool
) -> tuple[Path, Manifest] | None:
    """The checkpoint to load, or None without any. A checkpoint that is given by its own folder is loaded or raises."""
    candidates = agreed(gathering, folder, lambda: _candidates(folder, required) if gathering.rank == 0 else [])[0]
    refused: list[str] = []
    manifests: dict[Path, Manifest] = {}  # read once: another job's keep= may delete files at any moment
    for path in map(Path, candidates):

        def check(path: Path = path) -> None:  # each rank reads its share of the contents
            manifests[path] = Manifest.read(path, sizes=True)
            manifests[path].check_contents(path, gathering.rank, ranks)

        try:
            agreed(gathering, path, check)
        except CheckpointError as error:
            refused.append(str(error))
            continue
        if refused and gathering.rank == 0:
            why = "; ".join(refused)
            warnings.warn(f"{why}. Going on from the one before: {path}", RuntimeWarning, stacklevel=4)
        return path, manifests[path]
    if refused:
        raise CheckpointError(f"{folder} has no whole checkpoint: " + "; ".join(refused))
    return None


def _candidates(folder: Path, required: bool) -> list[str]:
    """``folder`` itself if it is a checkpoint's; otherwise the run's checkpoints, newest first."""
    wait_for_writes(folder)
    listed = run_folder.checkpoints
    if run_folder.is_link(folder):
        listed = run_folder.bests if folder.name == run_folder.BEST else listed
        folder = run_folder.run_of(folder)
    if run_folder.is_checkpoint(folder):
        return [str(folder.absolute())]
    paths = [str(path) for path in listed(folder.absolute())]
    if required and not paths:
        raise CheckpointError(
            f"{folder} has no checkpoint of fxpipe.save; where that may be, write load(..., required=False)"
        )
    return paths


class _Loading:
    """Loads a checkpoint on a rank. ``requested``: the names of the optimizers' values that this rank takes."""

    def __init__(self, path: Path, manifest: Manifest, forward_backward: ForwardBackward, steps: Steps) -> None:
        self._path, self._manifest, self._steps, self._rank = path, manifest, steps, steps.transport.rank
        self._forward_backward, self._module = forward_backward, forward_backward.module
        self.extra: dict[str, Any] = {}

    def prepare(self, optimizer: Any, average: Any, takers: Mapping[str, Any]) -> None:
        """Checks that the checkpoint fits this rank's model, optimizers, averages and ``takers``; changes no value."""
        steps, reader = self._steps, FolderReader(self._path)
        names = {name.removeprefix(MODEL).partition(".<")[0] for name in reader.names if name.startswith(MODEL)}
        if more := sorted(names - saved_tensors(steps.module).keys()):  # these would be lost
            raise CheckpointError(
                f"{self._path} has {len(more)} tensors of a model that this one has not, first {more[0]!r}; build the "
                "model with the configuration that was saved"
            )
        self._loaded: dict[str, Any] = savable(optimizer, self._module)
        self._states: dict[str, Any] = {
            name: fitted(name, each, reader, steps.rank_state.device) for name, each in self._loaded.items()
        }
        if average is not None:
            if "average" not in reader.tree:
                raise CheckpointError(f"{self._path} has no state of average=: it was saved without it")
            self._loaded["average"], self._states["average"] = average, average.state_dict()
        plain = PlainParts.read(self._path / STATE)
        saved = Layout(self._manifest.axes, len(plain.of_rank))
        now = Layout(steps.topology.axes, len(steps.transport.ranks("all")))
        self._takers = {name: taker for name, taker in takers.items() if taker is not None}
        self._trees = {part: plain.tree(part, saved, now, self._rank) for part in ("extra", "run", *self._takers)}
        if "loader" in self._takers:
            check_place(self._takers["loader"], saved, now)
        mine = plain.of_rank[self._rank] if saved == now else {}
        if BUFFERS in mine:
            self._trees[BUFFERS] = plain.trees[mine[BUFFERS]]
        self._run = _next_step(value_of(self._trees.pop("run"), {}))
        self._replica = now.replica(self._rank)
        self._random = None  # no rank has saved this replica's random state
        if saved == now or self._replica < len(saved.replicas):
            source = self._rank if saved == now else saved.replicas[self._replica][0]
            self._random = value_of(plain.trees[plain.of_rank[source]["random"]], {})
        # each generator of the model's own is saved by the rank on which its state goes on
        of_ranks = [plain.of_rank[rank] for rank in saved.replicas[self._replica % len(saved.replicas)]]
        found = [plain.trees[parts["generators"]] for parts in of_ranks if "generators" in parts]
        self._generators = {name: state for tree in found for name, state in value_of(tree, {}).items()}
        # The reader reads these tensors and the optimizers' in the same pass over the files.
        self._tensors = tensors_for(list(self._trees.values()), reader.tensors)
        self._fill = reader.plan({**self._states, PLAIN: self._tensors} if self._tensors else self._states)
        self.requested = {name for name in reader.requested if name.startswith("optim.")}
        values = ModelValues(reader, self._manifest.ties, leave=self.requested)
        self._model = _unrounded(self._module.state_dict(), values)
        self._fill_model = values.plan(self._model)
        # masters that no optimizer asks for are loaded into the model
        self._saved = {name for name in reader.names if name.startswith("optim.")} - set(values.masters.values())
        self._left = [
            part for part in takers if part not in self._takers and any(part in parts for parts in plain.of_rank)
        ]
        self._left += ["average"] * ("average" in reader.tree and average is None)

    def warn_of_what_is_left(self, requested: Set[str]) -> None:
        """Warns of saved values that no rank loads. ``requested``: of all ranks; empty if only the model is loaded."""
        left, more = self._left, sorted(self._saved - requested)
        more = [name for name in more if not name.endswith(f".{_NEW}")]
        found = []
        if left:
            found.append(f"the state of the {' and '.join(left)}, which nobody has asked for; give load() {left[0]}=")
        if more:
            found.append(
                f"{len(more)} values of optimizers that nobody has asked for, first {more[0]}; give load() the "
                "optimizers that were saved, made of the same parameters"
            )
        for what in found if requested else ():
            warnings.warn(printable(f"{self._path} has {what}"), RuntimeWarning, stacklevel=3)

    def finish(self, goes_on: bool) -> None:
        """Loads all values. ``goes_on``: whether any rank has optimizers; a rank without parameters may have none."""
        self._fill()
        self._fill_model()
        # Only now do the tensors of plain data have their values.
        values = {part: value_of(tree, self._tensors) for part, tree in self._trees.items()}
        buffers = values.get(BUFFERS)
        if isinstance(buffers, dict) and buffers.keys() == own_buffers(self._module, self._model):  # same cut
            self._model.update(buffers)
        self._forward_backward.load_state_dict(self._model)
        for name, each in sorted(self._loaded.items()):
            load = each.load_state if isinstance(each, DistributedOptimizer) else each.load_state_dict
            load(self._states[name])
        for name, taker in self._takers.items():
            taker.load_state_dict(values[name])
        self.extra = {**dict(values["extra"] or {}), "step": self._manifest.step}
        if not goes_on:
            return
        # other state that the next step depends on
        steps, run, device = self._steps, self._run, self._steps.rank_state.device
        steps.number, steps.seed = run["number"], run["seed"]
        if run["costs"] is not None and tuple(run["stages"]) == self._forward_backward.stages.names:
            steps.recorder.loaded = Costs(**run["costs"])
        # Last: no code above may draw from the restored random state.
        for name, generator in steps.generators().items():
            if name in self._generators:
                set_state(generator, self._generators[name])
        if self._random is not None:
            RandomState([device], self._random).restore()
        else:
            seed = seed_of(steps.seed, steps.number, 0, 0, self._replica)
            seed_torch(seed, device)
            seed_python(seed)


def _unrounded(state: dict[str, Tensor], values: ModelValues) -> dict[str, Tensor]:
    """A state dict to be filled. A tensor that is kept rounded is replaced by a tensor of the saved, more exact type,
    and a tensor with a stride of 0 by a dense tensor."""
    unrounded = dict(state)
    for name, tensor in state.items():
        dtype = values.tensors.get(name, (tensor.shape, tensor.dtype))[1]
        is_finer = converts(dtype, tensor.dtype) and dtype.itemsize > tensor.dtype.itemsize
        if not is_dtensor(tensor) and (is_finer or 0 in tensor.stride()):
            unrounded[name] = torch.empty_like(tensor, dtype=dtype)
    return unrounded


def _next_step(run: Any) -> Any:
    """The stored number, seed, stages and costs for the next step; CheckpointError if they were altered."""
    kinds: dict[str, Any] = {"number": int, "seed": int, "stages": list, "costs": dict | None}
    if type(run) is not dict or not all(isinstance(run.get(key, ...), kind) for key, kind in kinds.items()):
        raise CheckpointError("the checkpoint's plain data was altered: it does not hold the next step")
    return run


_NEW = "initial_lr"  # an option that a scheduler adds to the groups


def fitted(name: str, optimizer: Savable, reader: FolderReader, device: torch.device) -> dict[str, Any]:
    """The optimizer's state dict, in the form of the checkpoint's values under ``name``, which are to be read into it.

    An option takes its saved type, number or tensor, whichever type it has now. A parameter that was frozen has no
    saved state, at most a master, and starts anew; a parameter that was trained has state, even if it is frozen now. A
    parameter that was kept in full precision has no saved master; its master then takes the model's values.

    Raises:
        CheckpointError: the checkpoint was saved without this optimizer, or with an optimizer of another kind.
    """
    saved = reader.tree.get(name, {})
    if "param_groups" not in saved:
        raise CheckpointError(f"{reader.folder} has no state of optimizer= ({name}): it was saved without it")
    saved_state = saved.get("state", {})
    trained = {parameter for parameter, there in saved_state.items() if there.keys() - {MASTER}}
    state = optimizer.state_to_fill(trained)
    groups = state["param_groups"]
    for key, group in groups.items() if isinstance(groups, Mapping) else enumerate(groups):
        there = saved["param_groups"].get(key, {})
        if _NEW not in there:
            group.pop(_NEW, None)
        for option in [option for option in group if option not in there]:
            if group[option] is not None:
                raise CheckpointError(
                    f"{reader.folder} has no '{name}.param_groups.{key}.{option}': the optimizer that was saved is of "
                    "another class, has other groups, or one is torch's own and the other of "
                    "forward_backward.optimizer(...); make it as it was"
                )
            del group[option]  # added by a first step, which the saved optimizer had not made
        # The saved group also has the options that the first steps have added.
        options = {option: where for option, where in there.items() if option in group or option != _NEW}
        group.update(_to_fill(group, options, reader, device))
    entries = {parameter: entry for parameter, entry in state["state"].items() if parameter in saved_state}
    for parameter, entry in entries.items():
        if isinstance(optimizer, DistributedOptimizer) and MASTER not in saved_state[parameter]:
            entry.pop(MASTER, None)
        if parameter not in trained:
            entry = {key: value for key, value in entry.items() if key == MASTER}
        there = {key: where for key, where in saved_state[parameter].items() if key in entry or key != MASTER}
        entries[parameter] = _to_fill(entry, there, reader, device)
    return {**state, "state": entries}


def _to_fill(own: Any, there: Any, reader: FolderReader, device: torch.device) -> Any:
    """The target of each value that the checkpoint has ``there``. It is the optimizer's own value if the shape fits, or
    else a new tensor: the number, kind and shape of an optimizer's values may depend on its state."""
    if isinstance(there, str) and there in reader.tensors:
        shape, dtype = reader.tensors[there]
        if isinstance(own, Tensor):
            if own.shape == shape and 0 not in own.stride():
                return own
            dtype = own.dtype
        return torch.empty(shape, dtype=dtype, device=device if shape else "cpu")
    if isinstance(there, str):
        return None
    if isinstance(own, Tensor) or is_parts(own):
        return own  # a tensor subclass keeps its own form and pieces
    if is_parts(there):
        raise CheckpointError(f"{reader.folder} has {', '.join(there)} where the optimizer has no tensor to be filled")
    values = own if isinstance(own, Mapping) else dict(enumerate(own if isinstance(own, list) else ()))
    keys = {own_key(values, key): where for key, where in there.items()}
    filled = {key: _to_fill(values.get(key), where, reader, device) for key, where in keys.items()}
    return {**own, **filled} if isinstance(own, Mapping) else list(filled.values()) if 0 in filled else filled
