"""Some of the cases, ten seconds of them; ``FXPIPE_ALL=1`` runs all, for half an hour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.harness import faults
from tests.faults.training import PHASES, Fault, cases
from tests.scripts import Scripts
from tests.thinned import every


def test_each_rank_is_struck_in_each_phase_by_each_signal() -> None:
    struck = {(fault.victim, fault.phase, fault.signal) for fault in cases()}
    assert len(struck) == 4 * len(PHASES) * 2
    assert len(cases()) >= 90


SCRIPT = """
import os, torch, fxpipe

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.b(fxpipe.stage_boundary(self.a(x))).mean()

forward_backward = fxpipe.compile(Two(), fxpipe.Topology([("pipe", 2), ("data", 2)]), microbatches=2)
for step in range(9):
    if step == 3 and os.environ["RANK"] == "2":
        raise ValueError("bad row 17")
    forward_backward(torch.ones(4, 4))
"""


@pytest.mark.slow
def test_torchrun_names_the_rank_whose_loop_has_failed(tmp_path: Path, scripts: Scripts) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = ["-m", "tests.torchrun", "--standalone", "--nproc-per-node", "4"]
    _, _, told = scripts.outcome([*torchrun, "script.py"], tmp_path)
    assert re.search(r"Root Cause \(first observed failure\):\n.*\n.*\n.*\n  rank      : 2 ", told), told
    first, *others = re.findall(r"^.*ValueError: bad row 17$", told, re.MULTILINE)
    assert first == "[rank2]: ValueError: bad row 17"
    assert all("another rank failed: rank 2 (pipe 1, data 0): " in line for line in others)
    assert others


@pytest.mark.slow
@pytest.mark.parametrize("fault", every(109, cases()), ids=str)
def test_the_others_end_in_time_and_say_why(fault: Fault) -> None:
    assert faults(fault) == []
