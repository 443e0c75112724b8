"""Materialise: on each rank, gives memory and values to the tensors that the rank holds of a meta-device model.

Tensors that the checkpoint holds are read; ``init_fn`` makes the others. A tensor's initial values depend on the seed
and on its path in the model, not on the placement: any rank, and any number of ranks, would make the same values.
"""

from __future__ import annotations

import contextlib
import math
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, RunError, nearest, noted, printable
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.parameters.ownership import on_meta, replace_tensors, saved_tensors
from fxpipe.parameters.weights import Weights
from fxpipe.progress import is_teller
from fxpipe.seeds import seed_from, seed_torch, seeded
from fxpipe.stage.with_loss import plain_model
from fxpipe.tensors.dtensors import is_dtensor, shard_of
from fxpipe.torch_compat.operators import TorchDispatchMode, schema_of
from fxpipe.torch_compat.tensors import hooks_of, storage_id
from fxpipe.validation import shown


@dataclass(frozen=True)
class _ModelTensor:
    """A tensor of the model. ``names``: all its names. ``key``: its name in the checkpoint, or None if absent there."""

    tensor: Tensor
    names: tuple[str, ...]
    key: str | None
    is_saved: bool
    """Whether checkpoints hold the tensor: buffers may be registered as not persistent."""


def materialise(
    model: nn.Module,
    names: Collection[str],
    device: torch.device,
    init_fn: InitFn | None = None,
    weights: Weights | None = None,
    seed: int = 0,
) -> dict[int, Tensor]:
    """Replaces each meta tensor of the model whose name is in ``names`` by a real tensor.

    Returns ``id(meta tensor)`` → the new tensor; ``replace_tensors`` takes this mapping for other modules that held the
    model's tensors.

    Tied tensors remain tied; type, strides, ``requires_grad`` and attributes are kept. Tensors of other names and the
    state of the random number generators do not change. The call is no collective: each rank reads its own tensors.

    Args:
        model: the model; real tensors take the checkpoint's values in place, or stay unchanged if it lacks them.
        names: the names of this rank's parameters and buffers.
        device: the device of the new tensors.
        init_fn: called, in the order of ``model.apply``, on each submodule that holds a tensor the checkpoint lacks,
            directly or further down. Tensors of other ranks are on the meta device; writes to these have no effect.
        weights: the checkpoint. A tied tensor may be in it under any of its names; tensors that the model lacks are not
            read.
        seed: the seed of random numbers in ``init_fn``, together with the submodule's path.

    Raises:
        CheckpointError: the checkpoint does not fit the whole model; on all ranks.
        RunError: a tensor has got no values.
    """
    tensors = _tensors_of(model, weights)
    if weights is not None:
        _check_complete(tensors, weights, init_fn)
    mine = [entry for entry in tensors if not set(entry.names).isdisjoint(names)]
    missing = [entry for entry in mine if entry.key is None and entry.tensor.is_meta]
    if missing and init_fn is None:
        raise RunError(
            f"{missing[0].names[0]} is a buffer on the meta device that no checkpoint holds (persistent=False); pass "
            "init_fn= (model._init_weights for a Hugging Face model, fxpipe.reset_parameters for modules of torch.nn)"
        )
    # First memory for all tensors, then init_fn, then the checkpoint: init_fn does not see the checkpoint's values.
    new = {id(entry.tensor): _real(entry, device) for entry in mine if entry.tensor.is_meta}
    replace_tensors(model, new)
    if missing and init_fn is not None:
        _initialise(model, {entry.names: new[id(entry.tensor)] for entry in missing}, init_fn, seed, device)
    for entry in mine:
        if weights is not None and entry.key is not None:
            weights.read_into(entry.key, new.get(id(entry.tensor), entry.tensor).detach())
    return new


def materialise_parts(
    model: nn.Module,
    names: Collection[str],
    device: torch.device,
    init_fn: InitFn | None = None,
    weights: Weights | None = None,
    seed: int = 0,
) -> dict[int, Tensor]:
    """As ``materialise``; of DTensors on the meta device this rank keeps its shard. Each of these is made whole by
    itself, and no two at a time."""
    tensors = {name: tensor for name, tensor in all_tensors(model).items() if name in names}
    spread = {id(tensor): (name, tensor) for name, tensor in tensors.items() if is_dtensor(tensor)}
    whole = {key: on_meta(tensor) for key, (_, tensor) in spread.items()}
    replace_tensors(model, whole)
    parts: dict[int, Tensor] = {}
    for key, (name, tensor) in spread.items():
        (real,) = materialise(model, [name], device, init_fn, weights, seed).values()
        replace_tensors(model, {id(real): whole[key]})
        part = shard_of(tensor, real)
        parts[key] = nn.Parameter(part, real.requires_grad) if isinstance(real, nn.Parameter) else part
    others = [name for name, tensor in tensors.items() if id(tensor) not in spread]
    made = materialise(model, others, device, init_fn, weights, seed)
    replace_tensors(model, {id(meta): parts[key] for key, meta in whole.items()})
    return made | parts


def check_no_meta(module: nn.Module, stage: str) -> None:
    """Raises RunError if a stage's module holds a meta tensor that is no parameter or buffer of the model."""
    for name, tensor in all_tensors(module).items():
        if tensor.is_meta:
            raise RunError(
                f"stage {stage} uses a tensor of shape {list(tensor.shape)} ({name}) that is on the meta device, and "
                "is no parameter or buffer of the model, so that nothing can give it values; register_buffer it"
            )


# --- the model's tensors, and which of them the checkpoint has


def _tensors_of(model: nn.Module, weights: Weights | None) -> list[_ModelTensor]:
    """Every tensor of the model once, in the model's order."""
    saved = frozenset(weights.names) if weights is not None else frozenset()
    # A tensor is saved unless all of its names are of buffers with persistent=False, or of a loss function.
    lasting = saved_tensors(plain_model(model)).keys()
    aliases: dict[Tensor, list[str]] = {}
    for name, tensor in all_tensors(model).items():
        aliases.setdefault(tensor, []).append(name)
    entries = []
    for tensor, names in aliases.items():
        key = next((name for name in names if name in saved), None)
        entries.append(_ModelTensor(tensor, tuple(names), key, not lasting.isdisjoint(names)))
    return entries


def _check_complete(tensors: Sequence[_ModelTensor], weights: Weights, init_fn: InitFn | None) -> None:
    """Raises CheckpointError if the checkpoint does not fit; warns of missing tensors that ``init_fn`` will make."""
    for entry in tensors:
        if entry.key is not None:
            weights.check_fits(entry.key, entry.names[0], entry.tensor)
    saved = [entry for entry in tensors if entry.is_saved]
    absent = [entry.names[0] for entry in saved if entry.key is None]
    if not absent:
        return
    borne = {name for entry in tensors for name in entry.names}
    others = [name for name in weights.names if name not in borne]
    lacking = f"{weights.path} lacks {len(absent)} of the model's {len(saved)} tensors, first {absent[0]!r}"
    if init_fn is None or len(absent) == len(saved):
        remedy = "where only the names differ, write checkpoint=fxpipe.Weights.open(path, rename=...)"
        if init_fn is None:
            remedy += "; init_fn= makes what a checkpoint lacks"
        raise CheckpointError(f"{lacking}{nearest(absent[0], others)}; {remedy}")
    if is_teller():
        unused = f"; {len(others)} of its own are not used, first {others[0]!r}" if others else ""
        source = "init_fn makes those on the meta device, others stay as they are"
        warnings.warn(printable(f"{lacking}; {source}{unused}"), stacklevel=3)


# --- new tensors


def _real(entry: _ModelTensor, device: torch.device) -> Tensor:
    """A tensor on ``device`` with the form of the meta tensor; the tensor's memory is not initialised."""
    meta = entry.tensor
    if hooks_of(meta):
        raise RunError(f"{entry.names[0]} is on the meta device and has a hook, which would be lost; register it later")
    tensor = torch.empty_like(meta, device=device, requires_grad=False)
    if isinstance(meta, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
    tensor.__dict__.update(meta.__dict__)
    return tensor


# --- init_fn: the tensors that init_fn must write have memory; all others of the model are on the meta device

InitFn = Callable[[nn.Module], Any]


def reset_parameters(module: nn.Module) -> None:
    """An ``init_fn`` for modules that have a ``reset_parameters`` method, as torch.nn's have."""
    _check_module(module)
    for name in ("reset_parameters", "_reset_parameters"):  # the second in nn.MultiheadAttention and nn.Transformer
        reset = getattr(module, name, None)
        if reset is not None:
            reset()
            return


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise RunError(f"{shown(module)} is no nn.Module")


def init_weights_of(model: nn.Module) -> InitFn:
    """An ``init_fn`` for models made of several Hugging Face models: each part is initialised by its own rules.

    The rule is ``_init_weights`` of the innermost enclosing module that has this method, else ``reset_parameters``.
    """
    _check_module(model)
    rules: dict[int, InitFn] = {}

    def note(module: nn.Module, rule: InitFn) -> None:
        rule = getattr(module, "_init_weights", rule)
        rules.setdefault(id(module), rule)
        for child in module.children():
            note(child, rule)

    note(model, reset_parameters)
    return lambda module: rules[id(module)](module)


def _initialise(
    model: nn.Module, missing: Mapping[tuple[str, ...], Tensor], init_fn: InitFn, seed: int, device: torch.device
) -> None:
    """Calls ``init_fn`` on every submodule around a missing tensor, innermost first, as ``model.apply`` would.

    ``missing``: all names of a tensor → the tensor in the model. RunError if ``init_fn`` leaves a tensor unwritten.
    """
    # An element that is NaN afterwards was not written. Integers have no NaN: only whole tensors are checked.
    for tensor in missing.values():
        tensor.detach().fill_(math.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
    around = {path for names in missing for name in names for path in _around(name)}
    written: set[int] = set()
    with torch.no_grad(), seeded(seed, device), _only(model, missing.values()):
        for path, submodule in [entry for entry in _innermost_first(model) if entry[0] in around]:
            called = (
                f"init_fn was called on the {type(submodule).__name__} {path!r}; of its tensors, those that have "
                "values already or are with other ranks are on the meta device"
            )
            with (
                noted(partial(str, called)),
                _SeededWrites(submodule, seed, path, device, written),
                _tensors_kept(submodule),
            ):
                init_fn(submodule)
    # Elements that no write has covered are still NaN.
    for (name, *_), tensor in missing.items():
        is_partial = storage_id(tensor) in written
        left = tensor.is_floating_point() and tensor.element_size() > 1 and bool(tensor.isnan().any())
        if tensor.numel() and (left or not is_partial):
            path = name.rpartition(".")[0]
            holder = type(model.get_submodule(path)).__name__
            raise RunError(
                f"init_fn has not written{' all of' * is_partial} {name} of shape {list(tensor.shape)}, which no "
                f"checkpoint holds either; it is called on the {holder} {path!r} that holds it, and must fill it there"
            )


def _around(name: str) -> Iterator[str]:
    """The paths of the modules around a tensor: ``a.b``, ``a`` and the root for ``a.b.weight``."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _innermost_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every submodule once, by its first path, in the order of ``Module.apply``."""
    order: dict[nn.Module, None] = {}
    model.apply(order.setdefault)
    paths = {module: path for path, module in model.named_modules()}
    return [(paths[module], module) for module in order]


class _SeededWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds torch before and after each write to a tensor of the model, by the tensor's name and its count of writes.

    Another rank's tensor is on the meta device, so that a write to it draws no random numbers; without new seeds, later
    writes would draw other numbers than on that rank. ``written``: the mode adds the ids of written storages.
    """

    def __init__(self, model: nn.Module, seed: int, path: str, device: torch.device, written: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {storage_id(tensor): name for name, tensor in reversed(all_tensors(model).items())}
        self._key = struct.pack("<Q", seed % 2**64) + path.encode()
        self._device, self._written = device, written
        self._writes: Counter[str] = Counter()
        self._start("", 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        storage = storage_id(args[0]) if args and schema_of(func).is_mutable and isinstance(args[0], Tensor) else None
        name = None if storage is None else self._names.get(storage)
        if storage is None or name is None:
            return func(*args, **(kwargs or {}))
        # Seeded again after the write, since a real tensor and a meta tensor draw different counts of numbers.
        self._written.add(storage)
        self._writes[name] += 1
        self._start(name, 2 * self._writes[name])
        result = func(*args, **(kwargs or {}))
        self._start(name, 2 * self._writes[name] + 1)
        return result

    def _start(self, name: str, count: int) -> None:
        seed_torch(seed_from(self._key + f" {name} {count}".encode()), self._device)


@contextlib.contextmanager
def _only(model: nn.Module, tensors: Any) -> Iterator[None]:
    """While the context is open, meta tensors replace all real tensors of the model except ``tensors``."""
    exempt = {id(tensor) for tensor in tensors}
    hidden = [tensor for tensor in all_tensors(model).values() if not tensor.is_meta and id(tensor) not in exempt]
    stand_ins = {id(tensor): on_meta(tensor) for tensor in hidden}
    replace_tensors(model, stand_ins)
    try:
        yield
    finally:
        replace_tensors(model, {id(stand_ins[id(tensor)]): tensor for tensor in hidden})


@contextlib.contextmanager
def _tensors_kept(submodule: nn.Module) -> Iterator[None]:
    """Copies a tensor that ``init_fn`` assigns into the original, which may be tied or cast, and puts that back."""
    tables = [(module, table) for module in submodule.modules() for table in (module._parameters, module._buffers)]
    places = [(module, name, tensor) for module, table in tables for name, tensor in table.items()]
    yield
    for module, name, tensor in places:
        new = getattr(module, name)
        if new is tensor or tensor is None:
            continue
        if new.shape != tensor.shape:
            raise RunError(
                f"init_fn put a tensor of shape {list(new.shape)} in the place of {type(module).__name__}.{name}, "
                f"which has {list(tensor.shape)}; build the model with the shapes that it is to have"
            )
        if not tensor.is_meta and not new.is_meta:
            tensor.copy_(new)
        setattr(module, name, tensor)
