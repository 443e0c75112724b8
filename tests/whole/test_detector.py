"""A detector of one's own, built as torchvision's: images and boxes come as lists, NumPy matches them in the loss."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Packed, Topology
from tests.harness import accumulate, assert_gradients, assert_same, assert_trains, distributed, gradients_of
from tests.models import Case, Inputs
from tests.pool import Pool

CHANNELS, KINDS, STRIDE = 4, 3, 4


class Detector(nn.Module):
    """images: (3, height, width) each, of any sizes; targets: {"boxes": (n, 4), "labels": (n,)} each, n from 0 up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1)
        self.body = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.neck = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.head = nn.Conv2d(CHANNELS, KINDS + 4, 3, padding=1)

    def prepare(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Images padded to the largest one; ValueError for a box without an area."""
        for target in targets:
            if (target["boxes"][:, 2:] <= target["boxes"][:, :2]).any():
                raise ValueError(f"a box without an area: {target['boxes'].tolist()}")
        sizes = [-(-max(image.shape[dim] for image in images) // STRIDE) * STRIDE for dim in (1, 2)]
        padded = images[0].new_zeros(len(images), 3, *sizes)
        for place, image in zip(padded, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = (image - 0.5) / 0.25
        return padded, [{**target, "boxes": target["boxes"] / STRIDE} for target in targets]

    def losses(self, found: Tensor, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Each cell of the map is matched with the box that it lies in, the smallest of several."""
        kinds, corners = found[:, :KINDS], found[:, KINDS:]
        y, x = numpy.mgrid[: found.shape[2], : found.shape[3]] + 0.5
        wanted, misses = torch.zeros_like(kinds), []
        for row, target in enumerate(targets):
            boxes = target["boxes"].numpy(force=True)
            for number in numpy.argsort(-(boxes[:, 2:] - boxes[:, :2]).prod(1), kind="stable"):
                left, top, right, bottom = boxes[number]
                inside = torch.from_numpy((x > left) & (x < right) & (y > top) & (y < bottom)).to(found.device)
                wanted[row, :, inside] = 0.0
                wanted[row, int(target["labels"][number]), inside] = 1.0
                if inside.any():
                    misses.append((corners[row, :, inside] - target["boxes"][number][:, None]).abs().mean())
        classes = nn.functional.binary_cross_entropy_with_logits(kinds, wanted)
        return {"classes": classes, "boxes": sum(misses) / len(misses) if misses else corners.sum() * 0}

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        batch, targets = self.prepare(images, targets)
        features = torch.relu(self.neck(torch.relu(self.body(torch.relu(self.stem(batch))))))
        return sum(self.losses(self.head(features), targets).values())  # type: ignore[return-value]


CUTS = {"prepare": "whole", "losses": "whole", "body": "before", "neck": "before", "head": "before"}
LISTS = {"images": Packed(1), "targets": Packed(1)}
ROWS, MICROBATCHES, STEPS = 6, 3, 2


def batch_of(step: int, replica: int = 0) -> Inputs:
    """The second image of each has no box, and the others up to three."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    images, targets = [], []
    for row in range(ROWS):
        height, width = torch.randint(10, 24, (2,), generator=generator).tolist()
        count = 0 if row == 1 else int(torch.randint(1, 4, (1,), generator=generator))
        corner = torch.rand(count, 2, generator=generator) * 8
        boxes = torch.cat([corner, corner + 4 + torch.rand(count, 2, generator=generator) * 8], 1)
        images.append(torch.rand(3, height, width, generator=generator))
        targets.append({"boxes": boxes, "labels": torch.randint(0, KINDS, (count,), generator=generator)})
    return {"images": images, "targets": targets}


def built() -> Detector:
    torch.manual_seed(0)
    return Detector()


def compiled(pipe: int, data: int, **options: Any) -> fxpipe.ForwardBackward:
    options = {"batch_dim": LISTS, "example_kwargs": batch_of(0), "boundaries": CUTS} | options
    torch.manual_seed(0)
    model, topology = options.pop("model", built)(), Topology([("pipe", pipe), ("data", data)])
    return fxpipe.compile(model, topology, microbatches=MICROBATCHES, **options)


def parts_of(batch: Inputs) -> list[Inputs]:
    """Micro-batches, cut by hand."""
    size = len(batch["images"]) // MICROBATCHES
    return [
        {name: value[size * place : size * (place + 1)] for name, value in batch.items()}
        for place in range(MICROBATCHES)
    ]


def cut(batch: Inputs, microbatches: int) -> list[Inputs]:
    return parts_of(batch)


SGD: Any = {"optimizer": torch.optim.SGD, "optimizer_options": {"lr": 0.1}}
CASE = Case(Detector, microbatches=MICROBATCHES, cut=cut, **SGD)


@pytest.mark.parametrize(("pipe", "data", "zero"), [(4, 1, 0), (2, 2, 1)])
def test_images_and_boxes_in_lists_train_as_in_plain_pytorch(pipe: int, data: int, zero: int, pool: Pool) -> None:
    batches: Any = [tuple(batch_of(step, replica) for replica in range(data)) for step in range(STEPS)]
    topology = Topology([("pipe", pipe), ("data", data)])
    options = {"batch_dim": LISTS, "boundaries": CUTS, "example_kwargs": batch_of(0), "zero": zero}
    assert_trains(CASE, distributed(pool), batches if data > 1 else sum(batches, ()), topology=topology, **options)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_last_batch_of_fewer_images_trains_too(tracer: Any) -> None:
    """A region that returns a dict for each image is captured for as many as there are."""
    batch = {name: value[:3] for name, value in batch_of(1).items()}
    forward_backward, model = compiled(4, 1, tracer=tracer), built()
    wanted = accumulate(lambda _, part: model(**part), parts_of(batch), [1.0] * 3)[0]
    assert_same(forward_backward(**batch), wanted, "loss")
    assert_gradients(gradients_of(forward_backward.named_parameters()), model)


def test_what_the_region_refuses_by_itself_says_which_micro_batch() -> None:
    forward_backward, batch = compiled(4, 1), batch_of(1)
    batch["targets"][4] = {"boxes": torch.tensor([[3.0, 3.0, 3.0, 9.0]]), "labels": torch.tensor([0])}
    with pytest.raises(ValueError, match="a box without an area") as error:
        forward_backward(**batch)
    assert any("micro-batch 2" in note for note in error.value.__notes__)


class Labelled(Detector):
    """As transformers' detectors: boxes are called labels, and what else a loss may take is taken."""

    def loss_function(self, *given: Any, **kwargs: Any) -> dict[str, Tensor]:
        return self.losses(*given)

    def forward(self, images: list[Tensor], labels: list[dict[str, Tensor]], **kwargs: Any) -> Any:
        return {"loss": super().forward(images, labels)}


def test_labels_that_are_a_dict_for_each_image_are_not_counted() -> None:
    """There is no ``num_items_in_batch`` of them: the loss is the mean over micro-batches."""
    images, boxes = batch_of(0).values()
    given = {"images": images, "labels": boxes}
    forward_backward = compiled(
        2, 1, model=Labelled, batch_dim=dict.fromkeys(given, Packed(1)), example_kwargs=given, tracer="export"
    )
    wanted, _ = accumulate(lambda _, part: built()(**part), parts_of(batch_of(0)), [1.0] * MICROBATCHES)
    assert_same(forward_backward(**given), wanted, "loss")
