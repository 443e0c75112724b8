"""Recorded: this rank's parts of parameters and gradients, for ``record_values``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fxpipe.numerics.fingerprint import positions_of
from fxpipe.numerics.recording import TensorPart
from fxpipe.parameters.dtensors import local
from fxpipe.sharding.gradients import Piece
from fxpipe.sharding.parameter_groups import first_names


def parts_of_parameters(model: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[TensorPart]:
    """Yields the parts of this rank's ``named`` parameters. ``model``: the whole model, whose names count."""
    numbers = _numbers(model)
    for name, parameter in named:
        yield TensorPart(*numbers[name], parameter, parameter.shape, positions_of(parameter))


def parts_of_gradients(model: nn.Module, pieces: Iterable[Piece]) -> Iterator[TensorPart]:
    """Yields the parts of the summed gradients that this rank has."""
    numbers = _numbers(model)
    for piece in pieces:
        gradient, shape = piece.current_gradient(), piece.parameter.shape
        if gradient is None:
            continue
        positions = positions_of(piece.parameter)
        if positions is None and gradient.shape != shape:
            positions = piece.part_of(torch.arange(shape.numel(), device=gradient.device).view(shape))
        elif positions is not None and local(gradient).numel() != positions.numel():
            positions = positions.reshape(-1)[piece.start : piece.stop]
        yield TensorPart(*numbers[piece.name], gradient, shape, positions)


def _numbers(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Each name of a parameter → the first name of the same parameter, and its number in the model."""
    first = first_names(dict(model.named_parameters(remove_duplicate=False)))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(first.values()))}
    return {name: (own, numbers[own]) for name, own in first.items()}
