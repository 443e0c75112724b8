"""CUDA devices that are simulated on the CPU: ``import tests.simulated_gpu`` before torch, and ``cuda`` is there.

What it shows, in *every* run of a path: host code that touches device memory (it faults), streams that no event orders
(a race), memory that is freed while another stream uses it (a fault of lifetime), pinned copies that are read before
they have arrived, waits of the host for the device, and, in virtual time, what waits for what. What it does not show:
the speed or the rounding of CUDA's kernels, NCCL itself, fragmentation, CUDA graphs, Triton. ``src/*.h`` say more.

    python -m tests.simulated_gpu script.py …                    # a script; prints races and lifetime faults
    torchrun --nproc-per-node 2 -m tests.simulated_gpu script.py …        # on two devices, with an NCCL over gloo
    FXPIPE_DEVICE=cuda python -m pytest …                        # the suite on it (tests/device.py)
    gpus.run(fn, *args, ranks=2)                                 # a test's fixture: see tests/gpus.py

Reports (reports.py):
    ``reports``           a list of Report(kind, text, where), but for what a ``watched()`` has taken
    ``watched()``         a context: the list of what its block found
    ``summary(reports)``  how often each was found, as text
    ``faults(reports)``   those of a kind in FAULTS, "race" and "lifetime"; "sync" is a wait of the host, "peer" a copy
                          between devices, "early" memory freed while another stream may use it, no fault by itself

Virtual time (clock.py), in seconds; the same to the bit in every run unless ``costs(cpu=…)`` counts Python's own time:
    ``costs(launch=…)``   sets what things take, and gives all: see ``Costs`` in src/clock.h; ``STRUCTURE``: all nothing
    ``fix({"aten::mm": 1e-3})``                     what operators take, whatever their sizes
    ``torch.ops.sim.work(x, forward, backward)``    x itself, after exactly so long; its gradient, too
    ``now()``, ``host_now()``                       of the current stream, with all that is on it, and of the host
    ``Event.elapsed_time`` (ms), ``Event.at`` (s)   of events
    ``align()``           brings all ranks' clocks to the latest of them; the time then
    ``trace(True)``, ``trace(False)``               begin to record, and give (what, stream or -1, start, end)
    ``counts()``          how often the host has put what on streams, and "host waits"
    ``reset()``           the costs as they were, no fixed ones, no trace, no reports

FXPIPE_GPUS=4 devices; FXPIPE_GPU_STREAMS=32 of torch's pool, which NCCL shares.

A process that has imported torch before can import this, too, for its names; ``is_active()`` says False there.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.simulated_gpu import build

_active = "torch" not in sys.modules and not build.torch_has_cuda()


def is_active() -> bool:
    """Whether this process's CUDA devices are simulated."""
    return _active


if _active:
    build.load()
    from tests.simulated_gpu import cuda, nccl
    from tests.simulated_gpu.clock import STRUCTURE, align, costs, counts, fix, host_now, now, trace
    from tests.simulated_gpu.reports import FAULTS, Report, end, faults, reports, reset, summary, watched

    cuda.patch()
    nccl.patch()
    __all__ = ["FAULTS", "STRUCTURE", "Report", "align", "costs", "counts", "end", "faults", "fix", "host_now"]
    __all__ += ["is_active", "now", "reports", "reset", "summary", "trace", "watched"]
else:

    def __getattr__(name: str) -> Any:
        raise AttributeError(f"{__name__}.{name}: this process had imported torch before {__name__}")
