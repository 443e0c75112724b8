"""Hardware: the reference numbers that turn shapes into seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One rank's device and the link to the next, in operations and bytes per second.

    The defaults are what an NVIDIA A100 reaches in practice, about half of its peaks, and a 200 Gbit/s network. Only
    their ratios matter to a balance: where the model runs on something else of the kind, the cut is the same.
    """

    flops: float = 75e12
    """Of matrix products, in types of 4 bytes and more."""
    flops_16: float = 150e12
    """Of matrix products in types of 2 bytes."""
    bandwidth: float = 1.2e12
    """Of its memory."""
    launch: float = 4e-6
    """Seconds that the smallest operation takes."""
    link: float = 20e9
    """Of a message to another rank."""
    latency: float = 20e-6
    """Seconds that the smallest message takes."""
    bytes_per_parameter: float = 16.0
    """What a trained parameter takes where it lives: value, gradient and Adam's two moments in float32."""

    def seconds(self, flops: float, moved: float, itemsize: int) -> float:
        """max(operations / peak, bytes moved / bandwidth), the roofline model, and at least a launch."""
        peak = self.flops_16 if itemsize <= 2 else self.flops
        return max(flops / peak, moved / self.bandwidth, self.launch)

    def hop(self, size: float) -> float:
        """Seconds that a message of so many bytes takes."""
        return self.latency + size / self.link
