"""Descriptions: a call's inputs without their tensors' numbers, in the form that ranks send to each other.

Takes: the arguments of a call. Gives: ``Description``, (name, ``InputDescription``) for each input, which compares
equal for inputs of one kind.

1. ``bind`` gives each argument its name.
2. ``described`` sorts an input into one of three kinds. "none" is None. "fixed" is a value on which code may branch,
   such as a bool or a string. "input" is anything else.
3. In an "input", a tensor becomes a ``TensorSpec`` (shape, strides, dtype, device). A number becomes its type, or, if
   ``exact``, its value, too. An object becomes an ``ObjectValue`` or ``ObjectSpec``.
4. ``merge`` joins the descriptions of a pipe group's ranks: a rank may pass None for an input that it does not read.

For example, ``{"x": zeros(8, 3), "flag": True, "extra": None}`` has the kinds input, fixed and none.

It reads no number of a tensor, so it does not wait for a GPU.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.batch.objects import PLAIN, spec_of
from fxpipe.device import shared_name
from fxpipe.errors import RunError, TraceError
from fxpipe.plain_data import admitted
from fxpipe.specs import WORD, ObjectSpec, ObjectValue, TensorSpec
from fxpipe.torch_compat import pytree
from fxpipe.validation import is_list, is_mapping, shown

_FIXED = (bool, str, bytes, torch.dtype, torch.device)
_BY_IDENTITY = tuple((type(value).__name__, repr(value)) for value in (None, True, False))
"""The descriptions of the values that code compares by ``is``."""


@admitted
@dataclass(frozen=True)
class InputDescription:
    """A rank's input. ``kind``: "none", "fixed" (a value that code may branch on) or "input".

    ``detail``: a fixed value, or its ``ObjectValue``; for an "input", its container and leaves: a ``TensorSpec`` for a
    tensor; the type, or the type and value, for a Python value. ``spec``: the input with a ``TensorSpec`` in place of
    each tensor.
    """

    kind: str
    detail: Any = None
    spec: Any = field(default=None, compare=False)

    @property
    def tensors(self) -> list[TensorSpec]:
        """The descriptions of the tensors in an "input", in order; empty for other kinds."""
        leaves = self.detail[1] if self.kind == "input" else ()
        return [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]

    @property
    def fixed_leaves(self) -> tuple[Any, ...]:
        """The description of each leaf that is an object, None or a truth value; None for other leaves, and for objects
        with tensors none of whose attributes is None."""

        def is_fixed(leaf: Any) -> bool:
            return isinstance(leaf, ObjectValue) or (isinstance(leaf, ObjectSpec) and bool(leaf.absent))

        return tuple(leaf if is_fixed(leaf) or leaf in _BY_IDENTITY else None for leaf in self.detail[1])

    @property
    def has_names(self) -> bool:
        """Whether the input is, or holds, a container with named items, any of which may be absent or None."""
        parts = self.spec if isinstance(self.spec, (list, tuple)) else [self.spec]
        return self.kind == "input" and any(not pytree.tree_is_leaf(part) for part in parts)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of these tensors."""
        return [tensor.shape for tensor in self.tensors]


Description = tuple[tuple[str, InputDescription], ...]


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's inputs by name, in the order of the signature; TypeError as Python itself would raise it.

    Also TypeError for inputs that ``*args`` takes, since these inputs have no names.
    """
    # 1. names for positional arguments, too
    bound = signature.bind_partial(*args, **kwargs).arguments
    values: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise TypeError(
                f"forward takes *{name}, and {len(value)} inputs were given by place, which have no name by which "
                "stages could ask for them; pass every input by its name, as in input_ids=..."
            )
        if kind is inspect.Parameter.VAR_KEYWORD:
            values |= dict(sorted(value.items()))
        else:
            values[name] = value
    required = required_names(signature)
    missing = [name for name in required if name not in values]
    if missing:
        raise TypeError(f"missing inputs: {', '.join(missing)}")
    return values


def check_calls(calls: Any) -> None:
    """TypeError unless ``calls`` is a list of micro-batches, (args, kwargs) each."""
    if not is_list(calls):
        raise TypeError(f"microbatches is {shown(calls)}; it is a list of (args, kwargs)")
    for call in calls:
        if not (isinstance(call, (tuple, list)) and len(call) == 2 and is_list(call[0]) and is_mapping(call[1])):
            raise TypeError(f"a micro-batch is (args, kwargs), as in ((x, y), {{}}), and this one is {shown(call)}")


def required_names(signature: inspect.Signature) -> list[str]:
    """The inputs that every call must give."""
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def describe(
    values: Mapping[str, Any], exact: bool = False, objects: dict[ObjectValue, Any] | None = None
) -> Description:
    """The description of inputs. ``exact``: whether it includes the values of Python's numbers, on which a capture may
    depend. ``objects``: a dict to which the objects among the inputs are added."""
    return tuple((name, described(value, exact, objects)) for name, value in values.items())


def described(value: Any, exact: bool, objects: dict[ObjectValue, Any] | None = None) -> InputDescription:
    """The description of an input, whose tensors may already be ``TensorSpec``."""
    # 2. the kind
    if value is None:
        return InputDescription("none")
    if type(value) in _FIXED:
        return InputDescription("fixed", value)
    # 3. ``detail`` has all facts on which a capture may depend, and is compared; ``spec`` is split as the input is.
    leaves, tree = pytree.tree_flatten(value)
    specs = [_spec(leaf, objects) for leaf in leaves]
    if tree.is_leaf() and isinstance(specs[0], ObjectValue):
        return InputDescription("fixed", specs[0])
    described = tuple(leaf if isinstance(leaf, TensorSpec) else _named(leaf, exact) for leaf in specs)
    try:
        spec = specs[0] if tree.is_leaf() else pytree.tree_unflatten(specs, tree)
    except Exception as error:  # a container that checks its contents, such as PackedSequence
        raise RunError(
            f"an input is a {type(value).__name__}, which cannot be made of anything but true tensors; pass its "
            f"tensors, and make it of them in forward ({type(error).__name__}: {error})"
        ) from error
    return InputDescription("input", ("" if tree.is_leaf() else str(tree), described), spec)


def _spec(leaf: Any, objects: dict[ObjectValue, Any] | None) -> Any:
    """The stand-in of a leaf; itself for a plain value. Adds objects to ``objects``, by their stand-ins."""
    if isinstance(leaf, Tensor):
        return TensorSpec.from_tensor(leaf)
    # NumPy numbers are described as Python numbers
    leaf = leaf.item() if isinstance(leaf, numbers.Number) and hasattr(leaf, "item") else leaf
    if isinstance(leaf, (TensorSpec, ObjectSpec, ObjectValue)) or type(leaf) in PLAIN:
        return leaf
    # Ranks cannot send objects to each other.
    spec = spec_of(leaf)
    if objects is not None and isinstance(spec, ObjectValue):
        objects[spec] = leaf
    return spec


def _named(leaf: Any, exact: bool) -> Any:
    """The type of a leaf that is no tensor, with its ``repr``, by which 1, 1.0 and True differ, if ``exact``, and for
    None and truth values. An object's stand-in is returned unchanged."""
    if isinstance(leaf, (ObjectSpec, ObjectValue)):
        return leaf
    name = type(leaf).__name__
    value = shared_name(leaf) if isinstance(leaf, torch.device) else repr(leaf)
    is_exact = (name, value) in _BY_IDENTITY or (exact and isinstance(leaf, PLAIN))
    return (name, value) if is_exact else name


def example_of(description: Description) -> dict[str, Any]:
    """The inputs that are neither None nor fixed, with a ``TensorSpec`` in place of each tensor."""
    return {name: entry.spec for name, entry in description if entry.kind == "input"}


def for_any_words(description: Description) -> Description:
    """The description with a ``WORD`` in place of each string in a container."""

    def without(leaf: Any) -> Any:
        return WORD if leaf == "str" or (isinstance(leaf, tuple) and leaf[0] == "str") else leaf

    return tuple(
        (name, replace(entry, detail=(entry.detail[0], tuple(map(without, entry.detail[1])))))
        if entry.kind == "input"
        else (name, entry)
        for name, entry in description
    )


def known_by_type(description: Description) -> Iterator[str]:
    """The names of inputs that have a leaf whose description is only its type."""
    for name, entry in description:
        if entry.kind == "input" and any(type(leaf) is str for leaf in entry.detail[1]):
            yield name


def check_objects(description: Description) -> None:
    """TraceError for an object on which forward may branch, and whose value is not known."""
    for name, entry in description:
        for leaf in entry.detail[1] if entry.kind == "input" else ():
            if isinstance(leaf, ObjectSpec) and not leaf.is_data:
                raise TraceError(
                    f"input {name!r} is or holds {leaf}, which is neither a tensor nor plain data, and of which fxpipe "
                    "cannot see whether another one is equal to it, on another rank or in a later call; pass tensors, "
                    "numbers, strings, an Enum's member or a dataclass of these, or make it an attribute of the model"
                )


def merge(descriptions: Sequence[Description]) -> Description:
    """The merged description of the inputs of a pipe group's ranks. RunError if the inputs of two ranks differ."""
    # 4. A rank may pass None for an input that its stages do not read.
    merged: dict[str, tuple[int, InputDescription]] = {}
    for rank, description in enumerate(descriptions):
        for name, entry in description:
            first, its = merged.get(name, (rank, entry))
            if its.kind == "none" or name not in merged:
                merged[name] = rank, entry
            elif entry.kind != "none" and _kind(entry) != _kind(its):
                raise RunError(
                    f"input {name!r} differs between the ranks of a pipe group: rank {first} has "
                    f"{its.shapes or its.detail}, rank {rank} has {entry.shapes or entry.detail}; all of "
                    "them pass the same batch"
                )
    return tuple((name, entry) for name, (_, entry) in merged.items())


def _kind(entry: InputDescription) -> Any:
    """The facts of an input that must be equal on all ranks: all facts except its tensors' devices and strides."""
    if entry.kind != "input":
        return entry
    container, leaves = entry.detail
    return container, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, TensorSpec) else leaf for leaf in leaves)
