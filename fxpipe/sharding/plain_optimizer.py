"""Plain optimizer: torch's own, whose state bears the plain model's names in a checkpoint.

The names are those of torch's ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict``, which makes missing
state by a step of the optimizer itself (after it Adam has counted one), or, where there are gradients, not at all.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.sharding.optimizer_class import Entry, initial_state, is_initial
from fxpipe.sharding.optimizer_state import check_saves_all
from fxpipe.sharding.parameter_groups import options_of


class PlainOptimizer:
    """torch's own optimizer of ``forward_backward.parameters()``, under the model's names."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def _parameters(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Each parameter with its name and its group."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield self._names[id(parameter)], parameter, group

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {name: {key: value}}, "param_groups": {name: {key: value}}}``; nothing is changed by it.

        A parameter that was never stepped is there with an initial state.
        """
        if isinstance(self._optimizer, torch.optim.LBFGS):
            raise CheckpointError(
                "LBFGS keeps what it has of all parameters with the first, which has no name of its own"
            )
        check_saves_all(self._optimizer)
        entries = {
            name: dict(self._optimizer.state.get(parameter) or self._initial(parameter, options_of(group)))
            for name, parameter, group in self._parameters()
        }
        return {
            "state": {name: entry for name, entry in entries.items() if entry},
            "param_groups": {name: options_of(group) for name, _, group in self._parameters()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave, with other values in it.

        Raises:
            CheckpointError: parameters of one group were saved with different options.
        """
        for name, parameter, group in self._parameters():
            options, first = state["param_groups"][name], self._names[id(group["params"][0])]
            if options != state["param_groups"][first]:
                raise CheckpointError(
                    f"{first} and {name}, which are in one parameter group, were saved in groups with different "
                    "options; make the optimizer with the groups that it was saved with"
                )
            entry = state["state"].get(name, {})
            stepped = parameter in self._optimizer.state
            if stepped or not is_initial(entry, self._initial(parameter, options)):
                self._optimizer.state[parameter] = entry
        for group in self._optimizer.param_groups:
            for parameter in group["params"][:1]:
                group.update(copy.deepcopy(state["param_groups"][self._names[id(parameter)]]))

    def _initial(self, parameter: Tensor, options: Mapping[str, Any]) -> Entry:
        """What a first step would begin with: nothing where it is frozen."""
        return initial_state(self._like_it, options, parameter.detach()) if parameter.requires_grad else {}

    def _like_it(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Another one of its class, without its state, its hooks and what schedulers have put around its ``step``."""
        other = copy.copy(self._optimizer)
        own = {key: value for key, value in vars(self._optimizer).items() if key != "step"}
        fresh = {"state": defaultdict(dict), "param_groups": groups}
        other.__dict__.update({**own, **vars(other), **fresh})
        return other
