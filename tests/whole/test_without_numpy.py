"""NumPy is no dependency of fxpipe: every tracer captures, and a step runs, where it cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fxpipe

ROOT = Path(__file__).parents[2]

SCRIPT = """
import random, sys
sys.modules["numpy"] = None  # an import of it raises, as where it is not installed
import torch, fxpipe


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.dropout = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1), torch.nn.Dropout(0.5)

    def forward(self, x):
        h = fxpipe.stage_boundary(self.dropout(self.a(x)).relu())
        return self.b(h * number()).square().mean()


def step(tracer):
    model, x = Model(), torch.randn(8, 4)
    topology = fxpipe.Topology([("pipe", 2)])
    fb = fxpipe.compile(model, topology, microbatches=2, example_args=(x,), tracer=tracer)
    optimizer = fb.optimizer(torch.optim.AdamW, lr=0.1)
    before = model.a.weight.clone()
    fb(x)
    optimizer.step()
    return not torch.equal(model.a.weight, before)


for tracer in sys.argv[1:]:
    number = lambda: 1.0
    print(step(tracer))
    number = random.random
    try:
        print(step(tracer))
    except fxpipe.TraceError as error:
        print("random numbers are drawn" in str(error))
"""


def test_a_model_is_captured_and_stepped_and_a_number_drawn_in_python_is_seen() -> None:
    arguments = [sys.executable, "-c", SCRIPT, *fxpipe.TRACERS]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["True"] * 2 * len(fxpipe.TRACERS), done.stderr
