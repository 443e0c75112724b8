"""A whole training loop, which `training_loop.md` goes through part by part.

    python examples/training_loop.py run                              # one process plays both stages
    torchrun --nproc-per-node 4 examples/training_loop.py run         # two stages, two replicas

``run`` is the folder for checkpoints and metrics.

A network learns to which of four directions an image of noise is nearest. The script needs tensorboard.
"""

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import fxpipe

CLASSES, PIXELS, IGNORED = 4, 64, -100


class Classifier(nn.Module):
    """Images (rows, PIXELS) and their labels (rows,); a row whose label is IGNORED counts nowhere.

    ``calls``: how many add up to a step, whose loss is their mean.
    """

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.below = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Dropout(0.1))
        self.above = nn.Linear(128, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> dict[str, Tensor | fxpipe.Sum]:
        logits = self.above(fxpipe.stage_boundary(self.below(image), name="above"))
        total = F.cross_entropy(logits, label, ignore_index=IGNORED, reduction="sum")
        counted = (label != IGNORED).sum()
        if self.training:
            total = total / self.calls
        return {"loss": fxpipe.Sum(total, counted), "right": (logits.argmax(-1) == label).sum()}


def images(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(rows, PIXELS, generator=generator)
    directions = torch.randn(PIXELS, CLASSES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(image, (image @ directions).argmax(-1))


def padded(dataset: TensorDataset, rows: int) -> TensorDataset:
    """With rows that count nowhere behind it, so that it divides by ``rows``."""
    image, label = dataset.tensors
    missing = -len(dataset) % rows
    return TensorDataset(F.pad(image, (0, 0, 0, missing)), F.pad(label, (0, missing), value=IGNORED))


class Feed:
    """Batches for ever, of this rank's replica, which go on where they were when its state was taken."""

    any_replicas = True  # the state counts batches of the whole run

    def __init__(self, topo: fxpipe.Topology, dataset: Dataset[list[Tensor]], rows: int) -> None:
        self.dataset, self.rows = dataset, rows // topo.data_size  # of the rows of a step, this replica's
        self.sampler = topo.sampler(dataset, shuffle=True, drop_last=True)
        self.epoch, self.taken = 0, 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            self.sampler.set_epoch(self.epoch)
            drawn = list(BatchSampler(self.sampler, self.rows, drop_last=True))
            for batch in DataLoader(
                self.dataset,
                batch_sampler=drawn[self.taken :],
                num_workers=1,
                prefetch_factor=4,
                pin_memory=torch.cuda.is_available(),
            ):
                self.taken += 1
                yield batch
            self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


def evaluate(
    forward_backward: fxpipe.ForwardBackward, topo: fxpipe.Topology, dataset: TensorDataset, device: torch.device
) -> tuple[float, float]:
    """Loss and accuracy over all rows of all replicas, the same numbers on every rank."""
    dataset = padded(dataset, 64 * topo.data_size)
    total, counted, right = 0.0, 0, 0
    for image, label in DataLoader(dataset, 64, sampler=topo.sampler(dataset, shuffle=False)):
        output = forward_backward.evaluate(image.to(device), label.to(device), outputs="all")
        total, counted = total + output["loss"].total.item(), counted + output["loss"].count.item()
        right += output["right"].item()
    return total / counted, right / counted


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier as a pipeline of two stages.")
    parser.add_argument("folder", type=Path, help="for checkpoints and metrics; a run that was cut short goes on")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--calls", type=int, default=2, help="of forward_backward in a step")
    parser.add_argument("--profile", action="store_true", help="write a trace of a few steps into the folder")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    world = int(os.environ.get("WORLD_SIZE", 2))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = fxpipe.init()
    topo = fxpipe.Topology([("data", world // 2), ("pipe", 2)])
    forward_backward = fxpipe.compile(Classifier(args.calls).to(device), topo, microbatches=4, zero=1)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    average = fxpipe.Average(forward_backward, decay=0.9)
    feed, held_out = Feed(topo, images(2000, seed=1), rows=64), images(500, seed=2)
    saved = {"scheduler": scheduler, "loader": feed, "average": average}
    extra = fxpipe.load(args.folder, forward_backward, optimizer, **saved, required=False)
    step, best, waited = extra["step"], extra.get("best", math.inf), extra.get("waited", 0)
    writer = SummaryWriter(args.folder / "metrics") if topo.is_first else None
    log = fxpipe.log_to(writer, every=20)
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(args.folder / "profile")),
    )
    needed, batches = forward_backward.required_inputs, iter(feed)
    with profiler if args.profile and topo.is_first else nullcontext():
        while step < args.steps and waited < 3:  # the same on every rank, as the loss that decides it is
            optimizer.zero_grad()
            loss = torch.zeros((), device=device)
            for call, (image, label) in enumerate(islice(batches, args.calls)):
                forward_backward.set_requires_gradient_sync(call == args.calls - 1)
                with torch.autocast(device.type, torch.bfloat16):
                    loss += forward_backward(
                        image.to(device, non_blocking=True) if "image" in needed else None,
                        label.to(device, non_blocking=True) if "label" in needed else None,
                    )
            forward_backward.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            average.update()
            step += 1
            log(forward_backward, loss, step)  # all ranks; the rank with a writer writes
            if args.profile and topo.is_first:
                profiler.step()
            if step % 20:
                continue
            with average.applied():
                held_out_loss, accuracy = evaluate(forward_backward, topo, held_out, device)
            waited = 0 if held_out_loss < best else waited + 1
            best = min(held_out_loss, best)
            if writer:
                writer.add_scalar("held-out loss", held_out_loss, step)
                writer.add_scalar("accuracy", accuracy, step)
                print(f"step {step}: loss {held_out_loss:.5f}, accuracy {accuracy:.1%}", flush=True)
            fxpipe.save(
                args.folder,
                forward_backward,
                optimizer,
                step=step,
                best=not waited,
                **saved,
                extra={"best": best, "waited": waited},
                block=False,
            )
    if writer:
        writer.close()


if __name__ == "__main__":
    main()
