"""Average: an exponential moving average of the parameters; and batch norms' statistics for averaged parameters.

The average is sharded over a data group inside the node, for any ``zero``. The ranks of the group deal whole parameters
by size. Of a DTensor each rank averages its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fxpipe.distributed.activity import announced
from fxpipe.distributed.transport import broadcast, overwrite
from fxpipe.errors import RunError
from fxpipe.run.forward_backward import ForwardBackward, alone, steps_of
from fxpipe.run.step.step import Steps
from fxpipe.sharding.data_axis import dealt
from fxpipe.tensors.dtensors import is_dtensor, local
from fxpipe.torch_compat.modules import BATCH_NORM
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


# --- Batch norms: their running statistics are estimated anew ---


def update_batch_norm(forward_backward: ForwardBackward, loader: Iterable[Any]) -> None:
    """Sets the running statistics of all batch norms to the mean of the batches' statistics, as torch's
    ``optim.swa_utils.update_bn`` does. A collective call of all ranks, also inside of ``with average.applied():``.

    Each batch runs forward in training mode, as a single micro-batch and without gradients. A replica counts its own
    batches, of which all replicas have the same number. The parameters and the optimizers stay as they are.

    Args:
        forward_backward: the object that ``fxpipe.compile`` returned.
        loader: batches. Each is a tensor, a dict of the inputs by name, or a tuple or list of all inputs. If
            ``compile`` was given a ``loss_fn``, a tuple or list has the model's input first. The other entries, which
            the loss needs, are left out.

    Raises:
        RunError: ``forward_backward`` is none, or a call of it runs; or a batch does not fit the model.
    """
    with alone(forward_backward, "update_batch_norm") as steps:
        norms: list[Any] = [part for part in steps.module.modules() if isinstance(part, BATCH_NORM)]
        momenta, buffers = [norm.momentum for norm in norms], list(forward_backward.module.buffers())
        own, before = set(map(id, buffers)), [buffer.clone() for buffer in buffers]
        try:
            for norm in norms:
                norm.momentum = None  # a cumulative average
                if id(norm.running_mean) in own:
                    norm.reset_running_stats()
            for batch in loader:
                steps.update_buffers(_call_of(batch, steps.has_loss_fn))
        except BaseException:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            raise
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


def _call_of(batch: Any, has_loss_fn: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of a loader as the arguments of a call."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch[:1] if has_loss_fn else batch), {}
    return (batch,), {}
