"""examples/torchtitan_loop.py trains torchtitan's Llama as torchtitan's own forward, backward and optimizer do."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests.pool import Pool
from tests.whole.test_readme import ROOT

pytest.importorskip("torchtitan")
pytest.importorskip("triton")


def losses(folder: Path, steps: int = 6, plain: bool = False) -> list[float]:
    return runpy.run_path(str(ROOT / "examples" / "torchtitan_loop.py"))["main"](str(folder), steps, plain)


def test_the_example_trains_as_torchtitan_does(pool: Pool, tmp_path: Path) -> None:
    plain = losses(tmp_path, plain=True)
    torch.testing.assert_close(losses(tmp_path / "one"), plain, rtol=1e-4, atol=0)
    for of_rank in pool.run(losses, tmp_path / "four", ranks=4):
        torch.testing.assert_close(of_rank, plain, rtol=1e-4, atol=0)
    assert len(losses(tmp_path / "one")) == 2  # it goes on from step 4
