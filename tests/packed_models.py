"""Models whose inputs are packed, their batches, and these cut by hand: what plain PyTorch is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Offsets, Packed, stage_boundary
from tests.models import Inputs

START, PATCH, PIXELS, WIDTH, WORDS = 1, 2, 12, 8, 20


def own(scores: Tensor, ends: Tensor) -> Tensor:
    """Scores between places of one sequence; each sequence ends in front of one of ``ends``."""
    sequence = torch.bucketize(torch.arange(scores.shape[-1], device=scores.device), ends, right=True)
    return scores.masked_fill(sequence[:, None] != sequence[None], float("-inf")).softmax(-1)


class Seeing(nn.Module):
    """As Qwen2-VL: patches of all images in a row, which see those of their own image, take their places among words.

    input_ids, labels: (rows, words); pixel_values: (patches, PIXELS); image_grid_thw: (images, 3).
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.seen = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.embed, self.mix, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def see(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        h = self.patches(pixel_values)
        keys, values = self.seen(h).chunk(2, -1)
        return h + own(h @ keys.T, image_grid_thw.prod(1).cumsum(0)) @ values

    def logits(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        seen = stage_boundary(self.see(pixel_values, image_grid_thw))
        h = self.embed(input_ids).masked_scatter((input_ids == PATCH)[..., None], seen)
        return self.head(stage_boundary(torch.tanh(self.mix(h.cumsum(1)))))

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, pixel_values: Any = None, image_grid_thw: Any = None
    ) -> Any:
        logits = self.logits(input_ids, pixel_values, image_grid_thw)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Summed(Seeing):
    """Its loss is over all labels of the batch."""

    def forward(self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
        logits = self.logits(input_ids, pixel_values, image_grid_thw)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return fxpipe.Sum(total, (labels != -100).sum())


class Dicts(Seeing):
    """All inputs in one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return super().forward(**batch)


IMAGES = {
    "image_grid_thw": Packed(lambda input_ids: (input_ids == START).sum(1)),
    "pixel_values": Packed(lambda image_grid_thw: image_grid_thw.prod(1), of="image_grid_thw"),
}
Grid = tuple[int, int, int]
SIX: list[list[Grid]] = [[(1, 2, 2)], [], [(1, 2, 3), (1, 1, 2)], [(2, 2, 1)], [], [(1, 3, 2)]]
"""The images of each row; of four micro-batches one has none."""


def seen_batch(rows: Sequence[Sequence[Grid]], seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    words = [[word for t, h, w in row for word in (START, *[PATCH] * (t * h * w))] + [3, 4, 5] for row in rows]
    longest = max(map(len, words))
    input_ids = torch.tensor([row + [0] * (longest - len(row)) for row in words])
    grid = torch.tensor([image for row in rows for image in row], dtype=torch.int64).view(-1, 3)
    return {
        "input_ids": input_ids,
        "labels": torch.randint(0, WORDS, input_ids.shape, generator=generator),
        "pixel_values": torch.randn(int(grid.prod(1).sum()), PIXELS, generator=generator),
        "image_grid_thw": grid,
    }


def cut_images(batch: Inputs, rows: Sequence[Sequence[Grid]], sizes: Sequence[int]) -> list[Inputs]:
    """Micro-batches of so many rows, cut at what stands in ``rows``."""
    parts, row, image, patch = [], 0, 0, 0
    for size in sizes:
        images = [one for each in rows[row : row + size] for one in each]
        patches = sum(t * h * w for t, h, w in images)
        parts.append(
            {
                "input_ids": batch["input_ids"][row : row + size],
                "labels": batch["labels"][row : row + size],
                "pixel_values": batch["pixel_values"][patch : patch + patches],
                "image_grid_thw": batch["image_grid_thw"][image : image + len(images)],
            }
        )
        row, image, patch = row + size, image + len(images), patch + patches
    return parts


class Documents(nn.Module):
    """Documents in a row, of which each sees itself alone. input_ids, position_ids, labels: (1, words)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.seen, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, labels: Any = None) -> Any:
        h = stage_boundary(torch.tanh(self.embed(input_ids) + position_ids[..., None] * 0.1))
        keys, values = self.seen(h).chunk(2, -1)
        h = stage_boundary(h + own(h @ keys.mT, cu_seqlens[1:]) @ values)
        logits = self.head(h)
        return logits if labels is None else F.cross_entropy(logits[0], labels[0])


class Contrasting(nn.Module):
    """Documents (1, words), each beside the others of the whole batch, by their lengths, too."""

    def __init__(self, gather: Literal["batch", "global"] = "batch") -> None:
        super().__init__()
        self.embed, self.head, self.gather = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), gather

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        h = torch.tanh(self.embed(input_ids) + position_ids[..., None] * 0.1)[0]
        document = torch.bucketize(torch.arange(h.shape[0]), cu_seqlens[1:], right=True)
        whole = h.new_zeros(cu_seqlens.shape[0] - 1, WIDTH).index_add(0, document, h)
        whole = stage_boundary(whole, gather=self.gather)
        each = self.head(whole) / cu_seqlens.diff()[:, None]
        return (each @ each.T).logsumexp(1).mean()


WORDS_IN_A_ROW = Packed("cu_seqlens", dim=1)
DOCUMENTS = {
    "cu_seqlens": Offsets(),
    **dict.fromkeys(("input_ids", "position_ids", "labels"), WORDS_IN_A_ROW),
}
LENGTHS = [3, 5, 2, 7, 4]


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def documents(lengths: Sequence[int], seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, WORDS, (1, sum(lengths)), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seqlens": offsets(lengths),
        "labels": torch.randint(0, WORDS, (1, sum(lengths)), generator=generator),
    }


def cut_documents(batch: Inputs, lengths: Sequence[int], sizes: Sequence[int]) -> list[Inputs]:
    parts, row, word = [], 0, 0
    for size in sizes:
        mine = lengths[row : row + size]
        parts.append({name: value[:, word : word + sum(mine)] for name, value in batch.items() if value.dim() == 2})
        parts[-1]["cu_seqlens"] = offsets(mine)
        row, word = row + size, word + sum(mine)
    return parts


class Detecting(nn.Module):
    """As torchvision's detection models: a list of images, each of its own size, and a dict of targets for each."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.score = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        seen = stage_boundary(torch.stack([self.look(image).amax((1, 2)) for image in images]))
        found = self.score(torch.relu(seen))
        if targets is None:
            return [
                {"boxes": one.expand(image.shape[1], -1) * 2, "score": one.mean()}
                for one, image in zip(found, images, strict=True)
            ]
        losses = []
        for one, target in zip(found, targets, strict=True):
            scores = one[None].expand(len(target["labels"]), -1)
            losses.append((target["boxes"] - one).square().mean() + F.cross_entropy(scores, target["labels"]))
        return torch.stack(losses).mean()


LISTS = {"images": Packed(1), "targets": Packed(1)}


def pictures(boxes: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """An image for each row, with so many boxes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "images": [torch.randn(3, 2 + count, 4, generator=generator) for count in boxes],
        "targets": [
            {
                "boxes": torch.randn(count, 4, generator=generator),
                "labels": torch.randint(0, 4, (count,), generator=generator),
            }
            for count in boxes
        ],
    }


def cut_pictures(batch: dict[str, Any], boxes: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [
        {name: value[start : start + size] for name, value in batch.items()}
        for start, size in zip(starts, sizes, strict=True)
    ]
