"""Stepped piece: what an optimizer steps of a parameter: the parameter's own memory, or a master copy of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.parameters.dtensors import local
from fxpipe.precision import Precision, merged
from fxpipe.sharding.clip import gradient_of
from fxpipe.sharding.flat_bucket import Piece
from fxpipe.torch_compat import storage_id


@dataclass(frozen=True)
class Target:
    """``tensor`` is stepped. ``master``: it is a copy, of another type or on another device, to be written back."""

    piece: Piece
    tensor: Tensor
    master: bool

    @property
    def whole(self) -> bool:
        """Whether all of the parameter is stepped here, in its own shape."""
        return self.tensor.shape == self.piece.parameter.shape

    def part_of(self, values: Tensor) -> Tensor:
        """The elements of a whole tensor that are stepped here, shaped like ``tensor``."""
        return _part(values, self.piece)

    def take_gradient(self) -> bool:
        """Shows the optimizer the piece's gradient, or None, and says whether there is one."""
        if self.tensor is self.piece.parameter:
            return self.tensor.grad is not None
        gradient = gradient_of(self.piece)
        if gradient is not None:
            # a copy to the CPU is pinned, and under way until the stream is waited for
            gradient = gradient.to(self.tensor.device, self.tensor.dtype, non_blocking=True)
        self.tensor.grad = gradient
        return gradient is not None

    def drop_gradient(self) -> None:
        """Lets go of what ``take_gradient`` has shown; a parameter keeps its own."""
        if self.tensor is not self.piece.parameter:
            self.tensor.grad = None

    def write_back(self) -> None:
        """The parameter's memory becomes what the optimizer has made of the master."""
        if self.master:
            _data(self.piece).copy_(self.tensor, non_blocking=True)

    def follow(self) -> None:
        """A master takes what somebody has written into the parameter by hand since the last step.

        RunError where it has other memory by now, which ``write_back`` would not reach, nor the ranks that share it.
        """
        if self.tensor is self.piece.parameter:
            return
        if storage_id(local(self.piece.parameter.detach())) != storage_id(_data(self.piece)):
            raise RunError(
                f"{self.piece.name} was given other memory, as by parameter.data = ..., and the optimizer steps what "
                "it had; write into it, as parameter.data.copy_(...) does"
            )
        self.refresh(None)

    def refresh(self, original: Tensor | None) -> None:
        """The master becomes ``original``, or the parameter's value where there is none; but it keeps its bits where
        they round to that, so that rounded values undo no exact ones that were loaded before."""
        if self.master:
            values = _data(self.piece) if original is None else _part(original, self.piece)
            self.tensor.copy_(merged(self.tensor, values.to(self.tensor.device), values.dtype))


def target_of(
    piece: Piece, original: Tensor | None, precision: Precision | None, offload: bool, sharded: bool
) -> Target:
    """``original``: the parameter before it was rounded. ``offload``: the master is on the CPU. ``sharded``: ranks
    step parts, so that ``parameter.grad`` is not what is stepped with."""
    data = _data(piece)
    dtype = precision.master if precision is not None and data.is_floating_point() else data.dtype
    if dtype == data.dtype and not offload:
        plain = precision is None and not sharded
        return Target(piece, piece.parameter if plain else data, False)
    device = torch.device("cpu") if offload else data.device
    tensor = torch.empty_like(data, dtype=dtype, device=device)
    if offload and data.device.type == "cuda":
        tensor = tensor.pin_memory()
    target = Target(piece, tensor, True)
    with torch.no_grad():
        tensor.copy_(data if original is None else _part(original, piece))
        target.refresh(None)  # where the parameter has been written since, it counts
    return target


def originals_of(originals: Mapping[str, Tensor], names: list[str]) -> Tensor | None:
    """A parameter's values, under any of its names."""
    return next((originals[name] for name in names if name in originals), None)


def _data(piece: Piece) -> Tensor:
    """A piece's memory; of a DTensor that ranks share, this rank's shard."""
    return piece.data.detach() if piece.is_whole else local(piece.data.detach())


def _part(original: Tensor, piece: Piece) -> Tensor:
    """The elements of a whole tensor that a piece has, shaped like its data."""
    data, parameter = _data(piece), piece.parameter
    if original.shape == data.shape:
        return original
    alike = torch.empty_like(parameter, dtype=original.dtype, device=original.device)
    if alike.stride() != original.stride():  # pieces count in the order of the parameter's memory
        original = alike.copy_(original)
    return original.detach().as_strided((original.numel(),), (1,))[piece.start : piece.stop].view(data.shape)
