"""Kept whole: code of the user's that runs for real in every step, Python and all, as one call in a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.graph.elsewhere import HeldElsewhere
from fxpipe.torch_compat import pytree, version_of

PLAIN_LEAF = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types of what may enter or leave a region beside tensors."""
TENSOR = object()
"""Stands for a tensor among the leaves of a value: of what a region is given, or returns; of a result."""

Asked = Literal["whether it needs a gradient", "how it lies in memory"]
"""What code may ask of a tensor beside its values, its sizes and its type."""


@contextmanager
def unwritten(name: str, received: Any) -> Iterator[None]:
    """RunError where what is inside writes a tensor among those ``received``: in one process the others that use it
    would see that, on several ranks they would not."""
    leaves = [leaf for leaf in pytree.tree_leaves(received) if isinstance(leaf, Tensor) and not leaf.is_inference()]
    before = list(map(version_of, leaves))
    yield
    for leaf, version in zip(leaves, before, strict=True):
        if version_of(leaf) != version:
            raise RunError(
                f"{name} writes into a tensor of shape {list(leaf.shape)} that it is given, and others may use: write "
                "x = x + y in place of x += y, or x = x.clone() before"
            )


class Structure:
    """A value without its tensors: its container, and what is no tensor in it."""

    def __init__(self, value: Any, is_tensor: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor)) -> None:
        leaves, self.spec = pytree.tree_flatten(value)
        self.leaves = tuple(TENSOR if is_tensor(leaf) else leaf for leaf in leaves)
        self.tensors = tuple(leaf for leaf, kind in zip(leaves, self.leaves, strict=True) if kind is TENSOR)

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The value with these in place of its tensors."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if leaf is TENSOR else leaf for leaf in self.leaves], self.spec)

    @property
    def foreign(self) -> Any:
        """What of it can stand in no program, an object say; ``TENSOR`` where there is nothing."""
        return next((leaf for leaf in self.leaves if leaf is not TENSOR and not isinstance(leaf, PLAIN_LEAF)), TENSOR)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and (self.spec, self.leaves) == (other.spec, other.leaves)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(self.filled(["tensor"] * self.leaves.count(TENSOR)))


def kept_in(module: Any) -> Iterator[KeptWhole]:
    """The calls of regions kept whole that a module holds, be it in a part that is checkpointed."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return (part for part in parts if isinstance(part, KeptWhole))


def calls_kept(module: Any) -> bool:
    """Whether a module holds a call of a region that is kept whole."""
    return any(kept_in(module))


class SizeCheck(Protocol):
    """What the code behind a call takes for granted of what it returns."""

    def check(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """RunError where it is not so. ``sizes``: of other tensors."""


class KeptWhole(nn.Module):
    """One call of a region that is kept whole: the tensors that it is given, flat, to those that it returns, flat.

    ``owner``, ``method``: what runs. ``parts``: the modules that it uses. ``given``, ``returned``: what the call was
    seen to be given, and to return, a ``TensorLike`` for each tensor; how many, and what beside them, is a part of the
    capture.
    """

    def __init__(
        self,
        name: str,
        owner: nn.Module,
        method: str,
        parts: dict[str, nn.Module],
        given: Structure,
        returned: Structure,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self.parts._modules.update(parts)
        self.name, self.method = name, method
        self.attributes: frozenset[tuple[str, str]] = frozenset()
        """Those that a region sets, of the ones that it sets or reads: (the path of their module, their name)."""
        self._owner = (owner,)  # in a tuple: it is not a part of this one
        self._given, self._returned = given, returned
        self.guard: SizeCheck | None = None
        """What is checked of what it returns, with sizes that it is given behind its tensors."""
        self.of_one_type = False
        """Whether what comes behind it was captured for the types of what it returned."""
        self.asked: dict[Asked, str] = {}
        """What the code behind it has asked of tensors, and where, in traceback form."""
        self.watch: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is checked of what it changes."""

    def forward(self, *given: Any) -> tuple[Any, ...]:
        count = self._given.leaves.count(TENSOR)
        tensors, sizes = given[:count], given[count:]
        args, kwargs = self._given.filled(tensors)
        with unwritten(self.name, tensors), self.watch():
            returned = Structure(self._run(args, kwargs))
        if returned != self._returned:
            raise RunError(
                f"{self.name}, which is kept whole, returned {returned}, but {self._returned} when the model was "
                "captured, and what comes behind it holds for that alone: return the same containers each time, and a "
                "tensor in place of a number, a word or None that is not always the same; a list with an entry for "
                'each of an input\'s is captured for each number of them by tracer="export"'
            )
        for tensor, seen in zip(returned.tensors, self._returned.tensors, strict=True):
            self._check(tensor, seen)
        if self.guard is not None:
            self.guard.check(returned.tensors, sizes)
        return returned.tensors

    @property
    def owner(self) -> nn.Module:
        """The submodule, or the one whose method it is."""
        return self._owner[0]

    @property
    def is_method(self) -> bool:
        """Whether a method runs of its owner, which then is no part of this module."""
        return self.method != "__call__"

    def _run(self, args: Any, kwargs: Any) -> Any:
        try:
            return getattr(self.owner, self.method)(*args, **kwargs)
        except HeldElsewhere as error:
            error.add_note(
                f"in {self.name}, which is kept whole: a method has the parameters that it was seen to use, and those "
                "that no other stage uses; pass an example in which it calls the submodules that it needs, or keep a "
                "submodule whole"
            )
            raise

    def _check(self, tensor: Tensor, seen: Any) -> None:
        """``seen``: a ``TensorLike``."""
        told = f"{self.name}, which is kept whole, returned a tensor of shape {list(tensor.shape)}"
        if tensor.requires_grad and not seen.requires_grad:
            raise RunError(
                f"{told} that needs a gradient, but was called without gradients when the model was captured, and this "
                "one would be lost: return what is detached"
            )
        if not self.of_one_type:
            return
        if tensor.dtype != seen.dtype:
            raise RunError(
                f"{told} and of {tensor.dtype}, but of {seen.dtype} when the model was captured, and what comes behind "
                "it holds for that alone: return it .to() one type; where steps run inside of torch.autocast, call "
                'compile there, too; or write tracer="symbolic", which follows types'
            )
        if tensor.dim() != len(seen.shape) or (tensor.device.type != seen.device and seen.device != "meta"):
            raise RunError(
                f"{told} on {tensor.device.type}, but one of {len(seen.shape)} dimensions on {seen.device} when the "
                "model was captured, and what comes behind it holds for that alone: return the same each time, or keep "
                "the code whole, too, that tells them apart"
            )
        self._check_asked(told, tensor, seen)

    def _check_asked(self, told: str, tensor: Tensor, seen: Any) -> None:
        """RunError where another thing would be told to the code behind it than the capture was."""
        for asked, line in self.asked.items():
            if asked == "how it lies in memory":
                differs = not _lies_alike(tensor, seen)
            else:
                differs = torch.is_grad_enabled() and tensor.requires_grad != seen.requires_grad
            if differs:
                raise RunError(
                    f"{told}, and code behind it asks of a tensor {asked}, of which the capture has one answer, and "
                    "for this one it is another: keep that code whole, too, or return tensors that are alike in that"
                    f"\n{line}"
                )

    def extra_repr(self) -> str:
        return self.name


def _lies_alike(tensor: Tensor, seen: Any) -> bool:
    """Whether both are contiguous, of whatever sizes, or have the same strides."""
    was = torch.empty_strided(seen.shape, seen.stride, device="meta").is_contiguous()
    return tensor.is_contiguous() if was else tensor.stride() == seen.stride
