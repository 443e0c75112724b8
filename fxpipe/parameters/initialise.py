"""Initialise: values for tensors that no checkpoint holds, by a function that is called on submodules.

``init_fn`` finds memory where it is to write; every other tensor of the model is on the meta device while it runs, so
that neither what other ranks hold nor what has values already can be changed. What ``init_fn``
leaves unwritten is found by the bytes that it did not change.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError, noted
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.parameters.ownership import on_meta
from fxpipe.seeds import seed_from, seed_torch, seeded
from fxpipe.torch_compat import TorchDispatchMode, schema_of, storage_id
from fxpipe.validation import shown

InitFn = Callable[[nn.Module], Any]


def reset_parameters(module: nn.Module) -> None:
    """An ``init_fn`` for modules that know how: those of torch.nn, and whatever has a ``reset_parameters``."""
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

    Those are the ``_init_weights`` of the innermost module around it that has one; without any, ``reset_parameters``.
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


def initialise(
    model: nn.Module, missing: Mapping[tuple[str, ...], Tensor], init_fn: InitFn, seed: int, device: torch.device
) -> None:
    """Calls ``init_fn`` on every submodule around a missing tensor, innermost first, as ``model.apply`` would.

    ``missing``: all names of a tensor → the tensor, which the model holds already. RunError where one is not written.
    """
    for tensor in missing.values():
        mark(tensor)
    around = {path for names in missing for name in names for path in _around(name)}
    with torch.no_grad(), seeded(seed, device), _only(model, missing.values()):
        for path, submodule in _innermost_first(model):
            if path in around:
                with _told(submodule, path), _tensors_kept(submodule), _SeededWrites(submodule, seed, path, device):
                    init_fn(submodule)
    for names, tensor in missing.items():
        _check_written(model, names[0], tensor)


def _told(submodule: nn.Module, path: str) -> contextlib.AbstractContextManager[None]:
    """Adds to an error of ``init_fn`` what it was called on."""
    return noted(
        lambda: (
            f"init_fn was called on the {type(submodule).__name__} {path!r}; of its tensors, those that have values "
            "already or are with other ranks are on the meta device"
        )
    )


def _around(name: str) -> Iterator[str]:
    """The paths of the modules around a tensor: ``a.b``, ``a`` and the root for ``a.b.weight``."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _innermost_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule once, by its first path, in the order of ``Module.apply``."""
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        seen.add(id(module))
        for name, child in module.named_children():
            if id(child) not in seen:
                yield from walk(child, f"{path}.{name}" if path else name)
        yield path, module

    return walk(model, "")


def _check_written(model: nn.Module, name: str, tensor: Tensor) -> None:
    unwritten = marks_left(tensor)
    if not unwritten:
        return
    path = name.rpartition(".")[0]
    holder = type(model.get_submodule(path)).__name__
    count = tensor.numel()
    how_much = "" if unwritten == count else f" all of its {count} numbers, {unwritten} are missing in"
    raise RunError(
        f"init_fn has not written{how_much} {name} of shape {list(tensor.shape)}, which no checkpoint holds either; "
        f"init_fn is called on the {holder} {path!r} that holds it, and must fill it there"
    )


# --- random numbers


class _SeededWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Starts random numbers anew before and after each write of a tensor of the model, by which write of which it is.

    Without it, a write of a tensor of another rank, which is on the meta device, would draw nothing, and those after
    it would draw other numbers than where that rank is this one.
    """

    def __init__(self, model: nn.Module, seed: int, path: str, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {storage_id(tensor): name for name, tensor in reversed(all_tensors(model).items())}
        self._key = struct.pack("<Q", seed % 2**64) + path.encode()
        self._device = device
        self._writes: dict[str, int] = {}
        self._start("", 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        written = args[0] if args and schema_of(func).is_mutable else None
        name = self._names.get(storage_id(written)) if isinstance(written, Tensor) else None
        if name is None:
            return func(*args, **(kwargs or {}))
        count = self._writes[name] = self._writes.get(name, 0) + 1
        self._start(name, 2 * count)
        result = func(*args, **(kwargs or {}))
        self._start(name, 2 * count + 1)
        return result

    def _start(self, name: str, count: int) -> None:
        seed_torch(seed_from(self._key + f" {name} {count}".encode()), self._device)


# --- which tensors init_fn may write


def _held(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Where each parameter and buffer is held: (module, attribute, tensor)."""
    return [
        (submodule, name, tensor)
        for submodule in module.modules()
        for table in (submodule._parameters, submodule._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


@contextlib.contextmanager
def _only(model: nn.Module, tensors: Any) -> Iterator[None]:
    """While it is open, all real tensors but these are out of the model, and meta tensors in their place."""
    kept = {id(tensor) for tensor in tensors}
    hidden = [place for place in _held(model) if not place[2].is_meta and id(place[2]) not in kept]
    stand_ins = {id(tensor): on_meta(tensor) for _, _, tensor in hidden}
    try:
        for module, name, tensor in hidden:
            setattr(module, name, stand_ins[id(tensor)])
        yield
    finally:
        for module, name, tensor in hidden:
            setattr(module, name, tensor)


@contextlib.contextmanager
def _tensors_kept(submodule: nn.Module) -> Iterator[None]:
    """Where ``init_fn`` assigns a new tensor, the values go into the one that was there: it may be tied, or cast."""
    places = _held(submodule)
    yield
    for module, name, tensor in places:
        new = getattr(module, name)
        if new is tensor:
            continue
        if new.shape != tensor.shape:
            raise RunError(
                f"init_fn put a tensor of shape {list(new.shape)} in the place of {type(module).__name__}.{name}, "
                f"which has {list(tensor.shape)}; build the model with the shapes that it is to have"
            )
        if not tensor.is_meta and not new.is_meta:
            tensor.copy_(new)
        setattr(module, name, tensor)


_PIECE = 2**20  # numbers that are looked at at a time
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def mark(tensor: Tensor) -> None:
    """Fills a tensor with what no ``init_fn`` writes: a NaN that no operation makes, or an odd integer."""
    words = _words(tensor)
    if words.numel():
        words.fill_(_mark_of(tensor, words))


def marks_left(tensor: Tensor) -> int:
    """How many numbers of a marked tensor nobody has written since.

    Small integers and 8-bit floats use every pattern of bits: there it is all of them, or none.
    """
    words = _words(tensor)
    wanted = _mark_of(tensor, words)
    left = sum(int(torch.count_nonzero(piece == wanted)) for piece in torch.split(words, _PIECE))
    return 0 if left < len(words) and not _is_sure(tensor) else -(-left * tensor.numel() // max(len(words), 1))


def _words(tensor: Tensor) -> Tensor:
    """A tensor's memory as integers of its numbers' size, in a row, whatever its strides are."""
    is_dense = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    row = tensor.detach().as_strided((tensor.numel(),), (1,)) if is_dense else tensor.detach().reshape(-1)
    return row.view(_WORDS[tensor.element_size()])


def _mark_of(tensor: Tensor, words: Tensor) -> int:
    if tensor.is_floating_point() or tensor.is_complex():
        return 255 if words.dtype == torch.uint8 else -1  # every bit set
    return int.from_bytes(b"\xa5" * words.element_size(), signed=words.dtype != torch.uint8)


def _is_sure(tensor: Tensor) -> bool:
    """Whether no single number can be taken for a mark: small integers and 8-bit floats use all their patterns."""
    size = tensor.element_size()
    return tensor.dtype == torch.bool or size >= 4 or (size == 2 and tensor.is_floating_point())
