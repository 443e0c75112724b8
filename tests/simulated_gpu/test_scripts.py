"""Programs on simulated GPUs: how they start and end, what is said of faults; and how the device is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpus, simulated_gpu
from tests.simulated_gpu import build

ROOT = Path(__file__).parents[2]
ENDS_BEHIND_A_BACKWARD = """
import torch

class Twice(torch.autograd.Function):  # a node that belongs to Python
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient

model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(10))).cuda()
Twice.apply(model(Twice.apply(torch.ones(4, 32, device="cuda")))).sum().backward()
"""
RACES = """
import sys, torch
x = torch.zeros(3, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    x.add_(1)
sys.exit(0)
"""
ENDS_BEHIND_A_COLLECTIVE = """
import torch, torch.distributed as dist, fxpipe
x = torch.ones(3, device=fxpipe.init())
dist.all_reduce(x, async_op=True)
dist.all_reduce(x)
print(x.tolist())
work = dist.irecv(x, 1) if dist.get_rank() == 0 else None
"""


@pytest.fixture(autouse=True)
def _built() -> None:
    gpus.require()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)


def run_script(folder: Path, text: str, *launch: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return run(*launch, "-m", "tests.simulated_gpu", str(folder / "script.py"))


def test_a_script_may_end_right_behind_a_backward(tmp_path: Path) -> None:
    ends = [run_script(tmp_path, ENDS_BEHIND_A_BACKWARD) for _ in range(10)]
    assert [(end.returncode, end.stderr) for end in ends] == [(0, "")] * 10


def test_ranks_may_end_with_a_message_under_way(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    end = run_script(tmp_path, ENDS_BEHIND_A_COLLECTIVE, *launch)
    assert end.stdout.count("[4.0, 4.0, 4.0]") == 2
    assert end.returncode == 0, end.stderr


def test_a_script_with_a_race_fails_and_says_where(tmp_path: Path) -> None:
    end = run_script(tmp_path, RACES)
    assert end.returncode == 1
    assert "race     aten::add.out writes on stream 1 of device 0" in end.stderr
    assert "script.py:5" in end.stderr


def test_a_process_that_has_imported_torch_has_no_device_and_is_told() -> None:
    end = run("-c", "import torch, tests.simulated_gpu as gpu; print(gpu.is_active()); gpu.costs()")
    assert end.stdout == "False\n"
    assert "simulated_gpu.costs: this process had imported torch before" in end.stderr


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_GPU_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.Unavailable, match=r"needs a C\+\+ compiler: install g\+\+, or name one in CXX"):
        build.library()


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("FXPIPE_GPU_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.Unavailable, match="no such header"):
        build.library()
    assert not list(tmp_path.rglob("*.so"))


def test_what_is_built_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library().exists()


def test_this_process_has_the_device_only_where_it_was_asked_for() -> None:
    assert simulated_gpu.is_active() == (os.environ.get("FXPIPE_DEVICE") == "cuda" and not build.torch_has_cuda())
