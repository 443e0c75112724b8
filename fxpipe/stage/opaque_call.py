"""Opaque call: the user's own Python code, which runs in every step as a single call in a stage."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.specs import TensorSpec
from fxpipe.stage.elsewhere import ElsewhereError
from fxpipe.stage.listed import ListOfTensors, can_be_joined, joined
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.tensors import tensors_in, version_of

PLAIN_LEAF = (
    *(type(None), bool, int, float, complex, str, bytes, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types of the values, other than tensors, that a graph stores as constants, and that may enter or leave a region."""
TENSOR = object()
"""Represents a tensor among the leaves of a region's arguments or results."""


@contextmanager
def unwritten(name: str, received: Any) -> Iterator[None]:
    """Raises RunError if the code inside writes a tensor of ``received``: in one process other users of the tensor
    would see the write, on several ranks they would not."""
    # torch counts the writes into a tensor, except a tensor made in inference mode
    leaves = [tensor for tensor in tensors_in(received) if not tensor.is_inference()]
    before = list(map(version_of, leaves))
    yield
    for leaf, version in zip(leaves, before, strict=True):
        if version_of(leaf) != version:
            raise RunError(
                f"{name} writes into a tensor of shape {list(leaf.shape)} that it is given, and others may use: write "
                "x = x + y in place of x += y, or x = x.clone() before"
            )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, TensorSpec))


class Structure:
    """A value without its tensors: its container, and its leaves that are no tensors.

    A list of described tensors that can be concatenated is one leaf, a ``ListOfTensors``. ``tensors`` then has the
    concatenation of the list, followed by each of its tensors. ``line``: see ``ListOfTensors``.
    """

    def __init__(
        self, value: Any, is_tensor: Callable[[Any], bool] = _is_tensor, line: Callable[[], str] = str
    ) -> None:
        parts, self.spec = pytree.tree_flatten(value, is_leaf=can_be_joined)
        self.leaves: list[Any] = []
        self.tensors: list[Any] = []
        for part in parts:
            leaf = part
            if can_be_joined(part):
                leaf = ListOfTensors(type(part), len(part), len(part[0].shape), line)
                self.tensors += [joined(part), *part]
            elif is_tensor(part):
                leaf = TENSOR
                self.tensors.append(part)
            self.leaves.append(leaf)

    def filled(
        self, tensors: Sequence[Any], lists: Callable[[ListOfTensors, list[Any]], Any] = ListOfTensors.stands_for
    ) -> Any:
        """Returns the value with these tensors in place of its own. ``lists``: returns the value for a list."""
        values = iter(tensors)

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, ListOfTensors):
                return lists(leaf, list(islice(values, 1 + leaf.count)))
            return next(values) if leaf is TENSOR else leaf

        return pytree.tree_unflatten(list(map(fill, self.leaves)), self.spec)

    def of_another(self, value: Any) -> list[Tensor | None] | None:
        """Returns the tensors of a value of this structure, with None for a tensor that the capture does not use; None
        if the value has another structure."""
        try:
            # a rebuilt container of transformers has its entries in the order of its fields, as the structure has
            parts = self.spec.flatten_up_to(pytree.tree_map(lambda leaf: leaf, value))
        except ValueError:
            return None
        tensors = [_tensors_in(leaf, part) for leaf, part in zip(self.leaves, parts, strict=True)]
        return None if None in tensors else list(chain.from_iterable(tensors))  # type: ignore[arg-type]

    def foreign(self, allowed: Container[int] = ()) -> Any:
        """Returns a leaf that cannot be in a program, such as an object; ``TENSOR`` if there is none. ``allowed``: the
        identities of objects that can be in a program."""
        others = (leaf for leaf in self.leaves if leaf is not TENSOR and not isinstance(leaf, PLAIN_LEAF))
        return next((leaf for leaf in others if id(leaf) not in allowed), TENSOR)

    def __str__(self) -> str:
        return str(self.filled(["tensor"] * len(self.tensors), lists=lambda leaf, entries: leaf.kind(entries[1:])))


def _tensors_in(leaf: Any, part: Any) -> Sequence[Tensor | None] | None:
    """Returns the tensors in a part of a value; None if the part does not match the structure's leaf."""
    if isinstance(leaf, ListOfTensors):
        return leaf.flat(part)
    if leaf is TENSOR:
        return [part] if isinstance(part, Tensor) else None
    return [] if part is leaf or (not isinstance(part, Tensor) and part == leaf) else None


def opaque_calls(module: Any) -> Iterator[OpaqueCall]:
    """Yields the calls of opaque regions that a module holds, also those in a checkpointed part."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return (part for part in parts if isinstance(part, OpaqueCall))


def has_opaque_calls(module: Any) -> bool:
    """Whether a module holds a call of an opaque region."""
    return any(opaque_calls(module))


class SizeCheck(Protocol):
    """A check of the results of a call, on whose sizes the code after the call relies."""

    def check(self, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        """Raises RunError if the check fails. ``sizes``: the sizes of other tensors."""


class OpaqueCall(nn.Module):
    """A call of an opaque region, from flat argument tensors to flat result tensors.

    ``owner``, ``method``: the module and the method that run. ``parts``: the modules that the method uses.
    ``arguments``, ``returned``: the values at capture, with a ``TensorSpec`` for each tensor; the number of tensors,
    and all other values, are part of the capture.
    """

    def __init__(
        self,
        name: str,
        owner: nn.Module,
        method: str,
        parts: dict[str, nn.Module],
        arguments: Structure,
        returned: Structure,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self.parts._modules.update(parts)
        self.name, self.method = name, method
        self.overwrites: list[int] = []
        """The indices of the tensor arguments into which the call writes."""
        self.attributes: frozenset[tuple[str, str]] = frozenset()
        """The attributes that a region sets, of those that it sets or reads: (the path of their module, their name)."""
        self.varies = True
        """Whether the results may have other sizes in each step."""
        self._owner = (owner,)  # in a tuple, or nn.Module would register it as a submodule
        self._arguments, self._returned = arguments, returned
        self.guard: SizeCheck | None = None
        """The check of the results, and of the sizes that follow the tensors among the arguments."""
        self.of_one_type = False
        """Whether the code after the call was captured for the types of its results."""
        self.watch: Callable[[], AbstractContextManager[None]] = nullcontext
        """The check of the changes that the call makes."""

    def forward(self, *values: Any) -> tuple[Any, ...]:
        # the sizes for the guard follow the tensors
        count = self._arguments.leaves.count(TENSOR)
        tensors, sizes = values[:count], values[count:]
        args, kwargs = self._arguments.filled(tensors)
        others = [tensor for index, tensor in enumerate(tensors) if index not in self.overwrites]
        with unwritten(self.name, others), self.watch():
            returned = self._run(args, kwargs)
        results = self._returned.of_another(returned)
        if results is None:
            lines = [listing.opened_at for listing in self.opened if listing.opened_at]
            opened_at = "\n".join([", and this code looks at entries:", *lines]) if lines else ""
            raise RunError(
                f"{self.name}, an opaque region, returned {Structure(returned)}, but {self._returned} when the model "
                "was captured, and what comes behind it holds for that alone: return the same containers each time, "
                "and a tensor in place of a number, a word or None that changes; a list may have any length where the "
                'code behind concatenates it, torch.cat(list), or where tracer="export" sees its length in an input\'s '
                f"size{opened_at}"
            )
        for tensor, seen in zip(results, self._returned.tensors, strict=True):
            if tensor is not None:
                self._check(tensor, seen)
        if self.guard is not None:
            self.guard.check(results, sizes)
        return tuple(results)

    @property
    def uses(self) -> list[bool]:
        """Whether the code after the call uses each result tensor, according to the finished capture."""
        leaves = (leaf for leaf in self._returned.leaves if leaf is TENSOR or isinstance(leaf, ListOfTensors))
        return [use for leaf in leaves for use in (leaf.uses if isinstance(leaf, ListOfTensors) else [True])]

    @property
    def opened(self) -> list[ListOfTensors]:
        """The returned lists whose entries forward looks at."""
        return [leaf for leaf in self._returned.leaves if isinstance(leaf, ListOfTensors) and leaf.opened]

    @property
    def owner(self) -> nn.Module:
        """The submodule that is called, or the module whose method is called."""
        return self._owner[0]

    @property
    def is_method(self) -> bool:
        """Whether the call runs a method of its owner; then the owner is no submodule of this module."""
        return self.method != "__call__"

    def _run(self, args: Any, kwargs: Any) -> Any:
        try:
            return getattr(self.owner, self.method)(*args, **kwargs)
        except ElsewhereError as error:
            error.add_note(
                f"in {self.name}, an opaque region: a method has the parameters that it was seen to use, and those "
                "that no other stage uses; pass an example in which it calls the submodules that it needs, or keep a "
                "submodule whole"
            )
            raise

    def _check(self, tensor: Tensor, seen: Any) -> None:
        """``seen``: a ``TensorSpec``."""
        result = f"{self.name}, an opaque region, returned a tensor of shape {list(tensor.shape)}"
        if tensor.requires_grad and not seen.requires_grad:
            raise RunError(
                f"{result} that needs a gradient, but was called without gradients when the model was captured, and "
                "this one would be lost: return what is detached"
            )
        # the tracers record and export chose operators by type, device and dimensions; symbolic did not look at these
        moved = tensor.device.type != seen.device and seen.device != "meta"
        if self.of_one_type and (moved or tensor.dtype != seen.dtype or tensor.dim() != len(seen.shape)):
            raise RunError(
                f"{result} and of {tensor.dtype} on {tensor.device.type}, but of {len(seen.shape)} dimensions and of "
                f"{seen.dtype} on {seen.device} when the model was captured, and what comes behind it holds for that "
                "alone: return the same each time; where steps run inside of torch.autocast, call compile there, too; "
                'keep the code whole that distinguishes them; or write tracer="symbolic", which follows types'
            )

    def extra_repr(self) -> str:
        return self.name
