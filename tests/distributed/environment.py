"""The environment in which a launcher starts a process."""

from __future__ import annotations

import os
from pathlib import Path

import fxpipe

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_")


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without any launcher's variables, and without GPUs."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN and not name.startswith(LAUNCHER_PREFIXES)
    }
    root = str(Path(fxpipe.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH")]))
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
