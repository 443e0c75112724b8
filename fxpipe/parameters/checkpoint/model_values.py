"""Model values: the model's tensors in a checkpoint, as exact as it has them.

A parameter that ``precision`` keeps rounded has its master among the optimizer's state, ``optim.state.NAME.master``.
Where the master rounds to what the model has, it is the value; elsewhere somebody has written the parameter since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.parameters.checkpoint.reader import FolderReader
from fxpipe.parameters.dtensors import local
from fxpipe.precision import converts, merged

MODEL = "model."
"""What names of the model begin with in a checkpoint."""
_OPTIMIZER, _STATE, _MASTER = "optim", ".state.", ".master"


class ModelValues:
    """``ties``: names of the model → the first name of the same parameter. ``leave``: masters that an optimizer reads.

    ``masters``: names of the model → that of the master in the checkpoint, where there is one that is more exact.
    """

    def __init__(self, reader: FolderReader, ties: Mapping[str, str], leave: Collection[str] = ()) -> None:
        self._reader, tensors = reader, reader.tensors
        self._own = {name.removeprefix(MODEL): one for name, one in tensors.items() if name.startswith(MODEL)}
        found = {parameter: name for name in tensors if name not in leave for parameter in _mastered(name)}
        firsts = {name: found.get(ties.get(name, name), "") for name in self._own}
        self.masters = {name: master for name, master in firsts.items() if master and self._is_finer(name, master)}

    def _is_finer(self, name: str, master: str) -> bool:
        (shape, dtype), (its_shape, its_dtype) = self._own[name], self._reader.tensors[master]
        return shape == its_shape and converts(its_dtype, dtype) and its_dtype.itemsize > dtype.itemsize

    def entries(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each tensor of the model, by its name there."""
        return {name: self._reader.tensors.get(self.masters.get(name, ""), one) for name, one in self._own.items()}

    def plan(self, into: Mapping[str, Tensor]) -> Callable[[], None]:
        """Checks that tensors can be filled, by the model's names; returns what fills them."""
        plain: dict[str, Tensor] = {MODEL + name: tensor.detach() for name, tensor in into.items()}
        finer: list[tuple[Tensor, Tensor, Tensor]] = []
        for name, tensor in into.items():
            master = self.masters.get(name)
            if master is None:
                continue
            tensor = tensor.detach()
            rounded = torch.empty_like(tensor, dtype=self._own[name][1])
            finest = self._reader.tensors[master][1]
            exact = tensor if tensor.dtype == finest else torch.empty_like(tensor, dtype=finest)
            plain |= {MODEL + name: rounded, master: plain.get(master, exact)}
            finer.append((tensor, rounded, plain[master]))
        fill = self._reader.plan(plain)

        def run() -> None:
            fill()
            for tensor, rounded, exact in finer:
                local(tensor).copy_(merged(local(exact), local(rounded), rounded.dtype))

        return run


def _mastered(name: str) -> Iterator[str]:
    """The parameters whose master bears this name in a checkpoint: of an optimizer, or of one of several."""
    if not (name.startswith(_OPTIMIZER) and name.endswith(_MASTER)):
        return
    parts: list[Any] = name.removesuffix(_MASTER).split(_STATE)
    for place in range(1, len(parts)):
        optimizer = _STATE.join(parts[:place])
        if optimizer == _OPTIMIZER or optimizer.startswith(f"{_OPTIMIZER}."):
            yield _STATE.join(parts[place:])
