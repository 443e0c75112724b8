"""The models of vlm.py: plain modules with the shapes of published configs, on the meta device.

They are written out because a benchmark needs the shapes alone, and neither checkpoints nor code that looks at numbers.
What is small beside the products is left out: rotary embeddings, and a second frame of a still image. Attention is
counted without its mask. Shapes are from each model's config.json (Whisper: its paper's table 1; ImageBind:
``imagebind_huge``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = 512
"""Text tokens of a sample."""


@dataclass(frozen=True)
class Tower:
    """A stack of transformer layers. ``keys``: heads of keys and values. ``size``: the width of a head. ``window``:
    tokens that see each other; in every ``whole``-th layer all do."""

    layers: int
    width: int
    inner: int
    heads: int
    keys: int | None = None
    size: int | None = None
    gated: bool = False
    causal: bool = False
    crossed: bool = False
    window: int | None = None
    whole: int = 8

    def modules(self) -> nn.ModuleList:
        return nn.ModuleList(Layer(self, layer % self.whole < self.whole - 1) for layer in range(self.layers))

    def norm(self) -> nn.Module:
        return nn.RMSNorm(self.width) if self.gated else nn.LayerNorm(self.width)


class Attention(nn.Module):
    def __init__(self, tower: Tower, causal: bool):
        super().__init__()
        keys, self.causal = tower.keys or tower.heads, causal
        self.size, self.groups = tower.size or tower.width // tower.heads, tower.heads // keys
        self.query, self.out = (
            nn.Linear(tower.width, tower.heads * self.size),
            nn.Linear(tower.heads * self.size, tower.width),
        )
        self.key, self.value = (nn.Linear(tower.width, keys * self.size) for _ in range(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        query, key, value = self.heads(self.query(x)), self.heads(self.key(source)), self.heads(self.value(source))
        if self.groups > 1:
            key, value = (part.repeat_interleave(self.groups, 1) for part in (key, value))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, tower: Tower):
        super().__init__()
        self.up, self.down = nn.Linear(tower.width, tower.inner), nn.Linear(tower.inner, tower.width)
        self.gate = nn.Linear(tower.width, tower.inner) if tower.gated else None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, tower: Tower, windowed: bool):
        super().__init__()
        self.window, self.width = tower.window if windowed else None, tower.width
        self.before, self.attention = tower.norm(), Attention(tower, tower.causal)
        self.crossing = tower.norm() if tower.crossed else None
        self.cross = Attention(tower, False) if tower.crossed else None
        self.behind, self.mlp = tower.norm(), MLP(tower)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        h = self.before(x)
        if self.window is None:
            x = x + self.attention(h, h)
        else:
            h = h.reshape(-1, self.window, self.width)
            x = x + self.attention(h, h).reshape(x.shape)
        if self.cross is not None and self.crossing is not None:
            x = x + self.cross(self.crossing(x), source)
        return x + self.mlp(self.behind(x))


class Patches(nn.Module):
    """Patches of images, and positions. ``token``: whether one more stands in front of them."""

    def __init__(self, width: int, channels: int, patch: int, stride: int, patches: int, token: bool):
        super().__init__()
        self.cut, self.token = nn.Conv2d(channels, width, patch, stride), token
        self.positions = nn.Parameter(torch.empty(patches + token, width))

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).transpose(1, 2)
        return (F.pad(x, (0, 0, 1, 0)) if self.token else x) + self.positions


class Words(nn.Module):
    def __init__(self, width: int, vocabulary: int, tokens: int):
        super().__init__()
        self.table, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.empty(tokens, width))

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words) + self.positions


class Sound(nn.Module):
    """Whisper's front end: two convolutions over a spectrogram, the second of which halves its length."""

    def __init__(self, width: int, bins: int, frames: int):
        super().__init__()
        self.one, self.two = nn.Conv1d(bins, width, 3, padding=1), nn.Conv1d(width, width, 3, 2, padding=1)
        self.positions = nn.Parameter(torch.empty(frames // 2, width))

    def forward(self, sound: Tensor) -> Tensor:
        return F.gelu(self.two(F.gelu(self.one(sound)))).transpose(1, 2) + self.positions


class Encoder(nn.Module):
    def __init__(self, stem: nn.Module, tower: Tower):
        super().__init__()
        self.stem, self.layers, self.width = stem, tower.modules(), tower.width

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Head(nn.Module):
    """The loss of the next token."""

    def __init__(self, tower: Tower, vocabulary: int):
        super().__init__()
        self.norm, self.words = tower.norm(), nn.Linear(tower.width, vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.words(self.norm(x)).flatten(0, 1).float(), labels.flatten())


class Projector(nn.Module):
    """Puts so many patches together and projects them, by way of ``inner`` where it is given."""

    def __init__(self, width: int, merged: int, inner: int | None, out: int, tokens: int, token: bool):
        super().__init__()
        self.shape, self.token = (-1, tokens, width * merged), token
        widths = [width * merged, *([] if inner is None else [inner]), out]
        self.parts = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        x = (x[:, 1:] if self.token else x).reshape(self.shape)
        for place, part in enumerate(self.parts):
            x = part(F.gelu(x) if place else x)
        return x


Unit = tuple[str, ...]
"""The modules that one who cuts by hand keeps together: a layer, and what stands in front of it or behind it."""


def units_of(name: str, layers: int, first: str = "", last: str = "") -> list[Unit]:
    names: list[Unit] = [(f"{name}.{layer}",) for layer in range(layers)]
    names[0] = tuple(filter(None, (first, *names[0])))
    names[-1] = tuple(filter(None, (*names[-1], last)))
    return names


@dataclass(frozen=True)
class Built:
    """``units``: in the order of the data; the first ``encoder`` of them are the encoder. ``frozen``: the submodule
    that is frozen where the encoder is. ``batch``: the shape of each input of a micro-batch."""

    model: nn.Module
    units: list[Unit]
    encoder: int
    frozen: str
    batch: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class VLM:
    """``side``: of the image, or of each of its ``tiles``, in pixels. ``merged``: patches that become one token."""

    vision: Tower
    side: int
    language: Tower
    vocabulary: int
    inner: int | None = None
    tiles: int = 1
    merged: int = 1
    token: bool = False
    tied: bool = False
    patch: int = 14

    def build(self) -> Built:
        patches = (self.side // self.patch) ** 2
        tokens = self.tiles * patches // self.merged + TEXT
        units = units_of("vision.layers", self.vision.layers, "vision.stem", "projector")
        units += [*units_of("language", self.language.layers, "words"), ("head",)]
        image = (self.tiles, 3, self.side, self.side)
        batch = {"image": image, "words": (1, TEXT), "labels": (1, tokens)}
        return Built(VisionLanguage(self, patches), units, self.vision.layers, "vision", batch)


class VisionLanguage(nn.Module):
    def __init__(self, of: VLM, patches: int):
        super().__init__()
        width = of.vision.width
        self.vision = Encoder(Patches(width, 3, of.patch, of.patch, patches, of.token), of.vision)
        tokens = of.tiles * patches // of.merged
        self.projector = Projector(width, of.merged, of.inner, of.language.width, tokens, of.token)
        self.words = nn.Embedding(of.vocabulary, of.language.width)
        self.language, self.head = of.language.modules(), Head(of.language, of.vocabulary)
        if of.tied:
            self.head.words.weight = self.words.weight

    def forward(self, image: Tensor, words: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([self.projector(self.vision(image)), self.words(words)], 1)
        for layer in self.language:
            x = layer(x)
        return self.head(x, labels)


@dataclass(frozen=True)
class Speech:
    """Whisper: the decoder's layers cross to the encoder's result. ``rows``: of a micro-batch."""

    encoder: Tower
    decoder: Tower
    vocabulary: int
    bins: int
    frames: int
    tokens: int
    rows: int

    def build(self) -> Built:
        units = units_of("encoder.layers", self.encoder.layers, "encoder.stem")
        units += [*units_of("decoder", self.decoder.layers, "words"), ("head",)]
        text = (self.rows, self.tokens)
        batch = {"sound": (self.rows, self.bins, self.frames), "words": text, "labels": text}
        return Built(Whisper(self), units, self.encoder.layers, "encoder", batch)


class Whisper(nn.Module):
    def __init__(self, of: Speech):
        super().__init__()
        self.encoder = Encoder(Sound(of.encoder.width, of.bins, of.frames), of.encoder)
        self.words, self.decoder = Words(of.decoder.width, of.vocabulary, of.tokens), of.decoder.modules()
        self.head = Head(of.decoder, of.vocabulary)
        self.head.words.weight = self.words.table.weight

    def forward(self, sound: Tensor, words: Tensor, labels: Tensor) -> Tensor:
        source, x = self.encoder(sound), self.words(words)
        for layer in self.decoder:
            x = layer(x, source)
        return self.head(x, labels)


@dataclass(frozen=True)
class Towers:
    """Images of 224 pixels, texts of 77 tokens and, where there is a tower for it, audio in three clips; each of
    ``rows`` is contrasted with the others of its micro-batch."""

    image: Tower
    text: Tower
    width: int
    rows: int
    audio: Tower | None = None

    def build(self) -> Built:
        image, text = Patches(self.image.width, 3, 14, 14, 256, True), Words(self.text.width, 49408, 77)
        parts = {"image": Encoder(image, self.image), "text": Encoder(text, self.text)}
        batch: dict[str, tuple[int, ...]] = {"image": (self.rows, 3, 224, 224), "text": (self.rows, 77)}
        if self.audio is not None:
            parts["audio"] = Encoder(Patches(self.audio.width, 1, 16, 10, 228, True), self.audio)
            batch["audio"] = (3 * self.rows, 1, 128, 204)
        units = []
        for name, part in parts.items():
            units += units_of(f"{name}_tower.layers", len(part.layers), f"{name}_tower.stem", f"{name}_out")
        return Built(Contrastive(parts, self), units, len(parts["image"].layers), "image_tower", batch)


class Contrastive(nn.Module):
    def __init__(self, parts: Mapping[str, Encoder], of: Towers):
        super().__init__()
        self.rows = of.rows
        for name, part in parts.items():
            setattr(self, f"{name}_tower", part)
            setattr(self, f"{name}_out", nn.Linear(part.width, of.width, bias=False))

    def embedded(self, name: str, x: Tensor) -> Tensor:
        y = getattr(self, f"{name}_out")(getattr(self, f"{name}_tower")(x)[:, -1])
        return F.normalize(y.unflatten(0, (self.rows, -1)).mean(1), dim=-1)  # of the clips of a row

    def forward(self, image: Tensor, text: Tensor, audio: Tensor | None = None) -> Tensor:
        one = self.embedded("image", image)
        loss = contrasted(one, self.embedded("text", text), self.rows)
        return loss if audio is None else loss + contrasted(one, self.embedded("audio", audio), self.rows)


def contrasted(one: Tensor, other: Tensor, rows: int) -> Tensor:
    scores, labels = 100.0 * one @ other.T, torch.arange(rows)
    return F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)


SIGLIP = Tower(27, 1152, 4304, 16)
"""so400m-patch14."""
QWEN = Tower(28, 3584, 18944, 28, keys=4, gated=True, causal=True)
GEMMA = Tower(18, 2048, 16384, 8, keys=1, size=256, gated=True, causal=True)
SMOL = Tower(24, 2048, 8192, 32, gated=True, causal=True)

VLMS: Mapping[str, VLM] = {
    # of CLIP's 24 layers LLaVA takes what the last but one makes
    "LLaVA-1.5-7B": VLM(
        Tower(23, 1024, 4096, 16),
        336,
        Tower(32, 4096, 11008, 32, gated=True, causal=True),
        32064,
        inner=4096,
        token=True,
    ),
    # an image of 1008 x 1008 pixels, of 81 whole windows, for it takes any size
    "Qwen2.5-VL-7B": VLM(Tower(32, 1280, 3420, 16, gated=True, window=64), 1008, QWEN, 152064, inner=5120, merged=4),
    "PaliGemma-3B": VLM(SIGLIP, 224, GEMMA, 257216, tied=True),
    # an image of 1536 x 1536 pixels, cut into 16 tiles, and once in small
    "SmolVLM-2B": VLM(SIGLIP, 384, SMOL, 49155, tiles=17, merged=9),
}
OTHERS: Mapping[str, Speech | Towers] = {
    "Whisper-large-v3": Speech(
        Tower(32, 1280, 5120, 20), Tower(32, 1280, 5120, 20, causal=True, crossed=True), 51866, 128, 3000, 448, rows=4
    ),
    "CLIP ViT-L/14": Towers(Tower(24, 1024, 4096, 16), Tower(12, 768, 3072, 12, causal=True), 768, rows=32),
    "ImageBind-huge": Towers(
        Tower(32, 1280, 5120, 16), Tower(24, 1024, 4096, 16, causal=True), 1024, 8, Tower(12, 768, 3072, 12)
    ),
}
