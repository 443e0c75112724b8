"""Batch digest: for each input of a call a number, equal where all its values are equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.parameters.dtensors import local
from fxpipe.plan.plan import digest_of
from fxpipe.torch_compat import pytree

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_A_TIME = 2**18
"""How many elements are worked on at a time, which bounds the memory that a digest takes beside the batch."""
_PLAIN = (bool, int, float, complex, str, bytes)
"""Python values that ``repr`` distinguishes."""


class Digest:
    """The numbers of a call's inputs, on their way to the host: making one waits for no device.

    A tensor's is Σ bits_i · w_i modulo 2⁶⁴ over its elements in row-major order, whatever its strides, with a fixed odd
    w_i for each place: the same to the bit on every device and in any order of summing, and another where rows are
    permuted. ``batches``: inputs by name, of the whole batch or of each micro-batch. What is None has no number.
    """

    def __init__(self, batches: Sequence[Mapping[str, Any]]) -> None:
        self._parts: dict[str, list[str | tuple[torch.device, int]]] = {}
        self.with_rows: set[str] = set()
        """The inputs that hold tensors with dimensions, and so may differ from row to row."""
        tensors: dict[torch.device, list[Tensor]] = {}
        for name, value in (item for batch in batches for item in batch.items() if item[1] is not None):
            parts = self._parts.setdefault(name, [])
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.dim():
                    self.with_rows.add(name)
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    tensor = local(leaf.detach())
                    beside = tensors.setdefault(tensor.device, [])
                    parts.append((tensor.device, len(beside)))
                    beside.append(tensor)
                else:  # of other objects than dense tensors and plain values, the type alone
                    parts.append(repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__)
        self._arriving = {device: to_host(_sums_of(held, device)) for device, held in tensors.items()}

    def numbers(self) -> dict[str, int]:
        """Input → a number of 56 bits. Waits until the sums are there."""
        sums = {device: arriving().tolist() for device, arriving in self._arriving.items()}
        return {
            name: digest_of([repr([part if isinstance(part, str) else sums[part[0]][part[1]] for part in parts])])
            for name, parts in self._parts.items()
        }


@torch.no_grad()
def _sums_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Each tensor's sum: a vector of int64, whose arithmetic wraps."""
    pieces = [list(_pieces(tensor)) for tensor in tensors]
    inner = _weights(max(len(part) for parts in pieces for part in parts), device)
    outer = _weights(max(map(len, pieces)), device, _AT_A_TIME)  # others, or place 1 of piece 2 counts as 2 of piece 1
    return torch.stack([_weighted(torch.stack([_weighted(p, inner) for p in parts]), outer) for parts in pieces])


def _weighted(integers: Tensor, weights: Tensor) -> Tensor:
    return (integers * weights[: len(integers)]).sum(dtype=torch.int64)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's bits as integers, in row-major order, some at a time. Where it is cut depends on its shape alone."""
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    rows = max(1, _AT_A_TIME * len(tensor) // max(tensor.numel(), 1))
    for part in torch.split(tensor, rows):
        part = part.resolve_conj().resolve_neg()
        part = torch.view_as_real(part) if part.is_complex() else part
        yield from torch.split(part.contiguous().view(-1).view(_BITS[part.element_size()]), _AT_A_TIME)


def _weights(count: int, device: torch.device, start: int = 0) -> Tensor:
    """An odd number for each place from ``start``: SplitMix64 (Steele, Lea and Flood 2014), seeded with 0."""
    z = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(z: Tensor, by: int) -> Tensor:
    """A right shift that brings zeros, where int64's brings the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """What gives a copy of a tensor as it is now: making it does not wait, and the call waits for what stood in front
    of it on the device, and for nothing behind it."""
    if not tensor.is_cuda:
        copy = tensor.detach().clone()  # the user may write into theirs
        return lambda: copy
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor.detach(), non_blocking=True)
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def differing(transport: Transport, fact: Any) -> list[Any]:
    """Each replica's ``fact``, where they differ; nothing where all have one: then a number travels, its hash.

    A collective call of the data axis.
    """
    alike = len(set(transport.gather_int("data", digest_of([repr(fact)])))) == 1
    return [] if alike else transport.gather("data", fact)
