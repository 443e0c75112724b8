"""The modes as they stand while forward runs, and what of them is not so where the call begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.graph.modes import DEVICES, Autocast, Modes
from fxpipe.trace.patching import patched


@dataclass(frozen=True)
class ModesNow:
    """Gradients on or off, autocast on each type of device, and the number of the autocast block."""

    grad: bool
    autocast: tuple[Autocast, ...]
    region: int = 0

    @staticmethod
    def of(region: int = 0) -> ModesNow:
        cache = torch.is_autocast_cache_enabled()
        autocast = tuple(
            Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), cache)
            for device in DEVICES
        )
        return ModesNow(torch.is_grad_enabled(), autocast, region)

    def beside(self, around: ModesNow) -> Modes | None:
        """What differs from the modes ``around``; None where nothing does."""
        grad = self.grad if self.grad != around.grad else None
        autocast = tuple(
            mine
            for mine, theirs in zip(self.autocast, around.autocast, strict=True)
            if (mine.enabled or theirs.enabled) and (mine != theirs or self.region != around.region)
        )
        if grad is None and not autocast:
            return None
        return Modes(grad, autocast, self.region)


class AutocastBlocks:
    """Numbers the ``with torch.autocast(...)`` blocks as they are entered; 0 is outside of all."""

    def __init__(self) -> None:
        self._entered = 0
        self._open = [0]

    @property
    def current(self) -> int:
        return self._open[-1]

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

        def entered(block: torch.autocast) -> Any:
            self._entered += 1
            self._open.append(self._entered)
            return enter(block)  # type: ignore[no-untyped-call]

        def left(block: torch.autocast, *error: Any) -> Any:
            self._open.pop()
            return leave(block, *error)

        with patched(torch.autocast, "__enter__", entered), patched(torch.autocast, "__exit__", left):
            yield
