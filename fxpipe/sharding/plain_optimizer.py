"""Plain optimizer: torch's own, whose state bears the plain model's names in a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


class PlainOptimizer:
    """torch's own optimizer of ``forward_backward.parameters()``, through torch's helpers, under the model's names."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._module, self._optimizer, options=self._options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._module, self._optimizer, state, options=self._options)
