"""Models with a region kept whole: two optimizer steps on 4 processes beside plain PyTorch.

    python examples/benchmarks/kept_whole.py [model …]

Each micro-batch has another number of images. ``zero=0`` on pipe 4; ``zero=1`` on pipe 2 × data 2, where each replica
has its own micro-batches. "local" in front runs them in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe.plan.label_count import Items
from tests import hf
from tests.hf import DECODER, IMAGE_TOKEN, IMAGES, NONE_LEFT, PATCHES, SPECIAL, WORDS, layers
from tests.pool import Pool

Inputs = dict[str, Any]
Batch = Callable[[int, torch.Generator], Inputs]
"""(how many images, generator) → one micro-batch of two rows."""
ROWS = 2


@dataclass(frozen=True)
class Study:
    """A model, its micro-batches, and where it is cut and whole."""

    build: Callable[[], nn.Module]
    batch: Batch
    boundaries: dict[str, Any]
    tracer: str = "auto"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        for part in model.modules():
            if type(part).__name__ == "Wav2Vec2Encoder":
                part.register_forward_pre_hook(_seeds)
        return model

    def microbatches(self, step: int, replica: int) -> list[Inputs]:
        g = torch.Generator().manual_seed(100 * step + replica)
        return [self.batch(1 + (place + step + replica) % 3, g) for place in range(3)]


def _seeds(encoder: nn.Module, given: tuple[Tensor, ...]) -> None:
    """Draws what depends on what it is given alone, so that plain PyTorch draws the same."""
    torch.manual_seed(int(given[0].detach().abs().sum() * 1000))


# --- batches: images lie in texts, as many tokens each as it takes ---


def texts(images: int, tokens: int, g: torch.Generator) -> Inputs:
    """Two rows of words, the images ahead of them, a word behind each: all but one in the first row."""
    counts = [max(images - 1, 1), images - max(images - 1, 1)]
    length = counts[0] * (tokens + 1) + 6
    ids = torch.randint(3, IMAGE_TOKEN - 2, (ROWS, length), generator=g)
    for row, count in enumerate(counts):
        for place in range(count):
            ids[row, place * (tokens + 1) :][:tokens] = IMAGE_TOKEN
    labels = ids.masked_fill(ids == IMAGE_TOKEN, NONE_LEFT)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def pictures(images: int, g: torch.Generator) -> Tensor:
    return torch.randn(images, 3, 8, 8, generator=g)


def smol(images: int, g: torch.Generator) -> Inputs:
    """Rows of as many pictures each; what a row has fewer is padding, of zeros."""
    rows = texts(images, 1, g)
    most = max(images - 1, 1)
    padded = torch.zeros(ROWS, most, 3, 8, 8)
    padded[0] = pictures(most, g)
    if images > most:
        padded[1, : images - most] = pictures(images - most, g)
    return rows | {"pixel_values": padded}


def by_grid(images: int, g: torch.Generator) -> Inputs:
    rows = texts(images, 1, g)
    return rows | {
        "pixel_values": torch.randn(4 * images, 3 * 2 * 4 * 4, generator=g),
        "image_grid_thw": torch.tensor([[1, 2, 2]]).repeat(images, 1),
        "mm_token_type_ids": (rows["input_ids"] == IMAGE_TOKEN).int(),
    }


def packed(images: int, g: torch.Generator) -> Inputs:
    return texts(images, PATCHES, g) | {"pixel_values": pictures(images, g)}


def by_kind(images: int, g: torch.Generator) -> Inputs:
    rows = packed(images, g)
    return rows | {"token_type_ids": (rows["input_ids"] == IMAGE_TOKEN).long()}


def long_words(images: int, g: torch.Generator) -> Inputs:
    ids = torch.randint(3, WORDS, (ROWS, 8 + 2 * images), generator=g)
    globally = torch.zeros_like(ids)
    globally[:, :images] = 1
    return {"input_ids": ids, "global_attention_mask": globally, "labels": ids.clone()}


def sounds(images: int, g: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(ROWS, 60 + 20 * images, generator=g), "labels": torch.tensor([0, 1])}


# --- models ---


def qwen2_5_vl() -> nn.Module:
    rotation = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    words = {**DECODER, **SPECIAL, "num_hidden_layers": 4, "rope_parameters": rotation, "tie_word_embeddings": False}
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


def paligemma() -> nn.Module:
    words = {**DECODER, **SPECIAL, "head_dim": 4, "num_hidden_layers": 4, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(
        vision_config={**IMAGES, "num_hidden_layers": 2, "projection_dim": 16, "model_type": "siglip_vision_model"},
        text_config=words,
        image_token_index=IMAGE_TOKEN,
        projection_dim=16,
        hidden_size=16,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def longformer() -> nn.Module:
    return transformers.LongformerForMaskedLM(
        transformers.LongformerConfig(
            **{**architectures.BERT, **architectures.NO_DROPOUT, "max_position_embeddings": 64, "pad_token_id": 1},
            attention_window=4,
        )
    )


def wav2vec2() -> nn.Module:
    return transformers.Wav2Vec2ForSequenceClassification(
        transformers.Wav2Vec2Config(
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=32,
            conv_dim=(8, 8),
            conv_kernel=(4, 3),
            conv_stride=(2, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            layerdrop=0.5,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            mask_time_prob=0.0,
            classifier_proj_size=8,
        )
    )


sys.path.append(str(__import__("pathlib").Path(__file__).parent))
import architectures  # noqa: E402

THREE = (1, 2, 3)
STUDIES: dict[str, Study] = {
    "SmolVLM": Study(
        architectures.smolvlm, smol, {"model.get_image_features": "whole", **layers("model.text_model.layers", *THREE)}
    ),
    "Idefics 3": Study(
        architectures.idefics3,
        smol,
        {"model.get_image_features": "whole", **layers("model.text_model.layers", *THREE)},
    ),
    "Qwen2-VL": Study(
        hf.qwen2_vl,
        by_grid,
        {
            "model.get_image_features": "whole",
            "model.compute_3d_position_ids": "whole",
            **layers("model.language_model.layers", *THREE),
        },
    ),
    "Qwen2.5-VL": Study(
        qwen2_5_vl,
        by_grid,
        {
            "model.get_image_features": "whole",
            "model.compute_3d_position_ids": "whole",
            **layers("model.language_model.layers", *THREE),
        },
    ),
    "LLaVA": Study(
        hf.llava,
        packed,
        {"model.get_image_features": "whole", **layers("model.language_model.layers", 1, 2), "lm_head": "before"},
    ),
    "PaliGemma": Study(
        paligemma, by_kind, {"model.vision_tower": "whole", **layers("model.language_model.layers", *THREE)}
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


def train(name: str, pipe: int, data: int, zero: int, engine: str = "processes") -> dict[str, Any]:
    """Two steps, on the engine that this process belongs to."""
    study = STUDIES[name]
    torch.use_deterministic_algorithms(True)
    topology = fxpipe.Topology([("pipe", pipe), ("data", data)])
    fb = fxpipe.compile(
        study.model(),
        topology,
        boundaries=study.boundaries,
        microbatches=3,
        zero=zero,
        tracer=study.tracer,
        batch_dim={name: None for name in study.microbatches(0, 0)[0] if name in ("pixel_values", "image_grid_thw")},
        example_kwargs=study.microbatches(0, 0)[0],
    )
    optimizer = fb.optimizer(torch.optim.SGD, lr=0.1)
    replica = topology.data_rank if data > 1 else 0
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(fb.step_microbatches([((), one) for one in study.microbatches(step, replica)]))
        optimizer.step()
    return {"losses": losses, "state": fb.state_dict(full=True), "stages": str(fb.stages)}


def plainly(name: str, data: int) -> dict[str, Any]:
    """The same in plain PyTorch: a step's micro-batches of all replicas, one after another."""
    study = STUDIES[name]
    model = study.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    takes_items = Items.of(model, None, True) is not None
    for step in range(2):
        optimizer.zero_grad()
        every = [one for replica in range(data) for one in study.microbatches(step, replica)]
        labels = [(one["labels"][:, 1:] if one["labels"].dim() > 1 else one["labels"]) for one in every]
        total, items = 0.0, sum(int((one != NONE_LEFT).sum()) for one in labels)
        for one in every:
            extra = {"num_items_in_batch": torch.tensor(items / len(every))} if takes_items else {}
            loss = model(**one, **extra).loss / len(every)
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


def main(names: Sequence[str]) -> None:
    pool, rows = Pool(), []
    for name in names or STUDIES:
        row: list[Any] = [name]
        for pipe, data, zero in ((4, 1, 0), (2, 2, 1)):
            ranks = pool.run(train, name, pipe, data, zero, ranks=4, seconds=200.0)
            off = max(furthest(one, plainly(name, data)) for one in ranks)
            row += [off]
        tracer = ranks[0]["stages"].partition("captured by ")[2].partition(",")[0]
        rows.append([*row, tracer])
        print(rows[-1], flush=True)
    pool.close()
    print(tabulate(rows, headers=["model", "zero=0, pipe 4", "zero=1, pipe 2 × data 2", "captured by"], floatfmt=".1e"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["local"]:
        for name in sys.argv[2:] or STUDIES:
            try:
                got = train(name, 4, 1, 0)
                print(got["stages"].partition("captured")[2])
                wanted = plainly(name, 1)
                print(name, furthest(got, wanted), got["losses"], wanted["losses"], flush=True)
            except Exception as error:
                print(name, type(error).__name__, str(error)[:1500], flush=True)
    else:
        main(sys.argv[1:])
