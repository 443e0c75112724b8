"""Plain data: values that a file can hold and give back without running anything, as JSON with tensors beside it.

>>> import torch
>>> to_plain({"epoch": 3, 7: (b"a", None)}, "extra")
({'dict': [['epoch', 3], [7, {'tuple': [{'bytes': 'YQ=='}, None]}]]}, {})
>>> from_plain(*to_plain({"best": torch.tensor(0.5)}, "extra"))
{'best': tensor(0.5000)}
"""

from __future__ import annotations

import base64
import enum
import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.parameters.dtensors import description_of, is_dtensor, local
from fxpipe.torch_compat import bytes_of, pytree, tensors_in

PLAIN = "None, bool, int, float, str, bytes, list, tuple, dict with str or int keys, and tensors"

Tree = Any
"""What ``json`` writes: None, bool, int, float, str, list, and dicts of one key, which says what they stand for."""


def to_plain(value: Any, what: str) -> tuple[Tree, dict[str, Tensor]]:
    """A value as JSON and tensors, which have names by their content: equal ones have one.

    Raises:
        CheckpointError: it is not plain data; ``what`` is how it is called there.
    """
    tensors: dict[str, Tensor] = {}
    try:
        return _to_plain(value, what, tensors), tensors
    except RecursionError as error:
        raise CheckpointError(
            f"{what} contains itself, or is nested too deeply to be read again; make it flatter"
        ) from error


def from_plain(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """The value again; ValueError for what ``to_plain`` does not make."""
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
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return {"tensor": _kept(value, what, tensors)}
    # JSON has string keys alone, so that a dict is a list of pairs. OrderedDicts and defaultdicts come back as dicts.
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(f"{what} has the key {key!r}, and a checkpoint holds plain data alone: {PLAIN}")
        kind = "counter" if type(value) is Counter else "dict"  # as MultiStepLR's milestones
        return {kind: [[key, _to_plain(inner, f"{what}[{key!r}]", tensors)] for key, inner in value.items()]}
    if type(value) in (list, tuple):
        inner = [_to_plain(each, f"{what}[{place}]", tensors) for place, each in enumerate(value)]
        return inner if type(value) is list else {"tuple": inner}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise CheckpointError(
        f"{what} is a {kind}, and a checkpoint holds plain data alone: {PLAIN}; convert it, by int(), float(), "
        "list() or state_dict(), say"
    )


def _kept(tensor: Tensor, what: str, tensors: dict[str, Tensor]) -> str:
    tensor = plain_of(tensor, what)
    # Named by its content: a value that all ranks have is written once.
    kept = tensor.detach().to("cpu", copy=True).contiguous()
    digest = hashlib.blake2b(f"{kept.dtype} {list(kept.shape)} ".encode(), digest_size=16)
    digest.update(bytes_of(kept))
    tensors[digest.hexdigest()] = kept
    return digest.hexdigest()


# --- tensors that are no plain ones

_METADATA = bool | int | float | str | torch.dtype | torch.layout | enum.Enum | None


def plain_of(tensor: Tensor, what: str) -> Tensor:
    """A tensor, in its own memory, as a file holds it and gives it back; CheckpointError for one of another kind."""
    kinds = (Tensor, torch.nn.Parameter)
    if type(tensor) not in kinds and not {"__tensor_flatten__", "__create_chunk_list__"} & set(dir(tensor)):
        tensor = tensor.view(tensor.shape)  # plain of a subclass that adds nothing, such as fxpipe's own
    if type(tensor) in kinds and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized):
        return tensor
    raise CheckpointError(
        f"{what} is a {type(tensor).__qualname__} ({tensor.dtype}, {tensor.layout}, {tensor.device}): a checkpoint "
        "holds plain tensors, and subclasses whose __tensor_flatten__ gives these and plain values; convert it"
    )


def in_parts(value: Any, what: str, piece: str = "") -> Any:
    """A value, in dicts and lists, as a checkpoint has it: what is saved, and what is filled.

    A tensor subclass is ``{"<Class metadata piece>": {name: inner tensor}}``, so that only its like finds it again.
    ``piece``: which of a tensor's parts it is; a DTensor says it itself. CheckpointError for what cannot be read again.
    """
    if isinstance(value, Mapping):
        return {key: in_parts(inner, f"{what}.{key}".removeprefix("."), piece) for key, inner in value.items()}
    if type(value) is list:
        return [in_parts(inner, f"{what}.{place}", piece) for place, inner in enumerate(value)]
    if not isinstance(value, Tensor):
        for inner in tensors_in(value):  # of a tuple, which is saved as one value
            plain_of(inner, what)
        return value
    with torch.no_grad():
        held = local(value)
    if hasattr(held, "__create_write_items__"):  # a Slice, which says itself what of it is stored
        return value
    names, metadata = getattr(held, "__tensor_flatten__", lambda: ((), None))()
    words = pytree.tree_map(lambda leaf: "device" if isinstance(leaf, torch.device) else leaf, metadata)
    if not names or not all(isinstance(leaf, _METADATA) for leaf in pytree.tree_leaves(words)):
        plain = plain_of(held, what)
        return value if is_dtensor(value) else plain
    if is_dtensor(value):
        piece = f" {description_of(value)}, at {value.device_mesh.get_coordinate()}"
    inside = {name: in_parts(getattr(held, name), f"{what}.{name}") for name in names}
    return {f"<{type(held).__qualname__} {words}{piece}>": inside}


def is_parts(value: Any) -> bool:
    """Whether a value is what ``in_parts`` makes of a tensor subclass."""
    return isinstance(value, dict) and any(str(key)[:1] == "<" and " " in str(key) for key in value)


def out_of_parts(like: Any, parts: Any, what: str) -> Any:
    """A new tensor like this one, with the values of ``in_parts``."""
    if not hasattr(like, "layout"):  # a DTensor's mesh
        return like
    if not hasattr(like, "__tensor_flatten__"):
        if parts.shape != like.shape:
            raise CheckpointError(f"{what} has shape {list(like.shape)}, the state dict has {list(parts.shape)}")
        return torch.empty_like(like).copy_(parts)
    names, metadata = like.__tensor_flatten__()
    given = dict.fromkeys(names, parts) if is_dtensor(like) else next(iter(parts.values()))
    inner = {name: out_of_parts(getattr(like, name), given[name], what) for name in names}
    return like.__tensor_unflatten__(inner, metadata, like.shape, like.stride())


def pairs(into: Tensor, given: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What is copied for the one to become the other, to the bit: of a subclass its parts, where both are alike."""
    to, source = (getattr(tensor, "__tensor_flatten__", lambda: ((), None))() for tensor in (into, given))
    if type(into) is not type(given) or not to[0] or to != source:
        return [(into, given)]
    return [pair for name in to[0] for pair in pairs(getattr(into, name), getattr(given, name))]
