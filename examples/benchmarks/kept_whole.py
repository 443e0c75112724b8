"""Models with a region kept whole: two optimizer steps on 4 processes beside plain PyTorch.

    python examples/benchmarks/kept_whole.py [model …]

Each micro-batch has another number of images. They are given to ``step_microbatches``, each of its own length, or as
one batch that ``batch_dim`` cuts, each row of which has another number of images. ``zero=0`` on pipe 4; ``zero=1`` on
pipe 2 × data 2, where each replica has its own. RetinaNet needs torchvision. "local" in front runs them in one process.
"told" in front begins without what is whole, and writes into ``boundaries`` what each refusal says, until it trains.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe import Packed
from fxpipe.plan.label_count import Items
from tests import hf
from tests.hf import DECODER, IMAGE_TOKEN, IMAGES, NONE_LEFT, PATCHES, SPECIAL, WORDS, layers
from tests.pool import Pool

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


def pictures(images: int, g: torch.Generator) -> Tensor:
    return torch.randn(images, 3, 8, 8, generator=g)


def smol(counts: Sequence[int], g: torch.Generator) -> Inputs:
    """Rows of as many pictures each; what a row has fewer is padding, of zeros."""
    rows = texts(counts, 1, g)
    padded = torch.zeros(len(counts), max(counts), 3, 8, 8)
    for row, count in zip(padded, counts, strict=True):
        row[:count] = pictures(count, g)
    return rows | {"pixel_values": padded}


def by_grid(counts: Sequence[int], g: torch.Generator) -> Inputs:
    rows = texts(counts, 1, g)
    return rows | {
        "pixel_values": torch.randn(4 * sum(counts), 3 * 2 * 4 * 4, generator=g),
        "image_grid_thw": torch.tensor([[1, 2, 2]]).repeat(sum(counts), 1),
        "mm_token_type_ids": (rows["input_ids"] == IMAGE_TOKEN).int(),
    }


def packed(counts: Sequence[int], g: torch.Generator) -> Inputs:
    return texts(counts, PATCHES, g) | {"pixel_values": pictures(sum(counts), g)}


def by_kind(counts: Sequence[int], g: torch.Generator) -> Inputs:
    rows = packed(counts, g)
    return rows | {"token_type_ids": (rows["input_ids"] == IMAGE_TOKEN).long()}


def long_words(counts: Sequence[int], g: torch.Generator) -> Inputs:
    ids = torch.randint(3, WORDS, (len(counts), 8 + 2 * sum(counts)), generator=g)
    globally = torch.zeros_like(ids)
    globally[:, : sum(counts)] = 1
    return {"input_ids": ids, "global_attention_mask": globally, "labels": ids.clone()}


def sounds(counts: Sequence[int], g: torch.Generator) -> Inputs:
    length = 60 + 20 * sum(counts)
    return {"input_values": torch.randn(len(counts), length, generator=g), "labels": torch.arange(len(counts)) % 2}


def in_lists(counts: Sequence[int], g: torch.Generator) -> Inputs:
    """An image of its own size for each row, with so many boxes."""
    images, targets = [], []
    for count in counts:
        height, width = torch.randint(48, 90, (2,), generator=g).tolist()
        corner = torch.rand(count, 2, generator=g) * 20
        boxes = torch.cat([corner, corner + 10 + torch.rand(count, 2, generator=g) * 20], 1)
        images.append(torch.rand(3, height, width, generator=g))
        targets.append({"boxes": boxes, "labels": torch.randint(0, 3, (count,), generator=g)})
    return {"images": images, "targets": targets}


IMAGES_OF_ROWS = Packed(lambda input_ids: (input_ids == IMAGE_TOKEN).sum(1))
"""One token an image."""
GRIDS = {
    "image_grid_thw": IMAGES_OF_ROWS,
    "pixel_values": Packed(lambda image_grid_thw: image_grid_thw.prod(1), of="image_grid_thw"),
}
PICTURES = {"pixel_values": Packed(lambda input_ids: (input_ids == IMAGE_TOKEN).sum(1) // PATCHES)}


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


def retinanet() -> nn.Module:
    """As a user of torchvision writes it: what looks at values in two methods, to be kept whole. ImportError, or
    RuntimeError, where torchvision cannot be imported."""
    import torchvision
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.models.detection.image_list import ImageList
    from torchvision.models.detection.retinanet import RetinaNet
    from torchvision.ops import FrozenBatchNorm2d
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    class Detector(RetinaNet):
        def prepare(self, images: Any, targets: Any) -> Any:
            batch, targets = self.transform(images, targets)
            return batch.tensors, torch.tensor(batch.image_sizes), targets

        def losses(self, images: Tensor, sizes: Tensor, targets: Any, features: Any, found: Any) -> Any:
            anchors = self.anchor_generator(ImageList(images, [tuple(size) for size in sizes.tolist()]), features)
            return self.compute_loss(targets, found, anchors)

        def forward(self, images: Any, targets: Any) -> Any:
            x, sizes, targets = self.prepare(images, targets)
            features = list(self.backbone(x).values())
            losses = self.losses(x, sizes, targets, features, self.head(features))
            return {"loss": losses["classification"] + losses["bbox_regression"]}

    body = torchvision.models.resnet18(norm_layer=FrozenBatchNorm2d)
    maps = {"layer2": "0", "layer3": "1", "layer4": "2"}
    backbone = BackboneWithFPN(body, maps, [128, 256, 512], 32, LastLevelP6P7(32, 32))
    return Detector(backbone, num_classes=3, min_size=64, max_size=96)


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
        GRIDS,
        {"image_grid_thw": 1, "pixel_values": 4},
    ),
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
    "LLaVA": Study(
        hf.llava,
        packed,
        {"model.get_image_features": "whole", **layers("model.language_model.layers", 1, 2), "lm_head": "before"},
        PICTURES,
        {"pixel_values": 1},
    ),
    "PaliGemma": Study(
        paligemma,
        by_kind,
        {"model.vision_tower": "whole", **layers("model.language_model.layers", *THREE)},
        PICTURES,
        {"pixel_values": 1},
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
    "RetinaNet": Study(
        retinanet,
        in_lists,
        {
            **dict.fromkeys(("prepare", "losses"), "whole"),
            **dict.fromkeys(("backbone.body.layer3", "backbone.fpn", "head"), "before"),
        },
        {"images": Packed(1), "targets": Packed(1)},
    ),
}


def train(name: str, pipe: int, data: int, zero: int, in_one: bool) -> dict[str, Any]:
    """Two steps, on the engine that this process belongs to. ``in_one``: a batch is cut by ``batch_dim``."""
    study = STUDIES[name]
    torch.use_deterministic_algorithms(True)
    topology = fxpipe.Topology([("pipe", pipe), ("data", data)])
    fb = fxpipe.compile(
        study.model(),
        topology,
        boundaries=study.boundaries,
        microbatches=MICROBATCHES,
        zero=zero,
        batch_dim=study.rules,
        example_kwargs=study.one_batch(0, 0),
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


def plainly(name: str, data: int, in_one: bool) -> dict[str, Any]:
    """The same in plain PyTorch: a step's micro-batches of all replicas, one after another."""
    study = STUDIES[name]
    model = study.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    takes_items = Items.of(model, None, True) is not None
    for step in range(2):
        optimizer.zero_grad()
        parts = study.cut if in_one else study.microbatches
        every = [one for replica in range(data) for one in parts(step, replica)]
        items = sum(int((one["labels"][..., 1:] != NONE_LEFT).sum()) for one in every if "labels" in one)
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


WAYS = [(4, 1, 0), (2, 2, 1)]


def missing(name: str) -> str:
    """Why a model cannot be built here; "" for one that can."""
    try:
        STUDIES[name].model()
    except (ImportError, RuntimeError) as error:
        return f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def main(names: Sequence[str]) -> None:
    pool, rows = Pool(), []
    for name in names or STUDIES:
        if told := missing(name):
            print(told, flush=True)
            continue
        row: list[Any] = [name]
        for in_one in (False, True):
            for pipe, data, zero in WAYS:
                ranks = pool.run(train, name, pipe, data, zero, in_one, ranks=4, seconds=200.0)
                wanted = plainly(name, data, in_one)
                row += [max(furthest(one, wanted) for one in ranks)]
        tracer = ranks[0]["stages"].partition("captured by the ")[2].partition(" tracer")[0]
        whole = [part for part, rule in STUDIES[name].boundaries.items() if "whole" in rule]
        rows.append([*row, tracer, ", ".join(f"`{part}`" for part in whole)])
        print(rows[-1], flush=True)
    pool.close()
    ways = [f"{given}, zero={zero}" for given in ("apart", "in one batch") for _, _, zero in WAYS]
    headers = ["model", *ways, "captured by", "what is whole"]
    print(tabulate(rows, headers=headers, floatfmt=".1e", tablefmt="github"))


def in_one_process(names: Sequence[str]) -> None:
    for name in names or STUDIES:
        for in_one in (False, True):
            got, wanted = train(name, 4, 1, 0, in_one), plainly(name, 1, in_one)
            print(got["stages"].partition("captured")[2])
            print(name, furthest(got, wanted), got["losses"], wanted["losses"], flush=True)


def as_told(names: Sequence[str]) -> None:
    """Keeps whole what refusals name, one after another, at most four times."""
    for name in (name for name in names or STUDIES if not missing(name)):
        study, told = STUDIES[name], dict[str, Any]()
        cuts = {part: [one for one in _rules(rule) if one != "whole"] for part, rule in study.boundaries.items()}
        while True:
            try:
                STUDIES[name] = replace(study, boundaries={part: rule for part, rule in cuts.items() if rule} | told)
                print(name, train(name, 4, 1, 0, False)["losses"], told, flush=True)
                break
            except fxpipe.FxpipeError as error:
                found = re.search(r'boundaries=({"[^.{}][^{}]*": ("whole"|\["whole", "[a-z]+"\])})', str(error))
                if found is None or len(told) == 4:
                    raise
                told |= ast.literal_eval(found[1])


def _rules(rule: Any) -> list[Any]:
    return rule if isinstance(rule, list) else [rule]


if __name__ == "__main__":
    if sys.argv[1:2] == ["told"]:
        as_told(sys.argv[2:])
    elif sys.argv[1:2] == ["local"]:
        in_one_process(sys.argv[2:])
    else:
        main(sys.argv[1:])
