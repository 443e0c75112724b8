"""Unwritten: finds out which numbers of a tensor have been written."""

from __future__ import annotations

import torch
from torch import Tensor

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
