"""Plain data: values that are written as JSON plus named tensors, and are read again without running any code.

>>> import torch
>>> to_plain({"epoch": 3, 7: (b"a", None)}, "extra")
({'dict': [['epoch', 3], [7, {'tuple': [{'bytes': 'YQ=='}, None]}]]}, {})
>>> from_plain(*to_plain({"best": torch.tensor(0.5)}, "extra"))
{'best': tensor(0.5000)}
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fxpipe.device import bytes_of
from fxpipe.errors import CheckpointError
from fxpipe.tensors.pieces import plain_of
from fxpipe.validation import is_whole

PLAIN = "None, bool, int, float, str, bytes, list, tuple, dict with str or int keys, and tensors"

Tree = Any
"""Values for ``json``: None, bool, int, float, str, list, and dicts with one key, which names the encoded type."""


def to_plain(value: Any, what: str) -> tuple[Tree, dict[str, Tensor]]:
    """A value as JSON, and its tensors by name. A tensor's name is its content's digest: equal tensors share a name.

    Raises:
        CheckpointError: the value is not plain data; the message calls it ``what``.
    """
    tensors: dict[str, Tensor] = {}
    try:
        return _to_plain(value, what, tensors), tensors
    except RecursionError as error:
        raise CheckpointError(
            f"{what} contains itself, or is nested too deeply to be read again; make it flatter"
        ) from error


def from_plain(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuilds the value that ``to_plain`` converted; ValueError for a tree that ``to_plain`` does not make."""
    if isinstance(tree, list):
        return [from_plain(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    match kind:
        case "dict":
            return {key: from_plain(value, tensors) for key, value in inner}
        case "counter":
            return Counter({key: from_plain(value, tensors) for key, value in inner})
        case "tuple":
            return tuple(from_plain(each, tensors) for each in inner)
        case "bytes":
            return base64.b64decode(inner, validate=True)
        case "tensor":
            return tensors[inner].clone()
    raise ValueError(f"{kind!r} is no kind of plain data")


def _to_plain(value: Any, what: str, tensors: dict[str, Tensor]) -> Tree:
    if type(value) in (type(None), bool, int, float, str):
        return value
    if is_whole(value):  # topo.rank, or NumPy's
        return int(value)
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return {"tensor": _name_of(value, what, tensors)}
    # JSON keys are strings, so a dict becomes a list of pairs. OrderedDicts and defaultdicts come back as dicts.
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(f"{what} has the key {key!r}, and a checkpoint holds plain data alone: {PLAIN}")
        kind = "counter" if type(value) is Counter else "dict"  # as MultiStepLR's milestones
        return {kind: [[key, _to_plain(inner, f"{what}[{key!r}]", tensors)] for key, inner in value.items()]}
    if type(value) in (list, tuple):
        inner = [_to_plain(each, f"{what}[{index}]", tensors) for index, each in enumerate(value)]
        return inner if type(value) is list else {"tuple": inner}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise CheckpointError(
        f"{what} is a {kind}, and a checkpoint holds plain data alone: {PLAIN}; convert it, by int(), float(), "
        "list() or state_dict(), say"
    )


def _name_of(tensor: Tensor, what: str, tensors: dict[str, Tensor]) -> str:
    tensor = plain_of(tensor, what)
    # The tensor's name is its content's digest: a tensor that all ranks have is written once.
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    digest = hashlib.blake2b(f"{copy.dtype} {list(copy.shape)} ".encode(), digest_size=16)
    digest.update(bytes_of(copy))
    tensors[digest.hexdigest()] = copy
    return digest.hexdigest()
