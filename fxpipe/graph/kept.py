"""Kept whole: code of the user's that runs for real in every step, Python and all, as one call in a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.torch_compat import pytree, version_of

PLAIN_LEAF = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types of what may enter or leave a region beside tensors."""
TENSOR = object()
"""Stands for a tensor among the leaves of what a region is given, or returns."""


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


def calls_kept(module: Any) -> bool:
    """Whether a module holds a call of a region that is kept whole, be it in a part that is checkpointed."""
    return isinstance(module, nn.Module) and any(isinstance(part, KeptWhole) for part in module.modules())


class SizeCheck(Protocol):
    """What the code behind a call takes for granted of what it returns."""

    def check(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """RunError where it is not so. ``sizes``: of other tensors."""


class KeptWhole(nn.Module):
    """One call of a region that is kept whole: the tensors that it is given, flat, to those that it returns, flat.

    ``owner``, ``method``: what runs. ``parts``: the modules that it uses. ``given``, ``returned``: what the call was
    seen to be given, and to return; how many tensors, and what beside them, is a part of the capture.
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

    def forward(self, *given: Any) -> tuple[Any, ...]:
        count = self._given.leaves.count(TENSOR)
        tensors, sizes = given[:count], given[count:]
        args, kwargs = self._given.filled(tensors)
        with unwritten(self.name, tensors):
            returned = Structure(self._run(args, kwargs))
        if returned != self._returned:
            raise RunError(
                f"{self.name}, which is kept whole, returned {returned}, but {self._returned} when the model was "
                "captured, and what comes behind it holds for that alone: return the same containers each time, and a "
                "tensor in place of a number, a word or None that is not always the same"
            )
        if self.guard is not None:
            self.guard.check(returned.tensors, sizes)
        return returned.tensors

    def _run(self, args: Any, kwargs: Any) -> Any:
        try:
            return getattr(self._owner[0], self.method)(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise RunError(
                f"{self.name}, which is kept whole, uses what has no numbers here ({error}): parameters, it seems, "
                "that it did not use in the run before, and that are with other stages, or none; name what it may use, "
                f'boundaries={{"{self.name}": {{"whole": None, "uses": ["model.visual"]}}}}'
            ) from error

    def extra_repr(self) -> str:
        return self.name
