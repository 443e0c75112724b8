"""Hugging Face models with an opaque region, whose batches have another number of images, or length, each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fxpipe
from fxpipe import Packed
from fxpipe.batch.label_count import Items
from tests import hf
from tests.hf import DECODER, IMAGE_TOKEN, NONE_LEFT, SPECIAL, WIDTH, WORDS, layers

Inputs = dict[str, Any]
Batch = Callable[[Sequence[int], torch.Generator], Inputs]
"""(how many images each row has, generator) → that batch."""
ROWS, MICROBATCHES = 2, 3
RATE = 0.1


@dataclass(frozen=True)
class Study:
    """A model, its batches, and where it is cut and whole. ``rules``: for ``batch_dim``; ``per_image``: how many rows
    of such an input are one image's."""

    build: Callable[[], nn.Module]
    batch: Batch
    boundaries: dict[str, Any]
    rules: Mapping[str, Packed] = field(default_factory=dict)
    per_image: Mapping[str, int] = field(default_factory=dict)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        for part in model.modules():
            if type(part).__name__ == "Wav2Vec2Encoder":
                part.register_forward_pre_hook(_seeds)
        return model

    def microbatches(self, step: int, replica: int) -> list[Inputs]:
        """For ``step_microbatches``."""
        g = torch.Generator().manual_seed(100 * step + replica)
        return [self.batch(counts, g) for counts in counts_of(step, replica)]

    def one_batch(self, step: int, replica: int) -> Inputs:
        """The same rows in one batch."""
        g = torch.Generator().manual_seed(100 * step + replica)
        return self.batch([count for counts in counts_of(step, replica) for count in counts], g)

    def cut(self, step: int, replica: int) -> list[Inputs]:
        """That batch, cut by hand."""
        batch, counts = self.one_batch(step, replica), [sum(counts) for counts in counts_of(step, replica)]
        parts: list[Inputs] = [{} for _ in counts]
        for name, value in batch.items():
            sizes = (
                [count * self.per_image[name] for count in counts] if name in self.per_image else [ROWS] * len(counts)
            )
            for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
                part[name] = value[end - size : end]
        return parts


def counts_of(step: int, replica: int) -> list[list[int]]:
    """How many images each row of each micro-batch has: 1, 2 and 3 in all, most of them in its first row."""
    totals = [1 + (place + step + replica) % 3 for place in range(MICROBATCHES)]
    return [[max(total - 1, 1), total - max(total - 1, 1)] for total in totals]


def _seeds(encoder: nn.Module, given: tuple[Tensor, ...]) -> None:
    """Draws what depends on what it is given alone, so that plain PyTorch draws the same."""
    torch.manual_seed(int(given[0].detach().abs().sum() * 1000))


# --- batches: images lie in texts, as many tokens each as it takes ---


def texts(counts: Sequence[int], tokens: int, g: torch.Generator) -> Inputs:
    """Rows of words, the images ahead of them, a word behind each."""
    length = max(counts) * (tokens + 1) + 6
    ids = torch.randint(3, IMAGE_TOKEN - 2, (len(counts), length), generator=g)
    for row, count in enumerate(counts):
        for place in range(count):
            ids[row, place * (tokens + 1) :][:tokens] = IMAGE_TOKEN
    labels = ids.masked_fill(ids == IMAGE_TOKEN, NONE_LEFT)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def by_grid(counts: Sequence[int], g: torch.Generator) -> Inputs:
    rows = texts(counts, 1, g)
    return rows | {
        "pixel_values": torch.randn(4 * sum(counts), 3 * 2 * 4 * 4, generator=g),
        "image_grid_thw": torch.tensor([[1, 2, 2]]).repeat(sum(counts), 1),
        "mm_token_type_ids": (rows["input_ids"] == IMAGE_TOKEN).int(),
    }


def long_words(counts: Sequence[int], g: torch.Generator) -> Inputs:
    ids = torch.randint(3, WORDS, (len(counts), 8 + 2 * sum(counts)), generator=g)
    globally = torch.zeros_like(ids)
    globally[:, : sum(counts)] = 1
    return {"input_ids": ids, "global_attention_mask": globally, "labels": ids.clone()}


def sounds(counts: Sequence[int], g: torch.Generator) -> Inputs:
    length = 60 + 20 * sum(counts)
    return {"input_values": torch.randn(len(counts), length, generator=g), "labels": torch.arange(len(counts)) % 2}


def images_in(input_ids: Tensor) -> Tensor:
    """How many images each row has: where their tokens begin, a word behind each."""
    is_image = torch.nn.functional.pad((input_ids == IMAGE_TOKEN).int(), (1, 0))
    return (is_image.diff(dim=1) > 0).sum(1)


GRIDS = {
    "image_grid_thw": Packed(images_in),
    "pixel_values": Packed(lambda image_grid_thw: image_grid_thw.prod(1), of="image_grid_thw"),
}


# --- models ---


def qwen2_5_vl() -> nn.Module:
    rotation = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    words = {**DECODER, **SPECIAL, "num_hidden_layers": 4, "rope_parameters": rotation}
    words["tie_word_embeddings"] = False
    images = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    images |= {"out_hidden_size": 16, "window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=words,
        vision_config=images,
        image_token_id=IMAGE_TOKEN,
        video_token_id=hf.VIDEO_TOKEN,
        tie_word_embeddings=False,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def longformer() -> nn.Module:
    return transformers.LongformerForMaskedLM(
        transformers.LongformerConfig(
            **WIDTH,
            vocab_size=WORDS,
            max_position_embeddings=64,
            num_hidden_layers=4,
            pad_token_id=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attention_window=4,
        )
    )


SPEECH = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    **dict.fromkeys(["hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"], 0.0),
    **dict.fromkeys(["final_dropout", "mask_time_prob"], 0.0),
}


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(**SPEECH, num_hidden_layers=4, layerdrop=0.5)
    return transformers.Wav2Vec2ForSequenceClassification(config)


THREE = (1, 2, 3)
STUDIES: Mapping[str, Study] = {
    "Qwen2.5-VL": Study(
        qwen2_5_vl,
        by_grid,
        {
            "model.get_image_features": "whole",
            "model.compute_3d_position_ids": "whole",
            **layers("model.language_model.layers", *THREE),
        },
        GRIDS,
        {"image_grid_thw": 1, "pixel_values": 4},
    ),
    "Longformer": Study(
        longformer,
        long_words,
        {"longformer.encoder": ["whole", "before"], "lm_head": "before", "lm_head.decoder": "before"},
    ),
    "wav2vec2": Study(
        wav2vec2,
        sounds,
        {"wav2vec2.encoder": ["whole", "before"], "projector": "before", "classifier": "before"},
    ),
}


def hubert() -> nn.Module:
    return transformers.HubertForCTC(
        transformers.HubertConfig(
            **SPEECH, num_hidden_layers=3, layerdrop=0.0, vocab_size=20, ctc_loss_reduction="mean"
        )
    )


def spoken(counts: Sequence[int], g: torch.Generator) -> Inputs:
    """Sounds with a mask, of which one batch in two is full, and labels of which some are padding."""
    mask = torch.ones(len(counts), 120, dtype=torch.long)
    for row, count in zip(mask, counts, strict=True):
        row[120 - 20 * (count % 3) * (sum(counts) % 2) :] = 0
    labels = torch.randint(1, 20, (len(counts), 5), generator=g)
    labels[0, 3:] = NONE_LEFT
    return {
        "input_values": torch.randn(len(counts), 120, generator=g),
        "attention_mask": mask,
        "labels": labels,
    }


HUBERT = Study(hubert, spoken, layers("hubert.encoder.layers", 1, 2))
"""It looks at values between its cuts, without a rule. More of that kind: ``examples/benchmarks/compatibility.py``."""


# --- runs ---


def train(study: Study, pipe: int, data: int, zero: int, in_one: bool, **options: Any) -> dict[str, Any]:
    """Two steps, on the engine that this process belongs to. ``in_one``: a batch is cut by ``batch_dim``."""
    topology = fxpipe.Topology([("pipe", pipe), ("data", data)])
    fb = fxpipe.compile(
        study.model(),
        topology,
        boundaries=study.boundaries,
        microbatches=MICROBATCHES,
        zero=zero,
        batch_dim=study.rules,
        example_kwargs=study.one_batch(0, 0),
        **options,
    )
    optimizer = fb.optimizer(torch.optim.SGD, lr=RATE)
    replica = topology.data_rank if data > 1 else 0
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        if in_one:
            losses.append(fb(**study.one_batch(step, replica)))
        else:
            losses.append(fb.step_microbatches([((), one) for one in study.microbatches(step, replica)]))
        optimizer.step()
    return {"losses": losses, "state": fb.state_dict(full=True), "stages": str(fb.stages)}


def plainly(study: Study, data: int, in_one: bool) -> dict[str, Any]:
    """The same in plain PyTorch: a step's micro-batches of all replicas, one after another."""
    model = study.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    takes_items = not Items.from_model(model).uncounted
    for step in range(2):
        optimizer.zero_grad()
        parts = study.cut if in_one else study.microbatches
        every = [one for replica in range(data) for one in parts(step, replica)]
        items = sum(
            int((one["labels"][..., 1:] != NONE_LEFT).sum()) for one in every if isinstance(one.get("labels"), Tensor)
        )
        total = 0.0
        for one in every:
            extra = {"num_items_in_batch": torch.tensor(items / len(every))} if takes_items else {}
            loss = model(**one, **extra)["loss"] / len(every)
            loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
    return {"losses": losses, "state": model.state_dict()}


def furthest(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest distance, in units of a tensor's largest number."""
    pairs = [*zip(got["losses"], wanted["losses"], strict=True)]
    pairs += [(got["state"][name], value) for name, value in wanted["state"].items()]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs if b.is_floating_point())
