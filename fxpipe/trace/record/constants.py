"""Constants: tensors that no input reaches, as a mask that is a buffer; they may decide sizes between submodules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.trace.fake import is_fake
from fxpipe.trace.record.tape import NamedSource, Obstacle, Operation, TapeValue, mapped, tensors
from fxpipe.trace.record.targets import name_of
from fxpipe.trace.state.snapshot import storage_of

_SELECT = frozenset({"__getitem__", "masked_select"})
"""Functions of which the first tensor's numbers do not decide how many the result has."""


class NotConstant(Exception):
    """A tensor's numbers are known only when the model runs."""


class Constants:
    """The numbers of constants. ``real``: the model's tensors by name; ``tape``: what has been recorded."""

    def __init__(self, real: Mapping[str, Tensor], tape: Sequence[Operation | Obstacle]) -> None:
        self._real, self._tape = real, tape

    def result(self, function: Any, args: Any, kwargs: Any, value_of: Callable[[Tensor], TapeValue]) -> Any:
        """What a function returns, where constants alone decide its sizes; NotConstant where they do not.

        To be called outside of the capture's modes. Other numbers than those of constants are zeros.
        """
        free = id(args[0]) if name_of(function) in _SELECT and isinstance(args[0], Tensor) else None

        def numbers(leaf: Any) -> Any:
            if id(leaf) == free:
                return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return self._numbers(value_of(leaf)) if isinstance(leaf, Tensor) else leaf

        return function(*mapped(args, numbers), **mapped(kwargs, numbers))

    def _numbers(self, value: TapeValue) -> Any:
        maker = value.maker
        if self._is_written(maker):
            raise NotConstant
        if isinstance(maker, NamedSource):
            tensor = self._real.get(maker.name, maker.result)
            if maker.kind != "get_attr" or isinstance(tensor, nn.Parameter) or is_fake(tensor) or tensor.is_meta:
                raise NotConstant
            return tensor.detach()
        if maker.kind == "call_module" or maker.touched.draws_random:
            raise NotConstant
        args, kwargs = mapped(maker.args, self._leaf), mapped(maker.kwargs, self._leaf)
        function = getattr(torch.Tensor, maker.target) if maker.kind == "call_method" else maker.target
        found: Any = function(*args, **kwargs)
        for key in value.path:
            found = found[key]
        return found

    def _leaf(self, leaf: Any) -> Any:
        return self._numbers(leaf) if isinstance(leaf, TapeValue) else leaf

    def _is_written(self, maker: NamedSource | Operation) -> bool:
        memory = {storage_of(tensor) for tensor in tensors(maker.result)}
        return any(isinstance(entry, Operation) and entry.touched.writes & memory for entry in self._tape)
