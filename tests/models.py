"""The models that fxpipe is compared with plain PyTorch on, each a ``Case`` of the table ``CASES``.

They are ordinary modules: without fxpipe, ``stage_boundary`` returns its argument, and that is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary

Inputs = dict[str, Any]
WIDTH = 6


@dataclass(frozen=True)
class Case:
    """A model and how it is run. ``inputs``: (rows, generator) → the keyword arguments of one batch, if it has its own.

    ``options``: more options of ``fxpipe.compile``. ``cut``: (batch, number) → micro-batches, if rows are not in
    dimension 0 of every input. ``groups``: named parameters → the optimizer's groups.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs] | None = None
    stages: int = 4
    ranks: int = 4
    rows: int = 10
    microbatches: int = 4
    placement: Mapping[str, int] | None = None
    loss_fn: Callable[..., Any] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    tolerance: float = 0.0
    """0: equal to the last bit; otherwise, relative to a tensor's largest number."""
    options: Mapping[str, Any] = field(default_factory=dict)
    cut: Callable[[Inputs, int], list[Inputs]] | None = None
    groups: Callable[[Iterable[tuple[str, nn.Parameter]]], list[dict[str, Any]]] | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def batch(self, number: int = 0, rows: int | None = None) -> Inputs:
        assert self.inputs is not None
        return self.inputs(self.rows if rows is None else rows, torch.Generator().manual_seed(100 + number))

    def batches(self, count: int = 3, rows: int | None = None) -> list[Inputs]:
        return [self.batch(number, rows) for number in range(count)]


# --- batches ---


def vectors(rows: int, generator: torch.Generator) -> Inputs:
    return {"x": torch.randn(rows, WIDTH, generator=generator), "y": torch.randn(rows, WIDTH, generator=generator)}


def double_vectors(rows: int, generator: torch.Generator) -> Inputs:
    return {name: tensor.double() for name, tensor in vectors(rows, generator).items()}


def two_kinds(rows: int, generator: torch.Generator) -> Inputs:
    return {
        "image": torch.randn(rows, WIDTH, generator=generator),
        "text": torch.randn(rows, WIDTH, generator=generator),
    }


def images(rows: int, generator: torch.Generator) -> Inputs:
    return {
        "x": torch.randn(rows, 3, 8, 8, generator=generator),
        "y": torch.randn(rows, 3, 8, 8, generator=generator),
    }


def channels_last_images(rows: int, generator: torch.Generator) -> Inputs:
    batch = images(rows, generator)
    return batch | {"x": batch["x"].to(memory_format=torch.channels_last)}


def sequences(rows: int, generator: torch.Generator) -> Inputs:
    return {
        "x": torch.randn(rows, 5, WIDTH, generator=generator),
        "y": torch.randn(rows, 5, WIDTH, generator=generator),
    }


def tokens(rows: int, generator: torch.Generator) -> Inputs:
    return {
        "ids": torch.randint(0, 11, (rows, 5), generator=generator),
        "labels": torch.randint(0, 11, (rows, 5), generator=generator),
    }


def source_and_target(rows: int, generator: torch.Generator) -> Inputs:
    return {
        "source": torch.randint(0, 11, (rows, 7), generator=generator),
        "shifted": torch.randint(0, 11, (rows, 5), generator=generator),
        "labels": torch.randint(0, 11, (rows, 5), generator=generator),
    }


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Layers(nn.Module):
    """A module with square layers of these ``names``, of ``width`` numbers each."""

    names, width = "", WIDTH

    def __init__(self) -> None:
        super().__init__()
        for name in self.names.split():
            self.add_module(name, nn.Linear(self.width, self.width))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


# --- graphs of several shapes ---


class TwoTowers(Layers):
    """img0 → img1 → join ← txt."""

    names = "img0 img1 txt join"

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def image_tower(self, image: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.img0(image)), name="img1")
        return stage_boundary(torch.relu(self.img1(h)), name="join")

    def text_tower(self, text: Tensor) -> Tensor:
        return stage_boundary(F.gelu(self.txt(text)), name="join")

    def meet(self, v: Tensor, t: Tensor) -> Tensor:
        logits = self.join(v) @ t.T * self.logit_scale.exp()
        return F.cross_entropy(logits, torch.arange(logits.shape[0], device=logits.device))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        v = self.image_tower(image)
        t = self.text_tower(text)
        return self.meet(v, t)


class TwoTowersTextFirst(TwoTowers):
    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        t = self.text_tower(text)
        v = self.image_tower(image)
        return self.meet(v, t)


class Chain(nn.Module):
    """``stages`` linear layers with a boundary before each but the first."""

    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(stages))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x if place == 0 else stage_boundary(x, name=f"layer{place}")))
        return F.mse_loss(x, y)


class SharedByTwo(Layers):
    """One tensor used by two later stages."""

    names = "a f g head"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        u = stage_boundary(torch.tanh(self.f(h)))
        v = stage_boundary(torch.tanh(self.g(u)))
        return F.mse_loss(self.head(h) * v, y)


class Skip(nn.Module):
    """A skip over two stages, of 1 MiB for a micro-batch of two rows."""

    NUMBERS = 131072

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(self.NUMBERS) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(x * self.scales[0])
        u = stage_boundary(torch.tanh(h * self.scales[1]))
        v = stage_boundary(torch.tanh(u * self.scales[2]))
        return ((v + h) * self.scales[3]).square().mean()


def wide(rows: int, generator: torch.Generator) -> Inputs:
    return {"x": torch.randn(rows, Skip.NUMBERS, generator=generator)}


class Forked(Layers):
    """One value that three later stages read."""

    names = "a b c d"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)), name="b")
        g = stage_boundary(torch.tanh(self.b(h)), name="c")
        e = stage_boundary(self.c(g) * h, name="d")
        return F.mse_loss(self.d(e) + h, y)


class UNet(nn.Module):
    """Two levels; skips around both boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 4, 2, stride=2), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        d1 = torch.relu(self.down1(x))
        d2 = torch.relu(self.down2(d1))
        m = stage_boundary(torch.relu(self.middle(stage_boundary(d2))))
        u = torch.relu(self.up2(torch.cat([m, d2], 1)))
        return F.mse_loss(self.up1(torch.cat([u, d1], 1)), y)


class Attention(nn.Module):
    """Reads its context once, through one layer for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = linear(), nn.Linear(WIDTH, 2 * WIDTH), linear()

    def keys_and_values(self, context: Tensor) -> tuple[Tensor, ...]:
        return self.kv(context).chunk(2, -1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        k, v = self.keys_and_values(context)
        heads = [part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in (self.q(x), k, v)]
        attended = F.scaled_dot_product_attention(*heads, dropout_p=0.0)
        return self.o(attended.transpose(1, 2).flatten(2))


class AttentionReadingTwice(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, WIDTH, bias=False), linear()  # a bias of keys has no gradient but rounding
        del self.kv

    def keys_and_values(self, context: Tensor) -> tuple[Tensor, ...]:
        return self.k(context), self.v(context)


class Block(nn.Module):
    def __init__(self, cross: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(), nn.LayerNorm(WIDTH)
        self.cross, self.norm2 = cross, nn.LayerNorm(WIDTH) if cross else None
        self.up, self.down, self.norm3 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h)
        if self.cross is not None:
            x = x + self.cross(self.norm2(x), context)
        return x + self.down(F.gelu(self.up(self.norm3(x))))


class EncoderDecoder(nn.Module):
    """Cross-attention in every decoder block; a boundary after the encoder, and one amid the decoder."""

    def __init__(self, cross: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.embed_source, self.embed_target = nn.Embedding(11, WIDTH), nn.Embedding(11, WIDTH)
        self.encoder, self.dec1, self.dec2 = Block(), Block(cross()), Block(cross())
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, source: Tensor, shifted: Tensor, labels: Tensor) -> Tensor:
        memory = stage_boundary(self.encoder(self.embed_source(source)), name="decoder")
        h = stage_boundary(self.dec1(self.embed_target(shifted), memory), name="rest")
        logits = self.head(self.dec2(h, memory))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class OneStage(Layers):
    names = "a b"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(torch.tanh(self.a(x))), y)


class Diamond(Layers):
    """{trunk} → {f} ∥ {g} → {loss}: the two branches share their input, and the trunk uses it, too."""

    names = "trunk f g"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.trunk(x)))
        u, v = stage_boundary(self.f(h)), stage_boundary(self.g(h))
        return F.mse_loss(u * torch.sigmoid(v), y)


class UsedOften(Layers):
    """Values used several times by the stage that makes them, and by the last one that reads them."""

    names = "a f g"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        own = h * h + torch.sin(h)
        h, own = stage_boundary((h, own))
        u = stage_boundary(torch.tanh(self.f(h) + own))
        w = torch.tanh(self.g(u))
        return F.mse_loss(w * h + torch.cos(h) * u + h / 3 + u * 0.7, y)


class UsedOftenAmid(Layers):
    """A value used twice by a stage that is neither its maker nor its last reader: a sum in another order."""

    names = "a f g"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        u = stage_boundary(torch.tanh(self.f(h)) * h + torch.sin(h) / 3)
        return F.mse_loss(self.g(u) * h, y)


# --- what needs no gradient, or is not used ---


class FrozenMiddle(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class FrozenFirst(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[1].requires_grad_(False)


class FrozenBehind(Chain):
    """A gradient passes through three frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1:].requires_grad_(False)


class Adapter(nn.Module):
    """A frozen layer beside a product of two small matrices that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


class Adapted(Chain):
    """Frozen layers, and adapters in place of the last ones."""

    def __init__(self, adapters: int) -> None:
        super().__init__()
        self.requires_grad_(False)
        for place in range(4 - adapters, 4):
            self.layers[place] = Adapter()


class FrozenTower(TwoTowers):
    """The image tower is frozen, beside a text tower that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.img0.requires_grad_(False)
        self.img1.requires_grad_(False)


class DetachedBranch(Layers):
    names = "a f g head"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        u = stage_boundary(torch.tanh(self.f(h.detach())))
        v = stage_boundary(torch.tanh(self.g(h)))
        return F.mse_loss(self.head(u) + v, y)


class DetachedReceiver(Layers):
    """The first stage trains through one of its two values; nothing comes back for the other."""

    names = "a f g"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h, other = stage_boundary((h, torch.sin(h)))
        u = stage_boundary(self.f(other.detach() + x))
        return F.mse_loss(self.g(u) + h, y)


class UnusedOutput(Layers):
    """``extra`` crosses a boundary and nobody wants it; ``spare`` is a layer that nobody calls."""

    names = "a extra f spare head"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h, _ = stage_boundary((h, self.extra(h)))
        u = self.f(h)
        u, _ = stage_boundary((u, u.argmax(-1)))
        return F.mse_loss(self.head(u), y)


class UnusedPart(nn.Module):
    """Of two halves that cross a boundary in one tuple, one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = linear(), nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        half, _ = stage_boundary(torch.chunk(torch.tanh(self.a(x)), 2, -1))
        return F.mse_loss(self.head(half), y)


# --- what crosses a boundary ---


class MixedValues(nn.Module):
    """Integers, booleans, None, a plain number, one tensor twice and a nested container behind two boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.embed, self.f, self.head = linear(), nn.Embedding(WIDTH, WIDTH), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        parts = {"h": h, "ids": h.argmax(-1), "mask": h > 0, "none": None, "scale": 0.5, "more": [h.mean(), (h * 2, h)]}
        parts = stage_boundary(stage_boundary(parts))
        if parts["none"] is None:
            u = self.embed(parts["ids"]) + parts["h"] * parts["mask"]
        mask, u = stage_boundary((parts["mask"], torch.tanh(self.f(u)) * parts["scale"]))
        mean, (double, again) = parts["more"]
        return F.mse_loss(torch.where(mask, self.head(u), u) + mean * double + again, y)


class OddTensors(Layers):
    """Tensors of other types and shapes: half precision, double, complex, without elements, without dimensions."""

    names = "a f g"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        odd = h.to(torch.bfloat16), h.double(), torch.view_as_complex(h.unflatten(-1, (-1, 2))), h[:, :0], h.sum()
        half, double, imaginary, empty, total = stage_boundary(odd)
        u = self.f(half.float()) + double.float() + torch.view_as_real(imaginary).flatten(1)
        u = stage_boundary(torch.tanh(torch.cat([u, empty], 1)))
        return F.mse_loss(self.g(u) + total, y)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(torch.relu(self.a(x)))
        h = stage_boundary(torch.relu(self.b(h)))
        h = stage_boundary(torch.relu(self.c(h)))
        return F.mse_loss(self.d(h), y)


class Views(nn.Module):
    """A transposed view, a slice with gaps, an expanded tensor and overlapping windows cross boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.f, self.head = linear(), nn.Linear(5, 5), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        turned, gaps = stage_boundary((h.transpose(1, 2), h[..., ::2]))
        mixed = self.mix(turned)
        spread, windows = stage_boundary((mixed.mean(1, keepdim=True).expand(-1, WIDTH, -1), mixed.unfold(1, 3, 1)))
        u = torch.tanh(self.f(spread.transpose(1, 2))) + windows.mean((1, 3)).unsqueeze(-1)
        return F.mse_loss(self.head(stage_boundary(u)) + gaps.repeat(1, 1, 2), y)


class Chunks(nn.Module):
    """Three views of one tensor, each on its way to another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.f, self.g = nn.Linear(WIDTH, 3 * WIDTH), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = stage_boundary(torch.tanh(self.qkv(x)).chunk(3, dim=-1))
        u = stage_boundary(self.f(q))
        w = stage_boundary(self.g(k))
        return F.mse_loss(u * w + v, y)


# --- state, and writes in place ---


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.c, self.norm3 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)
        self.d = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(torch.relu(self.norm1(self.a(x))))
        h = stage_boundary(torch.relu(self.norm2(self.b(h))))
        h = stage_boundary(torch.relu(self.norm3(self.c(h))))
        return F.mse_loss(self.d(h), y)


class BufferInBackward(Layers):
    """A buffer that is written by each micro-batch, and that the backward of each needs as it was then."""

    names = "a f g"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(self.a(x))
        self.scale.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        u = stage_boundary(torch.tanh(self.f(h * self.scale)))
        return F.mse_loss(self.g(u), y)


class Parametrized(Layers):
    """Spectral norm, which writes its buffers in forward, and weight norm."""

    names = "a"

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.utils.parametrizations.spectral_norm(linear())
        self.g = nn.utils.parametrizations.weight_norm(linear())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u = stage_boundary(torch.tanh(self.f(stage_boundary(self.a(x)))))
        return F.mse_loss(self.g(u), y)


class CountedCalls(Chain):
    """A buffer that is written and read by nobody: it runs with what comes next in its module."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x, y)


class NamedAsGraphs(nn.Module):
    """Parts with names that ``fx.GraphModule`` has, or Python has, as in graph networks and vector quantisers."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.recompile = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({"class": nn.Linear(WIDTH, WIDTH), "class_": nn.Linear(WIDTH, WIDTH)})
        self.register_buffer("code", torch.ones(WIDTH))
        self.meta = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(self.graph(x) * self.meta)
        h = stage_boundary(self.parts["class_"](torch.tanh(self.parts["class"](h))))
        self.code.add_(h.detach().mean(0))
        return F.mse_loss(self.recompile(h) + self.code, y)


class Normalised(nn.Module):
    """Keeps for its second call what it has found in its first (RevIN, Kim et al. 2022)."""

    def forward(self, x: Tensor, back: bool = False) -> Tensor:
        if back:
            return x * self.deviation + self.mean
        self.mean, self.deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True)
        return (x - self.mean) / self.deviation


class SetsAttributes(nn.Module):
    """What it sets on itself it reads in the same call, tensors of other stages in a list, too; a table, once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner = nn.ModuleDict({"normalised": Normalised()})
        self.table: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(float(WIDTH))
        self.scale, self.skips, self.named, self.width = torch.ones(x.shape[1]) * 2, [], {}, x.shape[1]
        h = stage_boundary(self.first(self.inner["normalised"](x)) + self.table)
        self.skips.append(h)
        self.named["second", 0] = stage_boundary(torch.tanh(self.second(h)))
        h = self.third(self.named["second", 0] * self.scale) + self.skips.pop() / self.width
        self.last_loss = F.mse_loss(self.inner["normalised"](h, back=True), y)
        return self.last_loss


class SharedMask(Layers):
    """A mask built by writing into it, used by two stages."""

    names = "a f g"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], WIDTH, device=x.device)
        mask[..., :2] = 0.5
        mask[:, -1] = 2.0
        h = stage_boundary(torch.tanh(self.a(x)) * mask)
        u = stage_boundary(torch.tanh(self.f(h)))
        return F.mse_loss(self.g(u) * mask, y)


class WriteBehind(Layers):
    """In-place operations behind boundaries, and in front of them."""

    names = "a f g head"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        h += 0.25
        h = stage_boundary(h)
        h.add_(1)
        u = stage_boundary(self.f(h))
        v = stage_boundary(self.g(F.relu(u, inplace=True)))
        v[:, 0] = 0.5
        return F.mse_loss(self.head(v.tanh_()), y)


class IndexWrites(Layers):
    """A result put together by writing into it, by slices and by a mask."""

    names = "a f g"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(self.a(x))
        out = torch.empty_like(h)
        out[..., 0] = 1
        out[:, 1:] = h[:, 1:]
        u = stage_boundary(self.f(out)).clone()
        u[u < 0] = 0
        return F.mse_loss(self.g(u), y)


class WrittenInput(Layers):
    """The batch itself is written, and read behind a boundary as it was written."""

    names = "a f"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2).clamp_(-1, 1)
        h = stage_boundary(torch.tanh(self.a(x)))
        return F.mse_loss(self.f(h) + x, y)


# --- inputs, losses, and other modules ---


class ColumnBatch(Layers):
    """Rows lie along dimension 1 of ``x``, and ``scale`` belongs to no row."""

    names = "a f g"

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x) * scale))
        u = stage_boundary(torch.tanh(self.f(h)))
        return F.mse_loss(self.g(u).mean(0) * scale, y)


def columns(rows: int, generator: torch.Generator) -> Inputs:
    x, scale = torch.randn(5, rows, WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)
    return {"y": torch.randn(rows, WIDTH, generator=generator), "x": x, "scale": scale}


def cut_columns(batch: Inputs, microbatches: int) -> list[Inputs]:
    xs, ys = batch["x"].tensor_split(microbatches, 1), batch["y"].tensor_split(microbatches)
    return [{"y": y, "x": x, "scale": batch["scale"]} for x, y in zip(xs, ys, strict=True)]


class Bare(Layers):
    """The loss stage holds no parameter, and the middle stage no input of the batch."""

    names = "a f"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        return F.mse_loss(stage_boundary(self.f(h)), y)


class Optional(Layers):
    """What it computes depends on which inputs there are."""

    names = "a f"

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, mode: str = "tanh") -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)) if mode == "tanh" else torch.relu(self.a(x)))
        error = (self.f(h) - y).square()
        if mask is not None:
            error = error * mask
        return error.mean()


class Positions(nn.Module):
    """Position ids made in forward, used by the first stage and by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.last = nn.Embedding(11, WIDTH), nn.Embedding(9, WIDTH), nn.Embedding(9, WIDTH)
        self.f, self.head = linear(), nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        h = stage_boundary(self.embed(ids) + self.place(positions))
        u = stage_boundary(torch.tanh(self.f(h)))
        logits = self.head(u + self.last(positions))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Tied(nn.Module):
    """Embedding and head share a matrix, in the first and the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(linear() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = stage_boundary(torch.tanh(block(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Causal(nn.Module):
    """Sizes unpacked from a shape, a triangular mask and masked attention between boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.f = nn.Parameter(torch.randn(WIDTH, WIDTH)), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = stage_boundary(torch.einsum("btd,de->bte", x, self.weight))
        rows, length, width = q.shape
        mask = torch.tril(torch.ones(length, length, device=x.device, dtype=torch.bool))
        scores = (q @ q.transpose(-1, -2) / width**0.5).masked_fill(~mask, float("-inf"))
        attended = stage_boundary(scores.softmax(-1) @ q)
        return F.mse_loss(self.f(attended).view(rows, length, width), y)


class OneLayerEverywhere(Layers):
    """The same layer in three stages: owned, and its gradients added up, by three ranks."""

    names = "layer head"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = stage_boundary(torch.tanh(self.layer(x)))
        return F.mse_loss(self.head(x), y)


IGNORED = -100


class Tagger(nn.Module):
    """A class for each token; ``loss``: of logits and labels, of which some are ignored."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, WIDTH), linear(), nn.Linear(WIDTH, 11)
        self.loss = loss
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        h = stage_boundary(torch.tanh(self.mix(self.embed(ids))))
        return self.loss(self.head(h).flatten(0, 1), labels.flatten())


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def total_and_count(logits: Tensor, labels: Tensor) -> fxpipe.Sum:
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return fxpipe.Sum(total, (labels != IGNORED).sum())


def sum_in_a_dict(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"loss": total_and_count(logits, labels)}


def labels_left(ids: Tensor, labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def masked_tokens(rows: int, generator: torch.Generator) -> Inputs:
    """A fifth of the labels are ignored, and all of the second of four micro-batches of ten rows."""
    batch = tokens(rows, generator)
    batch["labels"][torch.rand(rows, 5, generator=generator) < 0.2] = IGNORED
    batch["labels"][3:6] = IGNORED
    return batch


class DictLoss(Layers):
    names = "a f g"

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = stage_boundary(torch.tanh(self.a(x)))
        out = self.g(stage_boundary(torch.tanh(self.f(h))))
        return {"loss": F.mse_loss(out, y), "error": (out - y).abs().mean(), "output": out}


class Features(Layers):
    """Returns no loss: it is for a ``loss_fn``."""

    names = "a f g"

    def forward(self, x: Tensor, scale: float = 1.0, invert: bool = False) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(x)))
        u = stage_boundary(torch.tanh(self.f(h)))
        return self.g(-u if invert else u) * scale


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def features_and_target(rows: int, generator: torch.Generator) -> Inputs:
    batch = vectors(rows, generator)
    return {"x": batch["x"], "invert": True, "target": batch["y"]}


class Nested(Layers):
    """One input is a dict of tensors."""

    names = "a f g"

    def forward(self, batch: dict[str, Tensor], weight: Tensor) -> Tensor:
        h = stage_boundary(torch.tanh(self.a(batch["x"])))
        u = stage_boundary(torch.tanh(self.f(h + batch["more"][0])))
        return ((self.g(u) - batch["y"]).square().mean(1) * weight).mean()


def nested(rows: int, generator: torch.Generator) -> Inputs:
    batch = vectors(rows, generator)
    more = [torch.randn(rows, WIDTH, generator=generator)]
    return {"batch": {**batch, "more": more}, "weight": torch.rand(rows, generator=generator)}


class Recurrent(nn.Module):
    """An LSTM in each of two stages, its state handed from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(WIDTH, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, (hidden, cell) = self.first(x)
        out, hidden, cell = stage_boundary((out, hidden, cell))
        out, _ = self.second(out, (hidden, cell))
        return F.mse_loss(self.head(stage_boundary(out)), y)


class TransformerLayers(nn.Module):
    """torch.nn's own encoder layers, which are opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True) for _ in range(3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x if place == 0 else stage_boundary(x))
        return F.mse_loss(x, y)


def tower(inputs: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh())


class Join(Layers):
    """The last stage of two towers given as callables; its inputs in the order of the edges."""

    names = "mix"

    def forward(self, y: Tensor, v: Tensor, t: dict[str, Any]) -> Tensor:
        if float(t["text"].detach().sum()) > 1e9:  # a branch on a tensor's value, which nothing can trace
            return v.sum()
        return F.mse_loss(self.mix(v) * t["text"], y)


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()

    def forward(self, text: Tensor) -> dict[str, Any]:
        return {"text": self.layers(text), "length": text.shape[0], "none": None}


class Callables(nn.Module):
    """Two towers whose stages are the user's own; the plain model calls them one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.img0, self.img1, self.txt, self.join = tower(), tower(), TextTower(), Join()

    def forward(self, image: Tensor, text: Tensor, y: Tensor) -> Tensor:
        return self.join(y, self.img1(self.img0(image)), self.txt(text))

    def stage_graph(self) -> fxpipe.StageGraph:
        return fxpipe.StageGraph.from_callables(
            {"join": self.join, "img0": self.img0, "img1": self.img1, "txt": self.txt},
            edges=[("img0", "img1"), ("img1", "join"), ("txt", "join")],
            inputs={"img0": ["image"], "txt": ["text"], "join": ["y"]},
        )


def two_kinds_and_target(rows: int, generator: torch.Generator) -> Inputs:
    return two_kinds(rows, generator) | {"y": torch.randn(rows, WIDTH, generator=generator)}


def double_chain() -> nn.Module:
    return Chain().double()


def slow_biases(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    pairs = list(named)
    slow = [parameter for name, parameter in pairs if "bias" in name]
    return [{"params": slow, "lr": 0.001}, {"params": [p for name, p in pairs if "bias" not in name]}]


_MOMENTUM = {"lr": 0.05, "momentum": 0.9}


def tagger(loss: Callable[[Tensor, Tensor], Any], **options: Any) -> Case:
    """Loss and gradients of the whole batch, whatever is ignored where."""
    return Case(
        partial(Tagger, loss),
        masked_tokens,
        stages=2,
        ranks=2,
        optimizer=torch.optim.SGD,
        optimizer_options=_MOMENTUM,
        tolerance=1e-12,
        options=options,
    )


CASES: dict[str, Case] = {
    "two towers, image first": Case(TwoTowers, two_kinds),
    "two towers, text first": Case(TwoTowersTextFirst, two_kinds),
    "two towers on 2 ranks": Case(TwoTowers, two_kinds, ranks=2, placement={"img0": 0, "img1": 1, "txt": 1, "join": 0}),
    "two groups": Case(TwoTowers, two_kinds, groups=slow_biases),
    "chain": Case(Chain, vectors, optimizer=torch.optim.SGD, optimizer_options=_MOMENTUM),
    "chain in double precision": Case(double_chain, double_vectors),
    "shared by two": Case(SharedByTwo, vectors),
    "skip of 1 MiB": Case(Skip, wide, rows=8),
    "forked": Case(Forked, vectors, ranks=2, placement={"a": 0, "b": 1, "c": 1, "d": 1}, tolerance=1e-6),
    "U-Net": Case(UNet, images, stages=3, ranks=3),
    "encoder-decoder": Case(EncoderDecoder, source_and_target, stages=3, ranks=3),
    "encoder-decoder, context read twice": Case(
        partial(EncoderDecoder, AttentionReadingTwice),
        source_and_target,
        stages=3,
        ranks=3,
        tolerance=1e-6,
        optimizer=torch.optim.SGD,
        optimizer_options=_MOMENTUM,
    ),
    "one stage": Case(OneStage, vectors, stages=1, ranks=1),
    "6 stages on 3 ranks": Case(partial(Chain, 6), vectors, stages=6, ranks=3),
    "6 stages in turn on 3 ranks": Case(
        partial(Chain, 6),
        vectors,
        stages=6,
        ranks=3,
        placement={"layers.0": 0} | {f"layer{place}": place % 3 for place in range(1, 6)},
    ),
    "diamond": Case(Diamond, vectors),
    "used often": Case(UsedOften, vectors, stages=3, ranks=3),
    "used often amid": Case(UsedOftenAmid, vectors, stages=3, ranks=3, tolerance=1e-6),
    "frozen middle": Case(FrozenMiddle, vectors),
    "frozen first": Case(FrozenFirst, vectors),
    "frozen behind": Case(FrozenBehind, vectors),
    "two adapters": Case(partial(Adapted, 2), vectors),
    "an adapter": Case(partial(Adapted, 1), vectors),
    "frozen tower": Case(FrozenTower, two_kinds),
    "detached branch": Case(DetachedBranch, vectors),
    "detached receiver": Case(DetachedReceiver, vectors, stages=3, ranks=3),
    "unused output": Case(UnusedOutput, vectors, stages=3, ranks=3),
    "unused part": Case(UnusedPart, vectors, stages=2, ranks=2),
    "mixed values": Case(MixedValues, vectors, stages=3, ranks=3),
    "odd tensors": Case(OddTensors, vectors, stages=3, ranks=3),
    "channels last": Case(ChannelsLast, channels_last_images),
    "views": Case(Views, sequences),
    "chunks": Case(Chunks, vectors),
    "BatchNorm": Case(BatchNorm, images),
    "buffer in backward": Case(BufferInBackward, vectors, stages=3, ranks=3),
    "parametrized": Case(Parametrized, vectors, stages=3, ranks=3),
    "index writes": Case(IndexWrites, vectors, stages=3, ranks=3),
    "causal attention": Case(Causal, sequences, stages=3, ranks=3),
    "counted calls": Case(CountedCalls, vectors, stages=3, ranks=3),
    "named as graphs are": Case(NamedAsGraphs, vectors, stages=3, ranks=3),
    "sets attributes": Case(SetsAttributes, vectors, stages=3, ranks=3),
    "shared mask": Case(SharedMask, vectors, stages=3, ranks=3),
    "write behind": Case(WriteBehind, vectors),
    "written input": Case(WrittenInput, vectors, stages=2, ranks=2),
    "positions": Case(Positions, tokens, stages=3, ranks=3),
    "tied": Case(Tied, tokens, tolerance=1e-6, optimizer=torch.optim.SGD, optimizer_options=_MOMENTUM),
    "one layer everywhere": Case(
        OneLayerEverywhere, vectors, tolerance=1e-6, optimizer=torch.optim.SGD, optimizer_options=_MOMENTUM
    ),
    "Sum": tagger(total_and_count),
    "Sum in a dict": tagger(sum_in_a_dict),
    "weighted mean": tagger(mean, loss_weight=labels_left),
    "columns": Case(
        ColumnBatch, columns, stages=3, ranks=3, options={"batch_dim": {"x": 1, "scale": None}}, cut=cut_columns
    ),
    "dict loss": Case(DictLoss, vectors, stages=3, ranks=3),
    "loss function": Case(Features, features_and_target, stages=3, ranks=3, loss_fn=squared_error),
    "nested inputs": Case(Nested, nested, stages=3, ranks=3),
    "LSTM": Case(Recurrent, sequences, stages=3, ranks=3),
    "transformer layers": Case(TransformerLayers, sequences, stages=3, ranks=3),
    "callables": Case(Callables, two_kinds_and_target),
}


# --- models that draw random numbers: their stages can be called one by one ---


class Parted(Layers):
    """A model whose stages are its ``parts``, each from the values of the one before to those of the next."""

    def parts(self) -> list[Callable[..., Any]]:
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values: Any = (x, y)
        for part in self.parts():
            values = part(*values)
        return values


class Dropouts(Parted):
    """nn.Dropout, F.dropout, F.dropout in a stage that writes in place, none at all."""

    names = "a b c d"

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def parts(self) -> list[Callable[..., Any]]:
        return [self.first, self.second, self.third, self.last]

    def first(self, x: Tensor, y: Tensor) -> Any:
        return stage_boundary(self.drop(torch.tanh(self.a(x)))), y

    def second(self, h: Tensor, y: Tensor) -> Any:
        return stage_boundary(self.b(F.dropout(h, 0.3, self.training))), y

    def third(self, h: Tensor, y: Tensor) -> Any:
        return stage_boundary(F.dropout(self.c(h), 0.2, training=self.training, inplace=True)), y

    def last(self, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.d(h), y)


class Noise(Parted):
    """Noise drawn once, in the second stage, and used there and in the last."""

    names = "a f g"

    def parts(self) -> list[Callable[..., Any]]:
        return [self.first, self.second, self.last]

    def first(self, x: Tensor, y: Tensor) -> Any:
        return stage_boundary(torch.tanh(self.a(x))), y

    def second(self, h: Tensor, y: Tensor) -> Any:
        noise = torch.randn_like(h)
        return stage_boundary(torch.tanh(self.f(h) + noise)), noise, y

    def last(self, h: Tensor, noise: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.g(h), y + 0.1 * noise)


PLAIN: dict[str, Case] = {
    "bare": Case(Bare, vectors, stages=3, ranks=3),
    "optional inputs": Case(Optional, vectors, stages=2, ranks=2),
}
"""More models, for tests of their own."""

RANDOM: dict[str, Case] = {
    "dropout": Case(Dropouts, vectors),
    "noise in two stages": Case(Noise, vectors, stages=3, ranks=3),
}
