"""Facts: what a capture depends on and no operator shows: what was asked for, the model's tensors, the sources."""

from __future__ import annotations

import functools
import hashlib
import linecache
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import RunError
from fxpipe.graph.plain_data import encode
from fxpipe.torch_compat import pytree
from fxpipe.trace.cached.not_kept import NotKept
from fxpipe.trace.request import Request
from fxpipe.trace.snapshot import storage_of


@functools.cache
def versions() -> dict[str, str]:
    """What reads and makes captures. ``sources``: a hash of fxpipe's own, for what a graph means is told by all."""
    try:
        version = metadata.version("fxpipe")
    except metadata.PackageNotFoundError:
        version = "unknown"
    own = sorted(Path(__file__).parents[2].rglob("*.py"))
    return {
        "fxpipe": version,
        "sources": _hash(b"".join(path.read_bytes() for path in own))[:12],
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def facts(request: Request) -> list[str]:
    """A capture that was asked for otherwise, or of other modules and tensors, is another one."""
    asked = (request.training, request.autocast, request.compute, str(request.device), dict(request.cuts))
    return [
        f"{asked} {request.inputs}",
        *_values(request),
        *(
            f"{path!r} {type(module).__module__}.{type(module).__qualname__} {module.training}"
            for path, module in request.module.named_modules(remove_duplicate=False)
        ),
        *_tensors(request.module),
    ]


def sources(files: Iterable[str]) -> list[str]:
    """These files, with a hash of what is in each."""
    return [f"{name} {_content(name)}" for name in sorted(files)]


def _content(name: str) -> str:
    try:
        return _hash(Path(name).read_bytes())
    except OSError:  # a notebook's cell
        return _hash("".join(linecache.getlines(name)).encode("utf-8", "surrogatepass"))


def _values(request: Request) -> Iterator[str]:
    """Inputs, and those whose value is a part of the program; with ``TensorLike`` for tensors. NotKept for objects."""
    for kind, values in (("fixed", request.fixed), ("example", request.example or {})):
        for name, value in values.items():
            leaves, spec = pytree.tree_flatten(value)
            try:
                yield f"{kind} {name!r} {spec} {encode(leaves)!r}"
            except RunError:
                raise NotKept(f"input {name!r} holds an object") from None


def _tensors(module: nn.Module) -> Iterator[str]:
    """Parameters and buffers; those that are one, or share memory, bear the number of the first."""
    first: dict[Any, int] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for number, (name, tensor) in enumerate(named):
        one = first.setdefault(("tensor", id(tensor)), number)
        memory = first.setdefault(("memory", storage_of(tensor) or id(tensor)), number)
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__} {tensor.dtype} {tensor.device}"
        layout = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"
        yield f"{name!r} {one} {memory} {kind} {layout} {tensor.requires_grad}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
