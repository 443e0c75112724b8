"""Materialise: gives the tensors of a model that was built on the meta device memory and values, on the rank that
holds them.

What a checkpoint holds is read from it; what it lacks is made by ``init_fn``. A tensor's values depend on the seed and
on its place in the model, and on no placement: another rank, or another number of ranks, would make the same.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, RunError
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.parameters.initialise import InitFn, initialise
from fxpipe.parameters.weights import Weights, likeliest
from fxpipe.progress import is_teller
from fxpipe.torch_compat import has_hooks


@dataclass(frozen=True)
class Materialised:
    """What a model's tensors were replaced by. Names are the first that each tensor bears in the model."""

    loaded: tuple[str, ...]
    initialised: tuple[str, ...]
    replaced: tuple[tuple[Tensor, Tensor], ...]
    """Pairs: the tensor on the meta device, and the one that has come in its place."""

    def replace_in(self, module: nn.Module) -> None:
        """Does to a module that held the model's tensors, such as a stage's, what was done to the model."""
        replace_tensors(module, {id(meta): tensor for meta, tensor in self.replaced})


@dataclass(frozen=True)
class _HeldTensor:
    """A tensor of the model, all names that it bears, and the one under which the checkpoint has it."""

    tensor: Tensor
    names: tuple[str, ...]
    key: str | None
    is_saved: bool
    """Whether checkpoints hold it: buffers may be registered as not persistent."""


def materialise(
    model: nn.Module,
    names: Collection[str],
    device: torch.device,
    init_fn: InitFn | None = None,
    weights: Weights | None = None,
    seed: int = 0,
) -> Materialised:
    """Puts a real tensor in the place of each meta tensor of the model that is called one of ``names``.

    Tied tensors remain tied; type, strides, ``requires_grad`` and attributes are kept. Tensors of other names are left
    as they are, and so is the state of the random number generators. No collective call: each rank reads for itself.

    Args:
        model: the model; those of its tensors that are real already are loaded in place, and else left alone.
        names: of this rank's parameters and buffers.
        device: where the new tensors go.
        init_fn: called, as ``model.apply`` would, on each submodule that holds a tensor the checkpoint lacks, directly
            or further down. It may meet meta tensors, those of other ranks, and what it does to them is lost.
        weights: the checkpoint. A tied tensor may be in it under any of its names; what it has beyond the model is not
            read.
        seed: what random numbers in ``init_fn`` come from, along with the path of the submodule.

    Raises:
        CheckpointError: the checkpoint does not fit the whole model; on all ranks.
        RunError: a tensor has got no values.
    """
    tensors = _tensors_of(model, weights)
    if weights is not None:
        _check_complete(tensors, weights, init_fn)
    mine = [held for held in tensors if not set(held.names).isdisjoint(names)]
    missing = [held for held in mine if held.key is None and held.tensor.is_meta]
    if missing and init_fn is None:
        _raise_without_init_fn(missing, weights)
    new = {id(held.tensor): _real(held, device) for held in missing}
    replace_tensors(model, new)
    if missing and init_fn is not None:
        initialise(model, {held.names: new[id(held.tensor)] for held in missing}, init_fn, seed, device)
    found = [held for held in mine if held.key is not None and held.tensor.is_meta]
    new |= {id(held.tensor): _real(held, device) for held in found}
    replace_tensors(model, new)
    loaded = [held for held in mine if held.key is not None]
    for held in loaded:
        assert weights is not None
        assert held.key is not None
        weights.read_into(held.key, new.get(id(held.tensor), held.tensor).detach())
    return Materialised(
        tuple(held.names[0] for held in loaded),
        tuple(held.names[0] for held in missing),
        tuple((held.tensor, new[id(held.tensor)]) for held in mine if id(held.tensor) in new),
    )


def replace_tensors(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Puts ``new[id(tensor)]`` in the place of each parameter and buffer, wherever the module holds it."""
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in list(table.items()):
                if id(tensor) in new:
                    setattr(submodule, name, new[id(tensor)])  # by its setter: nn.LSTM, for one, keeps a list as well


def check_no_meta(module: nn.Module, stage: str) -> None:
    """RunError where a stage's module still holds a tensor without values, which no name of the model leads to."""
    for name, tensor in all_tensors(module).items():
        if tensor.is_meta:
            raise RunError(
                f"stage {stage} uses a tensor of shape {list(tensor.shape)} ({name}) that is on the meta device, and "
                "is no parameter or buffer of the model, so that nothing can give it values; register_buffer it"
            )


def weights_of(checkpoint: str | os.PathLike[str] | Weights | None) -> Weights | None:
    """What ``compile(checkpoint=)`` was given, opened."""
    return checkpoint if checkpoint is None or isinstance(checkpoint, Weights) else Weights.open(checkpoint)


# --- what there is, and what the checkpoint has of it


def _tensors_of(model: nn.Module, weights: Weights | None) -> list[_HeldTensor]:
    """Every tensor of the model once, in its order."""
    known = frozenset(weights.names) if weights is not None else frozenset()
    tensors: dict[int, Tensor] = {}
    names: dict[int, list[str]] = {}
    for name, tensor in all_tensors(model).items():
        tensors[id(tensor)] = tensor
        names.setdefault(id(tensor), []).append(name)
    return [
        _HeldTensor(
            tensor,
            tuple(names[key]),
            next((name for name in names[key] if name in known), None),
            any(_is_saved(model, name) for name in names[key]),
        )
        for key, tensor in tensors.items()
    ]


def _is_saved(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(path)._non_persistent_buffers_set


def _check_complete(tensors: Sequence[_HeldTensor], weights: Weights, init_fn: InitFn | None) -> None:
    """CheckpointError where the checkpoint does not fit; a warning of what it lacks and ``init_fn`` will make."""
    for held in tensors:
        if held.key is not None:
            weights.check_fits(held.key, held.names[0], held.tensor)
    saved = [held for held in tensors if held.is_saved]
    absent = [held.names[0] for held in saved if held.key is None]
    if not absent:
        return
    borne = {name for held in tensors for name in held.names}
    others = [name for name in weights.names if name not in borne]
    lacking = f"{weights.path} lacks {len(absent)} of the model's {len(saved)} tensors, first {absent[0]!r}"
    if init_fn is None or len(absent) == len(saved):
        remedy = "where only the names differ, write checkpoint=fxpipe.Weights.open(path, rename=...)"
        if init_fn is None:
            remedy += "; init_fn= makes what a checkpoint lacks"
        raise CheckpointError(f"{lacking}{likeliest(absent[0], others)}; {remedy}")
    if is_teller():
        unused = f"; {len(others)} of its own are not used, first {others[0]!r}" if others else ""
        made = "init_fn makes those on the meta device, others stay as they are"
        warnings.warn(f"{lacking}; {made}{unused}", stacklevel=3)


def _raise_without_init_fn(missing: Sequence[_HeldTensor], weights: Weights | None) -> None:
    if weights is None:
        raise RunError(
            f"{missing[0].names[0]} is on the meta device, and nothing says what its values are; pass checkpoint=, or "
            "init_fn= (model._init_weights for a Hugging Face model, fxpipe.reset_parameters for modules of torch.nn)"
        )
    raise RunError(
        f"{missing[0].names[0]} is a buffer on the meta device that no checkpoint holds (persistent=False); pass "
        "init_fn= as well (model._init_weights for a Hugging Face model)"
    )


# --- new tensors


def _real(held: _HeldTensor, device: torch.device) -> Tensor:
    """A tensor like one on the meta device, with memory; its values are anything."""
    meta = held.tensor
    if has_hooks(meta):
        raise RunError(f"{held.names[0]} is on the meta device and has a hook, which would be lost; register it later")
    tensor = torch.empty_like(meta, device=device, requires_grad=False)
    if isinstance(meta, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
    tensor.__dict__.update(meta.__dict__)
    return tensor
