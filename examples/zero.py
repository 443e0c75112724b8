"""What ZeRO shards, and what moves for it: the same model on 8 processes, two pipeline stages by four replicas.

    python examples/zero.py

The ranks pose as two nodes of four, so that each stage has two replicas in either node. Every row trains the same
model on the same data; the last column says that it learned the same.
"""

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe

TOPOLOGY = fxpipe.Topology([("data", 4), ("pipe", 2)], ranks_per_node=4)
WIDTH, STEPS = 256, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.above = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.above(fxpipe.stage_boundary(self.below(x))) - x).square().mean()


def train(device: torch.device, replica: int, **options: object) -> tuple[float, fxpipe.Traffic, int]:
    """The last loss, what the last step moved, and the bytes of optimizer state on this rank."""
    forward_backward = fxpipe.compile(Model().to(device), TOPOLOGY, microbatches=4, **options)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)
    data = torch.randn(STEPS, 64, WIDTH, generator=torch.Generator().manual_seed(1))
    for batch in data:
        optimizer.zero_grad()
        loss = forward_backward(batch.chunk(4)[replica].to(device))
        forward_backward.clip_grad_norm_(1.0)
        optimizer.step()
    state = sum(tensor.nbytes for entry in optimizer.state.values() for tensor in entry.values() if tensor.dim())
    traffic = forward_backward.traffic()
    forward_backward.close()
    return loss.item(), traffic, state


def run() -> None:
    torch.set_num_threads(1)
    device = fxpipe.init()
    rank, replica = torch.distributed.get_rank(), TOPOLOGY.data_rank
    rows = []
    for zero, scope in [(0, "node"), (1, "data"), (1, "node"), (2, "node"), (3, "node")]:
        loss, traffic, state = train(device, replica, zero=fxpipe.Zero(zero, scope=scope))
        sums = (traffic.between, traffic.inside, state)
        rows.append((zero, scope if zero else "", *(f"{size / 1e6:.2f}" for size in sums), f"{loss:.5f}"))
    if rank == 0:
        headers = ("zero", "scope", "leaves the node", "stays inside", "optimizer state", "loss")
        print("MB per step, of rank 0")
        print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "left", *("right",) * 4)))


if __name__ == "__main__":
    fxpipe.launch(run, TOPOLOGY.world_size)
