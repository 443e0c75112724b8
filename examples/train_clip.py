"""Train a small CLIP on handwritten digits, its two towers as a pipeline of four stages.

    python examples/train_clip.py                              # one process plays every stage
    torchrun --nproc-per-node 4 examples/train_clip.py         # one process per stage
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_clip.py --resume FOLDER

The last goes on from its newest checkpoint when a process has died, or when it is started again, with as many processes
as there are then.

A vision transformer reads 8x8 images, a text transformer reads captions such as "a handwritten seven", and a
contrastive loss pulls each image and its caption together, and each away from all other rows of the batch. The image
tower is cut in two; the text tower runs beside it; the loss runs once, on what all micro-batches have sent:

    image ──> image_tower.lower ──> image_upper ──┐
                                                  ├──> loss
    tokens ─────────────> text_tower ─────────────┘

    --loss whole        over the whole batch of all replicas, which each of them computes
    --loss local        the same, each replica computing its own rows against all: O(rows) memory
    --loss microbatch   over the rows of each micro-batch, which is another loss

`examples/benchmarks/whole_batch.py` compares the accuracies. The trained weights then go into a plain `CLIP`, which
names held-out images by their nearest caption. The script needs scikit-learn, for the images, and tqdm.
"""

import argparse
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from tqdm import tqdm

import fxpipe

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = ["a handwritten {}", "the digit {} written with a pen", "a blurry scan of a {}"]
WORDS = ["<pad>", *DIGITS, *sorted({word for text in TEMPLATES for word in text.split()} - {"{}"})]
CONTEXT = 8  # words in a caption, padded
WIDTH, HEADS = 64, 4

Pair = tuple[Tensor, Tensor]  # images and their captions, or images and their digits


def captions() -> Tensor:
    """All captions as word numbers, (templates, 10 digits, CONTEXT)."""
    texts = [template.format(digit).split() for template in TEMPLATES for digit in DIGITS]
    padded = [text + ["<pad>"] * (CONTEXT - len(text)) for text in texts]
    return torch.tensor([[WORDS.index(word) for word in text] for text in padded]).unflatten(0, (-1, 10))


class Block(nn.Module):
    """A pre-norm transformer block on (rows, positions, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """Cut (rows, 1, 8, 8) images into 16 patches of 2x2 pixels and embed them with their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, WIDTH, kernel_size=2, stride=2)
        self.position = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        return self.project(image).flatten(2).transpose(1, 2) + self.position


class Words(nn.Module):
    """Embed (rows, CONTEXT) word numbers with their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position


class Average(nn.Module):
    """The average over all positions, as a unit vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.project(self.norm(x).mean(dim=1)), dim=-1)


class CLIP(nn.Module):
    """Two towers, each ending in one unit vector per row. Returns their contrastive loss, a scalar."""

    def __init__(self, loss: str = "whole") -> None:
        super().__init__()
        self.loss = loss
        lower = nn.Sequential(Patches(), Block(), Block())
        upper = nn.Sequential(Block(), Block(), Average())
        self.image_tower = nn.Sequential(OrderedDict(lower=lower, upper=upper))
        self.text_tower = nn.Sequential(Words(), Block(), Block(), Block(), Average())
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        # A boundary's name is the name of the stage behind it.
        x = fxpipe.stage_boundary(self.image_tower.lower(image), name="image_upper")
        v, t = self.image_tower.upper(x), self.text_tower(tokens)
        if self.loss == "microbatch":
            v, t = fxpipe.stage_boundary((v, t), name="loss")
            return self.contrastive_loss(v, t, tokens, v, t, tokens)
        # What comes from here on is of all micro-batches and replicas: tokens too, which are an input.
        v_all, t_all, tokens_all = fxpipe.stage_boundary((v, t, tokens), name="loss", gather="global")
        if self.loss == "whole":
            return self.contrastive_loss(v_all, t_all, tokens_all, v_all, t_all, tokens_all)
        v, t, tokens = fxpipe.stage_boundary((v, t, tokens), gather="batch")  # this replica's rows
        return self.contrastive_loss(v, t, tokens, v_all, t_all, tokens_all)

    def contrastive_loss(
        self, v: Tensor, t: Tensor, tokens: Tensor, v_all: Tensor, t_all: Tensor, tokens_all: Tensor
    ) -> Tensor:
        """Symmetric InfoNCE: each of the rows (v, t, tokens) among all of them."""
        scale = self.logit_scale.exp()
        # Two sevens have the same caption, and either is right: equal captions share the target between them.
        # Hence the loss ends near the targets' entropy, not at zero. It tells, too, which of all are the own rows.
        same = (tokens[:, None] == tokens_all).all(dim=-1).float()
        target = same / same.sum(dim=-1, keepdim=True)
        return (F.cross_entropy(scale * v @ t_all.T, target) + F.cross_entropy(scale * t @ v_all.T, target)) / 2


def load_images() -> tuple[Pair, Pair]:
    """Images (rows, 1, 8, 8) and their digits (rows,): those to train on, and a fifth held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    train, held_out = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return (images[train], labels[train]), (images[held_out], labels[held_out])


class Pairs:
    """Images and their captions, ``rows`` of them a step over all replicas, from where its state was taken.

    All ranks of a pipe group draw the same: rows by the sampler, templates by a seed.
    """

    any_replicas = True  # the state counts steps of the whole run

    def __init__(self, topo: fxpipe.Topology, images: Tensor, labels: Tensor, rows: int, steps: int, seed: int) -> None:
        self.dataset, self.rows, self.per_epoch = (
            TensorDataset(images, labels),
            rows // topo.data_size,
            len(labels) // rows,
        )
        self.sampler = topo.sampler(self.dataset, shuffle=True, seed=seed, drop_last=True)
        # One template per batch, so that two captions are equal exactly where their digits are.
        self.templates = torch.randint(len(TEMPLATES), (steps,), generator=torch.Generator().manual_seed(seed))
        self.taken = 0

    def __iter__(self) -> Iterator[Pair]:
        tokens = captions()
        while self.taken < len(self.templates):
            epoch, begun = divmod(self.taken, self.per_epoch)
            self.sampler.set_epoch(epoch)
            drawn = list(BatchSampler(self.sampler, self.rows, drop_last=True))[begun:]
            for image, digit in islice(DataLoader(self.dataset, batch_sampler=drawn), len(self.templates) - self.taken):
                self.taken += 1
                yield image, tokens[self.templates[self.taken - 1], digit]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


@torch.no_grad()
def zero_shot_accuracy(model: CLIP, images: Tensor, labels: Tensor) -> float:
    """The share of images whose nearest prompt, averaged over the templates, names their digit."""
    text = torch.stack([model.text_tower(tokens) for tokens in captions()]).mean(dim=0)
    similarity = model.image_tower(images) @ F.normalize(text, dim=-1).T
    return (similarity.argmax(dim=-1) == labels).float().mean().item()


def warm_up_and_cosine(step: int, steps: int) -> float:
    """The learning rate's factor: rising for a tenth of the steps, then falling to zero along a cosine."""
    return min((step + 1) / max(1, steps // 10), (1 + math.cos(math.pi * step / steps)) / 2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CLIP as a pipeline of four stages.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps; 5 make a quick trial")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--loss", choices=["whole", "local", "microbatch"], default="whole")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cpu: whatever GPUs there are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="folder for checkpoints; goes on from the newest that is there")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--losses", type=Path, help="file for the loss of every step, as hex floats")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rank = int(os.environ.get("RANK", 0))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, held_out = load_images()

    device = fxpipe.init(device="cpu" if args.device == "cpu" else None)
    world = int(os.environ.get("WORLD_SIZE", 4))
    topo = fxpipe.Topology.fit(world, pipe=min(world, 4), rows=args.batch_size)
    forward_backward = fxpipe.compile(CLIP(args.loss).to(device), topo, microbatches=args.microbatches)
    if rank == 0:
        print(forward_backward.stages, forward_backward.schedule, sep="\n")
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)  # of this rank's parameters
    scheduler = LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, args.steps))
    pairs = Pairs(topo, *train, args.batch_size, args.steps, args.seed)

    losses: list[Tensor] = []
    if args.resume:
        extra = fxpipe.load(args.resume, forward_backward, optimizer, scheduler=scheduler, loader=pairs, required=False)
        losses += extra.get("losses", [])
    progress = tqdm(pairs, initial=pairs.taken, total=args.steps, disable=rank != 0)
    for image, tokens in progress:
        optimizer.zero_grad()
        losses.append(forward_backward(image.to(device), tokens.to(device)))
        optimizer.step()
        scheduler.step()
        if rank == 0 and len(losses) % 20 == 0:  # to read a loss is to wait for it
            progress.set_postfix(loss=f"{losses[-1].item():.3f}")
        if args.resume and len(losses) % args.save_every == 0:
            fxpipe.save(
                args.resume,
                forward_backward,
                optimizer,
                step=len(losses),
                scheduler=scheduler,
                loader=pairs,
                extra={"losses": torch.stack(losses)},
                block=False,
            )

    state = forward_backward.state_dict(full=True)  # collective: every rank takes part
    if rank == 0:
        model = CLIP()
        model.load_state_dict(state)
        print(f"zero-shot accuracy on held-out images: {zero_shot_accuracy(model, *held_out):.1%}")
        if args.losses:
            args.losses.write_text("".join(f"{loss.item().hex()}\n" for loss in losses))


if __name__ == "__main__":
    main()
