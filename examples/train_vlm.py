"""Train a small LLaVA on handwritten digits: 0 to 3 images a sample, vision tower and language model as one pipeline.

    python examples/train_vlm.py                                # one process plays every rank
    torchrun --nproc-per-node 4 examples/train_vlm.py           # one process per rank
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_vlm.py --resume FOLDER
    python examples/train_vlm.py --plain                        # the same training in plain PyTorch

The model is transformers' own `LlavaForConditionalGeneration` with random weights, so that nothing is downloaded; put
`from_pretrained` in its place. A sample is a few images and a caption that names them in order:

    <image> <image> the digits are seven two <end>

The loss counts the words of captions. Images are packed: those of all samples lie in a row, and a function of the
words says how many each sample has. `boundaries="auto"` simulates many cuts and takes the fastest. Of this model it
places the vision tower and most of the language model on all four ranks, micro-batch i on rank i mod 4; what follows is
a pipeline of one stage a rank:

    images ──> vision_tower, layers.0, layers.1 ──┬──> attention ──> o_proj ──> mlp ──> lm_head, loss
    words ───────────> (ranks 0, 1, 2, 3)         │       (0)         (1)       (2)        (3)
                                                  └─── residual ──────^

In the first fifth of the steps the vision tower is frozen. --lora trains adapters of the language model, and not its
layers; --bf16 computes in bfloat16. At the end `save_pretrained` writes a plain model, which `from_pretrained` reads to
name held-out digits. The script needs transformers, scikit-learn for the images, tqdm, and peft for --lora.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, Dataset
from tqdm import tqdm
from transformers import LlavaConfig, LlavaForConditionalGeneration

import fxpipe

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["<pad>", "<image>", "<end>", *DIGITS, "the", "digits", "are", "no"]
PAD, IMAGE, END = range(3)
PATCHES = 4  # of 4x4 pixels; an image takes as many words
MOST_IMAGES = 3  # of a sample
ROWS = 4  # samples of a micro-batch
UNCOUNTED = -100  # a label that the loss leaves out

Batch = dict[str, Tensor]
Pictures = tuple[Tensor, Tensor]  # images (pictures, 1, 8, 8) and their digits (pictures,)
Sample = tuple[Tensor, Tensor, Tensor]  # images, words and labels


def llava(lora: bool) -> nn.Module:
    """``lora``: all is frozen but adapters of the language model, its embeddings and head, and the projector."""
    width = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "initializer_range": 0.1}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "num_channels": 1}
    text = {"model_type": "llama", "vocab_size": len(WORDS), "max_position_embeddings": 32}
    text |= {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END}
    config = LlavaConfig(
        vision_config=width | vision | {"num_hidden_layers": 2},
        text_config=width | text | {"num_hidden_layers": 3},
        image_token_index=IMAGE,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        initializer_range=0.1,
    )
    model = LlavaForConditionalGeneration(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    adapted = r".*language_model.*_proj"
    trained = ["multi_modal_projector", "embed_tokens", "lm_head"]
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=adapted, modules_to_save=trained))


def load_pictures() -> tuple[Pictures, Pictures]:
    """Those to train on, and a fifth held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    train, held_out = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return (images[train], labels[train]), (images[held_out], labels[held_out])


def sample(images: Tensor, digits: Tensor) -> Sample:
    """Images and their caption, whose words alone are counted."""
    names = [DIGITS[digit] for digit in digits]
    caption = ["the", "digits", "are", *names, "<end>"] if names else ["no", "digits", "<end>"]
    prompt = ["<image>"] * PATCHES * len(names)
    words = torch.tensor([WORDS.index(word) for word in prompt + caption])
    return images, words, words.masked_fill(words == IMAGE, UNCOUNTED)


class Samples(Dataset[Sample]):
    """Sample i has 0 to 3 of the pictures; ``seed`` and i decide which."""

    def __init__(self, images: Tensor, digits: Tensor, number: int, seed: int) -> None:
        self.images, self.digits, self.number, self.seed = images, digits, number, seed

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self.seed * self.number + index)
        count = int(torch.randint(MOST_IMAGES + 1, (), generator=generator))
        drawn = torch.randint(len(self.digits), (count,), generator=generator)
        return sample(self.images[drawn], self.digits[drawn])


def collate(samples: list[Sample]) -> Batch:
    """Texts padded to the longest, and all images in a row.

    CLIP's tower refuses a batch of no images. So samples are dealt to micro-batches by their number of images, there
    and back: each micro-batch has some, nearly as many as any other.
    """
    by_images = sorted(samples, key=lambda one: -len(one[0]))
    parts = max(1, len(samples) // ROWS)
    there, back = range(parts), range(2 * parts - 1, parts - 1, -1)
    dealt = [one for pair in zip(there, back, strict=True) for start in pair for one in by_images[start :: 2 * parts]]
    images, words, labels = zip(*dealt, strict=True)
    input_ids = pad_sequence(words, batch_first=True, padding_value=PAD)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=UNCOUNTED),
        "pixel_values": torch.cat(images),
    }


def images_in(input_ids: Tensor) -> Tensor:
    """How many images each row has."""
    return (input_ids == IMAGE).sum(1) // PATCHES


def batches(dataset: Samples, topo: fxpipe.Topology, rows: int, begun: int, device: torch.device) -> Iterator[Batch]:
    """``rows`` samples a step over all replicas, from step ``begun`` on."""
    sampler = topo.sampler(dataset, shuffle=False)
    drawn = list(BatchSampler(sampler, rows // topo.data_size, drop_last=True))[begun:]
    for batch in DataLoader(dataset, batch_sampler=drawn, collate_fn=collate):
        yield {name: value.to(device) for name, value in batch.items()}


class Plain:
    """Plain PyTorch in the place of ``fxpipe.compile``: the same micro-batches, one after another."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, **batch: Tensor) -> Tensor:
        images = batch["pixel_values"].split(images_in(batch["input_ids"]).tolist())
        counted, total = (batch["labels"][:, 1:] != UNCOUNTED).sum(), torch.zeros((), device=batch["labels"].device)
        for start in range(0, len(images), ROWS):
            rows = slice(start, start + ROWS)
            part = {name: value[rows] for name, value in batch.items()} | {"pixel_values": torch.cat(images[rows])}
            loss = self.model(**part, num_items_in_batch=counted).loss
            loss.backward()
            total += loss.detach()
        return total

    def optimizer(self, cls: type[torch.optim.Optimizer], lr: float) -> torch.optim.Optimizer:
        return cls(self.model.parameters(), lr=lr)

    def state_dict(self, full: bool) -> Batch:
        return self.model.state_dict()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    """The share of digits that the model names, where it has read the caption up to there."""
    held_out = zip(images.split(MOST_IMAGES), digits.split(MOST_IMAGES), strict=True)
    batch = collate([sample(*pictures) for pictures in held_out])
    named, wanted = model.eval()(**batch).logits[:, :-1].argmax(-1), batch["labels"][:, 1:]
    is_digit = (wanted >= WORDS.index("zero")) & (wanted <= WORDS.index("nine"))
    return (named == wanted)[is_digit].float().mean().item()


def warm_up_and_cosine(step: int, steps: int) -> float:
    """The learning rate's factor: rising for a tenth of the steps, then falling to zero along a cosine."""
    return min((step + 1) / max(1, steps // 10), (1 + math.cos(math.pi * step / steps)) / 2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small LLaVA as a pipeline.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps; 3 make a quick trial")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--frozen", type=float, default=0.2, help="share of the steps with a frozen vision tower")
    parser.add_argument("--plain", action="store_true", help="the same training in plain PyTorch")
    parser.add_argument("--lora", action="store_true", help="train adapters of the language model; needs peft")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, with master weights in float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="folder for checkpoints; goes on from the newest that is there")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--out", type=Path, help="folder for the trained model, as save_pretrained writes it")
    parser.add_argument("--losses", type=Path, help="file for the loss of every step, as hex floats")
    args = parser.parse_args()
    if args.plain and (args.bf16 or args.resume):
        parser.error("--bf16 and --resume are of fxpipe, and --plain does without it")
    return args


def main() -> None:
    args = parse_arguments()
    rank = int(os.environ.get("RANK", 0))
    world = 1 if args.plain else int(os.environ.get("WORLD_SIZE", 4))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, held_out = load_pictures()
    dataset = Samples(*train, args.steps * args.batch_size, args.seed)
    device = fxpipe.init()
    model = llava(args.lora).to(device)
    tower = next(part for name, part in model.named_modules() if name.endswith("vision_tower"))
    tower.requires_grad_(args.frozen == 0)

    topo = fxpipe.Topology.fit(world, pipe=min(world, 4), rows=args.batch_size)
    forward_backward: Plain | fxpipe.ForwardBackward = Plain(model)
    if not args.plain:
        forward_backward = fxpipe.compile(
            model,
            topo,
            boundaries="auto",
            microbatches=args.batch_size // topo.data_size // ROWS,
            batch_dim={"pixel_values": fxpipe.Packed(images_in)},
            precision=fxpipe.Precision() if args.bf16 else None,
            example_kwargs=next(batches(dataset, topo, args.batch_size, begun=0, device=device)),
        )
        if rank == 0:
            print(forward_backward.stages, forward_backward.schedule, sep="\n")
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=2e-3)  # of frozen parameters, too
    scheduler = LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, args.steps))

    losses: list[Tensor] = []
    if args.resume:
        extra = fxpipe.load(args.resume, forward_backward, optimizer, scheduler=scheduler, required=False)
        losses += extra.get("losses", [])
    loader = batches(dataset, topo, args.batch_size, begun=len(losses), device=device)
    progress = tqdm(loader, initial=len(losses), total=args.steps, disable=rank != 0)
    for batch in progress:
        tower.requires_grad_(len(losses) >= args.frozen * args.steps)
        optimizer.zero_grad()
        losses.append(forward_backward(**batch))
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
                extra={"losses": torch.stack(losses)},
                block=False,
            )

    state = forward_backward.state_dict(full=True)  # collective: every rank takes part
    if rank == 0:
        trained = llava(args.lora)
        trained.load_state_dict(state)
        if args.lora:
            trained = trained.merge_and_unload()
        with TemporaryDirectory() as scratch:
            folder = args.out or Path(scratch)
            trained.save_pretrained(folder)
            reloaded = LlavaForConditionalGeneration.from_pretrained(folder)
        print(f"accuracy on held-out digits: {accuracy(reloaded, *held_out):.1%}")
        if args.losses:
            args.losses.write_text("".join(f"{loss.item().hex()}\n" for loss in losses))


if __name__ == "__main__":
    main()
