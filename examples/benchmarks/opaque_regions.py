"""Models with an opaque region: two optimizer steps on 4 processes beside plain PyTorch.

    python examples/benchmarks/opaque_regions.py [model …]

Each micro-batch has another number of images. They are given to ``step_microbatches``, each of its own length, or as
one batch that ``batch_dim`` cuts, each row of which has another number of images. ``zero=0`` on pipe 4; ``zero=1`` on
pipe 2 × data 2, where each replica has its own. RetinaNet needs torchvision. "local" in front runs them in one process.
"told" in front begins without opaque regions, and writes into ``boundaries`` what each refusal says, until it trains.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe import Packed

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the models of the tests
import examples.benchmarks.architectures as architectures
from tests import hf, opaque_regions
from tests.hf import DECODER, IMAGE_TOKEN, IMAGES, PATCHES, SPECIAL, layers
from tests.opaque_regions import GRIDS, THREE, Inputs, Study, by_grid, furthest, plainly, texts, train
from tests.pool import Pool

# --- batches ---


def pictures(images: int, g: torch.Generator) -> Tensor:
    return torch.randn(images, 3, 8, 8, generator=g)


def smol(counts: Sequence[int], g: torch.Generator) -> Inputs:
    """Rows of as many pictures each; what a row has fewer is padding, of zeros."""
    rows = texts(counts, 1, g)
    padded = torch.zeros(len(counts), max(counts), 3, 8, 8)
    for row, count in zip(padded, counts, strict=True):
        row[:count] = pictures(count, g)
    return rows | {"pixel_values": padded}


def packed(counts: Sequence[int], g: torch.Generator) -> Inputs:
    return texts(counts, PATCHES, g) | {"pixel_values": pictures(sum(counts), g)}


def by_kind(counts: Sequence[int], g: torch.Generator) -> Inputs:
    rows = packed(counts, g)
    return rows | {"token_type_ids": (rows["input_ids"] == IMAGE_TOKEN).long()}


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


PICTURES = {"pixel_values": Packed(lambda input_ids: (input_ids == IMAGE_TOKEN).sum(1) // PATCHES)}


# --- models ---


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


def retinanet() -> nn.Module:
    """As a user of torchvision writes it: what looks at values in two methods, which are to be opaque. ImportError, or
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


STUDIES: dict[str, Study] = {
    **opaque_regions.STUDIES,
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


WAYS = [(4, 1, 0), (2, 2, 1)]


def missing(name: str) -> str:
    """Why a model cannot be built here; "" for one that can."""
    try:
        STUDIES[name].model()
    except (ImportError, RuntimeError) as error:
        return f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def trained(name: str, pipe: int, data: int, zero: int, in_one: bool) -> dict[str, Any]:
    """On the engine that this process belongs to."""
    torch.use_deterministic_algorithms(True)
    return train(STUDIES[name], pipe, data, zero, in_one)


def main(names: Sequence[str]) -> None:
    pool, rows = Pool(), []
    for name in names or STUDIES:
        if told := missing(name):
            print(told, flush=True)
            continue
        row: list[Any] = [name]
        for in_one in (False, True):
            for pipe, data, zero in WAYS:
                ranks = pool.run(trained, name, pipe, data, zero, in_one, ranks=4, seconds=200.0)
                wanted = plainly(STUDIES[name], data, in_one)
                row += [max(furthest(one, wanted) for one in ranks)]
        tracer = ranks[0]["stages"].partition("captured by the ")[2].partition(" tracer")[0]
        whole = [part for part, rule in STUDIES[name].boundaries.items() if "whole" in rule]
        rows.append([*row, tracer, ", ".join(f"`{part}`" for part in whole)])
        print(rows[-1], flush=True)
    pool.close()
    ways = [f"{given}, zero={zero}" for given in ("apart", "in one batch") for _, _, zero in WAYS]
    headers = ["model", *ways, "captured by", "what is opaque"]
    print(tabulate(rows, headers=headers, floatfmt=".1e", tablefmt="github"))


def in_one_process(names: Sequence[str]) -> None:
    for name in names or STUDIES:
        for in_one in (False, True):
            got, wanted = trained(name, 4, 1, 0, in_one), plainly(STUDIES[name], 1, in_one)
            print(got["stages"].partition("captured")[2])
            print(name, furthest(got, wanted), got["losses"], wanted["losses"], flush=True)


def as_told(names: Sequence[str]) -> None:
    """Makes opaque what refusals name, one after another, at most four times."""
    for name in (name for name in names or STUDIES if not missing(name)):
        study, told = STUDIES[name], dict[str, Any]()
        cuts = {part: [one for one in _rules(rule) if one != "whole"] for part, rule in study.boundaries.items()}
        while True:
            try:
                STUDIES[name] = replace(study, boundaries={part: rule for part, rule in cuts.items() if rule} | told)
                losses = train(STUDIES[name], 4, 1, 0, False, tracer=fxpipe.Tracing(opaque=False))["losses"]
                print(name, losses, told, flush=True)
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
