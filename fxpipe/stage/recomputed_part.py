"""Recomputed part: a part of a stage that keeps only its inputs, and runs again in the stage's backward.

``passes.checkpoint_layers`` puts calls of such parts into programs. A part runs under ``torch.utils.checkpoint``, which
also repeats random numbers and autocast. What torch does not repeat is restored here: the second run begins with the
batch statistics and the Python attributes of the first, and leaves them as it found them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from fxpipe.snapshots.snapshot import Numbers, Snapshot
from fxpipe.stage.modes import modes_restored
from fxpipe.torch_compat.modules import BATCH_STATISTICS
from fxpipe.torch_compat.tensors import version_of


class RecomputedPart(nn.Module):
    """A call runs ``body``, and the backward runs it again.

    ``overwrites``: the indices of the inputs that are batch statistics, which ``body`` writes. ``draws_random``:
    whether ``body`` draws from torch's generators.
    """

    def __init__(self, body: nn.Module, overwrites: Sequence[int], draws_random: bool) -> None:
        super().__init__()
        self.body, self.overwrites, self.draws_random = body, list(overwrites), draws_random
        parts = [part for part in body.modules() if part is not body]
        self._norms = tuple(part for part in parts if isinstance(part, BATCH_STATISTICS))
        # torch's own modules change no attributes; a tuple, or the modules would be registered twice
        self._users = tuple(part for part in parts if not type(part).__module__.startswith("torch."))

    def forward(self, *inputs: Any) -> Any:
        restore_first: list[Callable[[], None]] = []
        # autograd refuses inputs that are written until backward, so the checkpoint does not see these
        statistics = {index: inputs[index] for index in self.overwrites}

        def run(*inputs: Any) -> Any:
            with ExitStack() as stack, modes_restored():  # recomputation may stop early
                restore = self._restore(statistics.values())
                if restore_first:
                    stack.callback(restore)
                    restore_first[0]()
                restore_first.append(restore)
                return self.body(*(statistics.get(index, value) for index, value in enumerate(inputs)))

        others = [None if index in statistics else value for index, value in enumerate(inputs)]
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.draws_random}
        return torch.utils.checkpoint.checkpoint(run, *others, **options)

    def _restore(self, statistics: Iterable[Tensor]) -> Callable[[], None]:
        """Returns a function that restores the present batch statistics and attributes."""
        tensors = [*statistics]
        tensors += [buffer for part in self._norms for buffer in part.buffers(recurse=False)]
        numbers = [Numbers(tensor, tensor.detach().clone(), version_of(tensor)) for tensor in tensors]
        snapshots = [Snapshot(part, tensors=False) for part in self._users]

        def restore() -> None:
            for snapshot in snapshots:
                snapshot.restore()
            with torch.no_grad():
                for each in numbers:
                    each.restore(raises_version=False)

        return restore
