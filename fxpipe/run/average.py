"""Average: an exponential moving average of the parameters, sharded over a data group inside the node for any ``zero``.

The ranks of the group deal whole parameters by size. Of a DTensor each rank averages its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fxpipe.dealing import dealt
from fxpipe.distributed.activity import announced
from fxpipe.distributed.transport import broadcast, overwrite
from fxpipe.errors import RunError
from fxpipe.run.forward_backward import ForwardBackward, steps_of
from fxpipe.run.step.step import Steps
from fxpipe.tensors.dtensors import is_dtensor, local
from fxpipe.validation import is_number, shown


class Average:
    """An exponential moving average of the parameters: ``decay * average + (1 - decay) * parameter`` at each update.

    It equals torch's ``AveragedModel`` with ``get_ema_multi_avg_fn(decay)``, in at least float32: the first update
    copies the parameters. Buffers and integer parameters are not averaged. ``updates`` counts the updates.
    ``fxpipe.save`` and ``load`` take the object as ``average=``, ``dcp.save`` and ``dcp.load`` as it is.

    Args:
        forward_backward: the object that ``fxpipe.compile`` returned.
        decay: a number from 0 to 1, or a function of the number of earlier updates, from 1, that returns such a number:
            ``lambda updates: min(0.999, (1 + updates) / (10 + updates))``.
    """

    def __init__(self, forward_backward: ForwardBackward, decay: float | Callable[[int], float]) -> None:
        self._forward_backward, self._decay, self.updates = forward_backward, decay, 0
        self._decay_of(1)  # checks a number
        steps, present = self._present()
        self._sums = steps.rank_state.reducer.sums
        sizes = {name: values.numel() for name, values in present.items() if not is_dtensor(values)}
        self._rank_of = dict(zip(sizes, dealt([*sizes.values()], self._sums.shards), strict=True))
        self._averages = {
            name: values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
            for name, values in present.items()
            if self._rank_of.get(name, self._sums.rank) == self._sums.rank
        }

    def _decay_of(self, updates: int) -> float:
        decay = self._decay(updates) if callable(self._decay) else self._decay
        if not (is_number(decay) and 0 <= decay <= 1):
            raise RunError(f"decay is {shown(decay)}; it is a number from 0 to 1, or a function that returns one")
        return float(decay)

    def _present(self) -> tuple[Steps, dict[str, Tensor]]:
        """Returns the run's steps, and name → the present values of each parameter that has an average."""
        steps, named = steps_of(self._forward_backward), self._forward_backward.named_parameters()
        return steps, {name: p.detach() for name, p in named if p.is_floating_point() or p.is_complex()}

    def update(self) -> None:
        """Takes the present parameters into the average; call it after ``optimizer.step()``, on all ranks."""
        _, present = self._present()
        decay = self._decay_of(self.updates) if self.updates else 0.0
        averages = [local(average) for average in self._averages.values()]
        if averages:
            values = [local(present[name]).to(average.dtype) for name, average in self._averages.items()]
            get_ema_multi_avg_fn(decay)(averages, values, self.updates)  # type: ignore[no-untyped-call]
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The context in which the parameters are their averages, for ``evaluate`` and ``state_dict``; a collective
        call of all ranks. It refuses to train, step, save and load."""
        steps, present = self._present()
        own = {name: local(values).clone() for name, values in present.items()}
        steps.is_averaged = True
        try:
            with announced("average.applied"), steps.failing.together():
                steps.failing.check_open()
                _write(present, self._averages)
                for rank in range(self._sums.shards) if self._sums.shards > 1 else ():
                    dealt_to = [present[name] for name, holder in self._rank_of.items() if holder == rank]
                    broadcast(dealt_to, steps.transport, "gather", rank)
            yield
        finally:
            steps.is_averaged = False
            _write(present, own)

    def state_dict(self) -> dict[str, Any]:
        """Returns ``updates``, and this rank's averages under ``parameters.`` and the plain model's own names."""
        return {"updates": self.updates, **{f"parameters.{name}": average for name, average in self._averages.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what ``state_dict`` returned on this rank; KeyError if it lacks an average."""
        for name, average in self._averages.items():
            average.copy_(state_dict[f"parameters.{name}"])
        self.updates = state_dict["updates"]


def _write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in values.items():
        overwrite(local(parameters[name]), local(tensor))
