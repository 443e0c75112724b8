"""Offload: saved tensors go to the host's memory and come back, and gradients have the bits of plain autograd."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import StageGraph, Topology
from fxpipe.device import HostCopies
from fxpipe.run.actions.offload import Offloaded, storages
from fxpipe.schedules import Costs, build
from fxpipe.torch_compat import storage_id
from tests.graphs import chain
from tests.harness import assert_same, gradients_of

WIDTH = 8
CPU = torch.device("cpu")


class Parts(nn.Module):
    """The parameters and buffers of the kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.embedding, self.sparse = nn.Embedding(10, WIDTH), nn.Embedding(10, WIDTH, sparse=True)
        self.batch_norm, self.layer_norm, self.conv = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.Conv1d(3, 3, 3)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.register_buffer("large", torch.randn(100, 100))
        self.register_buffer("ids", torch.tensor([1, 2, 3]))


class InCtx(torch.autograd.Function):
    """Keeps its input in an attribute, which hooks do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.x * gradient


class SavesBoth(torch.autograd.Function):
    """Saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * y + 0 * x


def in_place(p: Parts, x: Tensor) -> Tensor:
    y = x @ p.weight
    y.mul_(2).relu_()
    return y * x


def inner_gradient(p: Parts, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((x @ p.weight).pow(3).sum(), x, create_graph=True)
    return gradient.square()


def own_hooks(p: Parts, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x @ p.weight).exp()


def attention(p: Parts, x: Tensor) -> Tensor:
    heads = (x @ p.weight).reshape(1, 5, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(*heads.expand(3, 1, 2, 5, 4), is_causal=True)


def compiled(p: Parts, x: Tensor) -> Tensor:
    return torch.compile(lambda x, weight: F.gelu(x @ weight) ** 2, backend="aot_eager")(x, p.weight)  # type: ignore[no-any-return]


def jagged(p: Parts, x: Tensor) -> Tensor:
    nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    return (nested.sin() * nested.exp()).values()  # type: ignore[no-any-return]


def odd_bytes(p: Parts, x: Tensor) -> Tensor:
    """A storage of 10 bytes: two float32 and, with the two bytes behind, ten booleans."""
    memory = torch.tensor([0, 0, 128, 63, 0, 0, 0, 64, 1, 1], dtype=torch.uint8)
    factors, mask = memory[:8].view(torch.float32), memory.view(torch.bool)
    return x[:, :2] * factors + torch.where(mask, x.reshape(4, 10), 0.0).sum()


def conjugate(p: Parts, x: Tensor) -> Tensor:
    z = torch.view_as_complex((x @ p.weight).reshape(-1, 2))
    return torch.view_as_real(z.conj() * z * z) * z.conj().imag[:, None]


Kind = Callable[[Parts, Tensor], Tensor]
KINDS: dict[str, Kind] = {  # x is no parameter and no input of the batch
    "linear": lambda p, x: x @ p.weight.t(),
    "written in place, then saved": in_place,
    "views of one storage": lambda p, x: (lambda a, b: a * b)(*x.chunk(2, -1)),
    "transposed": lambda p, x: x.t() * x.t(),
    "expanded": lambda p, x: x[:1].expand(5, WIDTH) * x[:1].expand(5, WIDTH),
    "strided": lambda p, x: x[::2] * x[1:4],
    "part of a storage": lambda p, x: (x[2:3] * x[3:4]).exp()[:0] + x[2:3] * x[3:4],
    "saved outputs": lambda p, x: x.softmax(-1).exp(),
    "dropout": lambda p, x: F.dropout(x, 0.5),
    "where": lambda p, x: torch.where(x > 0, x, x.exp()),
    "indices": lambda p, x: x[p.ids] * 2.5,
    "embedding": lambda p, x: p.embedding(p.ids.clone()) + x[:3],
    "sparse gradients": lambda p, x: p.sparse(p.ids.clone()) * x[:3],
    "complex": lambda p, x: torch.fft.fft(x @ p.weight).abs(),
    "conjugate": conjugate,
    "float64": lambda p, x: (x.double() ** 2).float(),
    "bfloat16": lambda p, x: ((x @ p.weight).bfloat16() ** 2).float(),
    "no elements": lambda p, x: (x[:0] ** 2).sum() + x,
    "batch norm": lambda p, x: p.batch_norm(x),
    "layer norm": lambda p, x: p.layer_norm(x),
    "conv": lambda p, x: p.conv(x[:3][None]),
    "lstm": lambda p, x: p.lstm(x[None])[0],
    "encoder layer": lambda p, x: p.layer(x[None]),
    "attention": attention,
    "attribute of a ctx": lambda p, x: InCtx.apply(x),
    "save_for_backward": lambda p, x: SavesBoth.apply(x),
    "checkpoint": lambda p, x: checkpoint(lambda y: (y @ p.weight).exp(), x, use_reentrant=False) * x,
    "reentrant checkpoint": lambda p, x: checkpoint(lambda y: (y @ p.weight).exp(), x, use_reentrant=True) + x,
    "differentiates": inner_gradient,
    "hooks of its own": own_hooks,
    "vmap": lambda p, x: torch.vmap(lambda row: (row**2).sum())(x),
    "view of a buffer": lambda p, x: p.large[3:8, 2:10] * x,
    "detached parameter": lambda p, x: x @ p.weight.detach() @ p.weight.t().detach(),
    "torch.compile": compiled,
    "jagged": jagged,
    "storage of odd size": odd_bytes,
}


def out_and_back(offloaded: Offloaded) -> None:
    for move in (offloaded.leave, offloaded.release, offloaded.fetch, offloaded.arrive):
        move()


def new(stays: nn.Module | None = None, copies: HostCopies | None = None) -> Offloaded:
    tensors = [] if stays is None else [*stays.parameters(), *stays.buffers()]
    return Offloaded(copies or HostCopies(CPU), storages(tensors), "amid")


@dataclass
class Plain:
    """Plain autograd, and the storages that it saves of tensors that are not among ``stays``."""

    stays: set[int] = field(default_factory=set)
    saved: dict[int, Tensor] = field(default_factory=dict)

    def saving(self) -> Any:
        def note(tensor: Tensor) -> Tensor:
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if tensor.is_nested else [tensor]
            for part in parts:
                owner = getattr(part, "_base", None)
                is_own = not isinstance(owner if part._is_view() else part, nn.Parameter)
                if is_own and not (tensor.is_nested and part.dtype is torch.int64) and part.nbytes:
                    self.saved |= {storage_id(part): part}
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


def ran(kind: Kind, hooks: Offloaded | Plain) -> list[Tensor | None]:
    """The output, and all gradients; a storage that leaves is overwritten while it is away."""
    torch.manual_seed(0)
    parts = Parts()
    hooks.stays = storages([*parts.parameters(), *parts.buffers()])
    leaf = torch.randn(5, WIDTH, requires_grad=True)
    x = leaf * 1.0
    with hooks.saving():
        out = kind(parts, x)
    result = out.detach().clone()
    if isinstance(hooks, Offloaded):
        hooks.leave()
        away = [memory.storage for memory in hooks._memories.values()]
        hooks.release()
        for storage in away:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # type: ignore[arg-type]
        hooks.fetch()
        hooks.arrive()
    out.sum().backward()
    gradients = [parameter.grad for parameter in parts.parameters()]
    return [result, leaf.grad, *(g.to_dense() if g is not None and g.is_sparse else g for g in gradients)]


STAY = {"attribute of a ctx", "hooks of its own"}  # hooks do not see them
STAY |= {"indices", "no elements", "view of a buffer", "detached parameter"}


@pytest.mark.parametrize("page", [2**25, 64])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_have_the_bits_of_plain_autograd(name: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded, plain, moved = new(), Plain(), []
    offloaded.copies.page = page
    leave = Offloaded.leave
    monkeypatch.setattr(Offloaded, "leave", lambda self: (leave(self), moved.append(self.left)))
    for got, wanted in zip(ran(KINDS[name], offloaded), ran(KINDS[name], plain), strict=True):
        assert_same(got, wanted, name)
    ((count, _),) = moved
    print(name, count, len(set(plain.saved) - plain.stays))
    assert count == len(set(plain.saved) - plain.stays)
    assert (count == 0) == (name in STAY)
