"""``python -m tests.simulated_gpu script.py arguments``, or ``-m module arguments``: with simulated GPUs.

Prints at the end what was found of races and faults of lifetime, and fails if there was any; with
``FXPIPE_GPU_REPORTS=all`` the waits of the host, too.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests import simulated_gpu


def run(program: str) -> None:
    if program == "-m":
        sys.argv.pop(0)
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


status: object = None
del sys.argv[0]
try:
    run(sys.argv[0])
except SystemExit as ended:
    status = ended.code
faults = simulated_gpu.faults()
shown = simulated_gpu.reports if os.environ.get("FXPIPE_GPU_REPORTS") == "all" else faults
if shown:
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}, simulated GPU:\n{simulated_gpu.summary(shown)}", file=sys.stderr, flush=True)
sys.exit(status or bool(faults))
