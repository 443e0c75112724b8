"""To host: a tensor's numbers, on their way from the device to the host while the device goes on."""

from __future__ import annotations

import torch
from torch import Tensor


class ToHost:
    """A copy of a tensor as it is now, which making does not wait for."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._copy = tensor.detach().clone()  # the user may write into theirs
        else:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> Tensor:
        """The copy. Waits for what stood in front of it on the device, and for nothing behind it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy
