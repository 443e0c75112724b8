"""Batch norm: estimates the running statistics of batch norms anew, for averaged or changed parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fxpipe.run.forward_backward import ForwardBackward, alone
from fxpipe.torch_compat.modules import BATCH_NORM


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
