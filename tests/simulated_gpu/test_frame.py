from __future__ import annotations
import torch, os
import torch.distributed as dist
import fxpipe
from tests import simulated_gpu
from tests.gpus import Gpus


def summed() -> list[float]:
    device = fxpipe.init()
    x = torch.full((3,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(x)
    return [str(device), x.tolist()]


def test_ranks(gpus: Gpus) -> None:
    assert gpus.run(summed, ranks=3) == [[f"cuda:{rank}", [6.0] * 3] for rank in range(3)]
