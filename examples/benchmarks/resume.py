"""A resume: processor time and memory of ``fxpipe.load`` into a new model and a new AdamW, and of torch's ``dcp.load``.

    python examples/benchmarks/resume.py                    # 128 MiB of parameters: a minute, where the disk is fast
    python examples/benchmarks/resume.py --before FOLDER    # an earlier checkout, too, in turns: two minutes

Each round is a process of its own. It saves a model after a step of AdamW, and loads the checkpoint into a new model
and a new optimizer, by fxpipe and by torch's state-dict functions. Then it does the same with a model of four times the
size, whose plain SGD has no state; torch loads the model alone. Figures are medians of the rounds. A peak is the
largest resident memory in a load above the memory before it, in units of the parameters and AdamW's two moments. Linux
only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from turns import in_turns, table

import fxpipe

LAYERS = 8
MMAP_THRESHOLD = -3  # of glibc's mallopt: larger blocks go back to the system once they are freed
Maker = Callable[..., torch.optim.Optimizer]


class Stack(nn.Module):
    def __init__(self, mib: float) -> None:
        super().__init__()
        width = int((mib * 2**20 / 4 / LAYERS) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def resident(field: str) -> float:
    """MiB: VmRSS, what is resident now; VmHWM, the most since ``clear_refs``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def spent(run: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds, and MiB above the memory before."""
    Path("/proc/self/clear_refs").write_text("5")
    memory, start = resident("VmRSS"), time.process_time()
    run()
    return time.process_time() - start, resident("VmHWM") - memory


def compiled(mib: float, make: Maker) -> tuple[fxpipe.ForwardBackward, Any, Tensor]:
    model = Stack(mib)
    x = torch.randn(1, model.layers[0].in_features)
    topology = fxpipe.Topology([("pipe", 1)])
    forward_backward = fxpipe.compile(model, topology, microbatches=1, example_args=(x,), check_capture=False)
    return forward_backward, forward_backward.optimizer(make, lr=1e-3), x


def plain(mib: float, make: Maker) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Stack(mib)
    return model, make(model.parameters(), lr=1e-3)


def dcp_load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    if isinstance(optimizer, torch.optim.SGD):
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        return
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optim": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=state["optim"])


def loads(folder: Path, mib: float, make: Maker) -> tuple[tuple[float, float], tuple[float, float]]:
    """What a load spends: fxpipe's, and dcp's."""
    forward_backward, optimizer, x = compiled(mib, make)
    forward_backward(x)
    optimizer.step()
    fxpipe.save(folder / "fxpipe", forward_backward, optimizer, step=1)
    model, of_model = plain(mib, make)
    model(x).backward()
    of_model.step()
    of_model.zero_grad()
    saved = get_state_dict(model, of_model)
    dcp.save({"model": saved[0], "optim": saved[1]}, checkpoint_id=folder / "dcp")
    del forward_backward, optimizer, model, of_model, saved
    forward_backward, optimizer, _ = compiled(mib, make)
    ours = spent(partial(fxpipe.load, folder / "fxpipe", forward_backward, optimizer))
    del forward_backward, optimizer
    model, of_model = plain(mib, make)
    return ours, spent(partial(dcp_load, model, of_model, folder / "dcp"))


def measure(mib: float) -> dict[str, float]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 2**16)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(open(os.devnull, "w")):
        adamw, its_dcp = loads(Path(folder, "adamw"), mib, torch.optim.AdamW)
        sgd, sgds_dcp = loads(Path(folder, "sgd"), 4 * mib, torch.optim.SGD)
    return {
        "AdamW: load, s": adamw[0],
        "AdamW: ÷ dcp.load": adamw[0] / its_dcp[0],
        "AdamW: dcp.load, peak ÷ state": its_dcp[1] / (3 * mib),
        "AdamW: load, peak ÷ state": adamw[1] / (3 * mib),
        "SGD: load, s": sgd[0],
        "SGD: ÷ dcp.load": sgd[0] / sgds_dcp[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=128, help="of AdamW's parameters; SGD's are four times as many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="the folder of an earlier checkout")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.mib)))
    else:
        print(table(in_turns(__file__, ["--measure", "--mib", str(args.mib)], args.before, args.rounds)))


if __name__ == "__main__":
    main()
