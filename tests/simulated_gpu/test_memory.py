"""Memory of the device and tensors in it: what the host may not touch, what new memory holds, sparse tensors."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests import simulated_gpu
from tests.gpus import Gpus
from tests.scripts import Scripts


def test_the_host_faults_on_device_memory(gpu_scripts: Scripts, tmp_path: Path) -> None:
    script = tmp_path / "touch.py"
    script.write_text("import ctypes, torch\nctypes.string_at(torch.ones(1, device='cuda').data_ptr(), 4)\n")
    status, _, _ = gpu_scripts.outcome([str(script)], tmp_path)
    assert status == -signal.SIGSEGV


def new_and_freed() -> list[bool]:
    x = torch.empty(8, device="cuda")
    new, pointer = bool(x.isnan().all()), x.fill_(1).data_ptr()
    del x
    others = [torch.empty(8, device="cuda") for _ in range(1000)]  # one of them is where it was
    return [new, pointer in [other.data_ptr() for other in others], all(bool(other.isnan().all()) for other in others)]


def memory() -> list[int]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(1024, device="cuda")
    y = torch.empty(2048, device="cuda")
    del x
    return [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, y.nbytes]


def mixed(other: str) -> str:
    try:
        torch.ones(2, device="cuda") + torch.ones(2, device=other)
    except RuntimeError as error:
        return str(error)
    return "no error"


def sparse(device: str) -> dict[str, list[float]]:
    indices = torch.tensor([[0, 2, 2], [1, 0, 0]], device=device)
    x = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0], device=device), (3, 2))
    summed, dense = x.coalesce(), torch.ones(3, 2, device=device)
    found = {
        "indices": summed.indices(),
        "values": summed.values(),
        "dense": x.to_dense(),
        "sum": (x + 2 * summed).to_dense(),
        "added to a dense one": dense.clone().add_(x, alpha=0.5),
        "product": torch.sparse.mm(summed, torch.ones(2, 2, device=device)),
        "masked": dense.sparse_mask(summed).values(),
        "in place": summed.clone().mul_(3).to_dense(),
        "to the host": x.cpu().to_dense(),
        "from the host": x.cpu().to(device).to_dense(),
        "zeroed": x.clone().zero_().to_dense(),
    }
    assert all(tensor.device.type == device or name == "to the host" for name, tensor in found.items())
    return {name: tensor.tolist() for name, tensor in found.items()} | {"count": [x._nnz(), summed._nnz()]}


def embedded(device: str) -> list[list[float]]:
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4, sparse=True, device="cpu").to(device)
    optimizers = torch.optim.SparseAdam(embedding.parameters(), lr=0.1), torch.optim.SGD(embedding.parameters(), lr=0.1)
    numbers = torch.tensor([1, 3, 3, 7], device=device)
    for optimizer in optimizers:
        for _ in range(2):
            optimizer.zero_grad()
            embedding(numbers).square().sum().backward()
            optimizer.step()
    gradient = embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    return [*embedding.weight.tolist(), *gradient.to_dense().tolist()]


def raced() -> set[str]:
    """A sparse tensor's values are written on another stream."""
    values = torch.ones(2, device="cuda")
    x = torch.sparse_coo_tensor(torch.tensor([[0, 2]], device="cuda"), values, (3,))
    torch.cuda.synchronize()
    with simulated_gpu.watched() as found, torch.cuda.stream(torch.cuda.Stream()):
        values.add_(1)
        torch.cuda.default_stream().synchronize()
        with torch.cuda.stream(torch.cuda.default_stream()):
            x.to_dense()
    return {report.kind for report in simulated_gpu.faults(found)}


def trained(device: str) -> list[float]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 16), layer, nn.LayerNorm(16), nn.Linear(16, 50)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(1), list[Tensor]()
    for _ in range(3):
        numbers = torch.randint(0, 50, (4, 10), generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(numbers).flatten(0, 1), numbers.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def drawn() -> list[bool]:
    """Whether numbers follow from one seed, and from one state, on the second device; and from nothing else."""
    found = []
    with torch.cuda.device(1):
        for _ in range(2):
            torch.manual_seed(3)
            found.append(torch.rand(3, device="cuda").tolist())
        state = torch.cuda.get_rng_state()
        for _ in range(2):
            torch.cuda.set_rng_state(state)
            found.append(torch.rand(3, device="cuda").tolist())
    first, again, behind, behind_again = found
    return [first == again, behind == behind_again, first != behind]


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (new_and_freed, [True, True, True]),
        (memory, [8192, 4096 + 8192, 8192]),
        (raced, {"race"}),  # parts of a sparse tensor
        (drawn, [True, True, True]),
    ],
)
def test_of_memory_and_random_numbers(call: Callable[[], Any], wanted: Any, gpus: Gpus) -> None:
    assert gpus.run(call, ranks=1) == [wanted]


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_are_refused(other: str, gpus: Gpus) -> None:
    [error] = gpus.run(mixed, other, ranks=1)
    assert "Expected all tensors to be on the same device, but found at least two devices" in error


@pytest.mark.parametrize(("call", "tolerance"), [(sparse, 0.0), (embedded, 1e-6), (trained, 1e-6)])
def test_what_is_computed_is_the_cpus(call: Callable[[str], Any], tolerance: float, gpus: Gpus) -> None:
    [found], wanted = gpus.run(call, "cuda", ranks=1), call("cpu")
    for got, number in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        assert got == pytest.approx(number, rel=tolerance, abs=1e-8 if tolerance else 0.0)
