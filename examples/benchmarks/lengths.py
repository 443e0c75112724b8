"""Batches of random lengths and numbers of rows: how many captures they take, and what a step takes beside one length.

    python examples/benchmarks/lengths.py                      # all, some minutes
    python examples/benchmarks/lengths.py Llama CLIP           # some of them
    python examples/benchmarks/lengths.py --processes          # one process a rank

Four models of transformers, small, 200 steps each with 16 to 128 words and 4 to 12 rows, cut into micro-batches whose
rows are as many or one more. Each step starts from the parameters that plain PyTorch has: the loss and every gradient
are held against those of its loop over micro-batches. Then as many steps of one length and one number of rows, and of
as many words in all: what a word takes is compared, captures left out and told apart; and steps of four micro-batches
that are split already, each of its own length, beside those of one. With ``--processes`` nothing is compared but times.
The script needs transformers, and runs in a checkout, for it reads the tests' models.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the models of the tests

import fxpipe
from fxpipe.capture.capturing import Capturing
from tests.harness import accumulate, cut, rows_of
from tests.hf import MODELS, NONE_LEFT, SPECIAL, HFCase, transformers
from tests.models import Inputs

SHORTEST, LONGEST = 16, 128
FEWEST, MOST = 4, 12
MICROBATCHES = 4
WORDS, WIDTH, LAYERS = 512, 128, 4
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}


# --- models ---


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **SIZES, **SPECIAL, vocab_size=WORDS, num_hidden_layers=LAYERS, tie_word_embeddings=False
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LONGEST, n_embd=WIDTH, n_layer=LAYERS, n_head=4, **drops, **SPECIAL
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=WIDTH // 4,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return transformers.T5ForConditionalGeneration(config)


def clip() -> nn.Module:
    words = {**SIZES, **SPECIAL, "vocab_size": WORDS, "max_position_embeddings": LONGEST, "num_hidden_layers": 2}
    images = {**SIZES, "image_size": 32, "patch_size": 8, "num_hidden_layers": 3}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=words, vision_config=images, projection_dim=64))


# --- batches ---


def words(rows: int, length: int, generator: torch.Generator) -> Inputs:
    """Every second row is one word shorter: where a mask is full, transformers takes another kernel."""
    mask = (torch.arange(length) < length - torch.arange(rows)[:, None] % 2).long()
    ids = torch.randint(3, WORDS, (rows, length), generator=generator)
    ids[torch.arange(rows), mask.sum(1) - 1] = SPECIAL["eos_token_id"]
    return {"input_ids": ids * mask, "attention_mask": mask}


def causal(rows: int, length: int, generator: torch.Generator) -> Inputs:
    batch = words(rows, length, generator)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, NONE_LEFT)}


def translated(rows: int, length: int, generator: torch.Generator) -> Inputs:
    return words(rows, length, generator) | {"labels": causal(rows, 3 + length // 2, generator)["labels"]}


def pairs(rows: int, length: int, generator: torch.Generator) -> Inputs:
    images = torch.randn(rows, 3, 32, 32, generator=generator)
    return words(rows, length, generator) | {"pixel_values": images, "return_loss": True}


@dataclass(frozen=True)
class Stretched:
    """A model, and what makes batches of it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.Generator], Inputs]

    def case(self, name: str) -> HFCase:
        """Cut as the tests cut it."""
        return replace(MODELS[name], build=self.model, microbatches=MICROBATCHES)


STRETCHED = {
    "Llama": Stretched(llama, causal),
    "T5": Stretched(t5, translated),
    "CLIP": Stretched(clip, pairs),
    "GPT-2": Stretched(gpt2, causal),
}


def random_sizes(steps: int) -> list[tuple[int, int]]:
    """(rows, words) of each step's batch."""
    numbers = random.Random(16)
    return [(numbers.randint(FEWEST, MOST), numbers.randint(SHORTEST, LONGEST)) for _ in range(steps)]


def batches_of(name: str, sizes: Sequence[tuple[int, int]]) -> list[Inputs]:
    generator = torch.Generator().manual_seed(16)
    return [STRETCHED[name].batch(rows, length, generator) for rows, length in sizes]


# --- the steps ---


@dataclass
class Times:
    """``seconds``: of each step; ``captures``: how many it made."""

    seconds: list[float]
    captures: list[int]

    def of(self, clock: Callable[[], float], made: Sequence[object], step: Callable[[], Tensor]) -> Tensor:
        """Times a step."""
        before, start = len(made), clock()
        loss = step()
        self.seconds.append(clock() - start)
        self.captures.append(len(made) - before)
        return loss

    def per_word(self, sizes: Sequence[tuple[int, int]]) -> float:
        """Seconds, over the steps without a capture; nan where each made one."""
        quiet = [place for place, made in enumerate(self.captures) if not made]
        if not quiet:
            return math.nan
        return sum(self.seconds[place] for place in quiet) / sum(math.prod(sizes[place]) for place in quiet)

    @property
    def capturing(self) -> float:
        """Seconds of the steps with one."""
        return sum(seconds for seconds, made in zip(self.seconds, self.captures, strict=True) if made)


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """A list that grows by one with each capture."""
    made: list[Any] = []
    capture = Capturing._capture

    def noting(self: Capturing, *args: Any) -> Any:
        made.append(args)
        return capture(self, *args)

    Capturing._capture = noting  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Capturing._capture = capture  # type: ignore[method-assign]


def compiled(case: HFCase, example: Inputs) -> fxpipe.ForwardBackward:
    return fxpipe.compile(
        case.model(),
        fxpipe.Topology([("pipe", case.ranks)]),
        microbatches=case.microbatches,
        boundaries=case.boundaries,
        tracer="export",
        example_kwargs=example,
    )


def plainly(case: HFCase, model: nn.Module, batch: Inputs) -> Tensor:
    """Forward and backward of plain PyTorch, micro-batch by micro-batch; the loss."""
    items = case.labels_of(batch)

    def call(_: int, part: Inputs) -> Inputs:
        share = rows_of(part) / rows_of(batch)
        return dict(model(**part) if items is None else model(**part, num_items_in_batch=items.float() * share))

    model.zero_grad()
    return accumulate(lambda place, part: {"loss": call(place, part)["loss"]}, cut(batch, case.microbatches))[0]


def gap(got: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference, beside the largest number."""
    if got is None or wanted is None:
        assert got is wanted
        return 0.0
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def trained(
    name: str, sizes: Sequence[tuple[int, int]], compares: bool, clock: Callable[[], float]
) -> tuple[Times, float]:
    """A step for each batch, timed; and by how much a loss or a gradient differs from plain PyTorch's, at most."""
    case, batches = STRETCHED[name].case(name), batches_of(name, sizes)
    times, worst, plain = Times([], []), 0.0, case.model()
    with counted() as made:
        forward_backward = compiled(case, batches[0])
        optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.01)
        own, wanted = dict(forward_backward.named_parameters()), dict(plain.named_parameters(remove_duplicate=False))
        for batch in batches:
            optimizer.zero_grad()
            loss = times.of(clock, made, lambda batch=batch: forward_backward(**batch))  # type: ignore[misc]
            if compares:
                with torch.no_grad():
                    for key, parameter in own.items():
                        wanted[key].copy_(parameter)
                worst = max(worst, gap(loss, plainly(case, plain, batch)))
                worst = max(worst, *(gap(parameter.grad, wanted[key].grad) for key, parameter in own.items()))
            optimizer.step()
        times.captures[0] = len(made) - sum(times.captures[1:])  # with those of compile
    return times, worst


def per_word_already_split(name: str, sizes: Sequence[tuple[int, int]], clock: Callable[[], float]) -> float:
    """Seconds for a word, where each micro-batch of a step has the next of these sizes."""
    case, batches, times = STRETCHED[name].case(name), batches_of(name, sizes), Times([], [])
    with counted() as made:
        forward_backward = compiled(case, batches[0])
        for start in range(0, len(batches), MICROBATCHES):
            forward_backward.zero_grad()
            parts = [((), part) for part in batches[start : start + MICROBATCHES]]
            times.of(clock, made, lambda parts=parts: forward_backward.step_microbatches(parts))  # type: ignore[misc]
    lengths = [length for _, length in sizes]
    steps = [lengths[start : start + MICROBATCHES] for start in range(0, len(lengths), MICROBATCHES)]
    return times.per_word([(2, sum(step)) for step in steps])


def one_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(rows, words) of a batch that is as large as they are on average."""
    rows = round(sum(rows for rows, _ in sizes) / len(sizes))
    return rows, round(sum(map(math.prod, sizes)) / len(sizes) / rows)


@dataclass
class Study:
    """``random`` and ``four``: what a word takes beside steps of one size, where each step, or each of its four
    micro-batches, has a size of its own. ``worst``: the largest difference from plain PyTorch, None if not compared."""

    captures: int
    capturing: float
    step: float
    random: float
    four: float
    worst: float | None

    def row(self, name: str) -> list[Any]:
        """What is printed."""
        equal = "-" if self.worst is None else "every bit" if self.worst == 0 else f"to {self.worst:.0e}"
        numbers = [f"{self.capturing:.1f}", f"{1000 * self.step:.1f}", f"{self.random:.2f}", f"{self.four:.2f}"]
        return [name, self.captures, *numbers, equal]


def studied(name: str, steps: int, compares: bool, clock: Callable[[], float]) -> Study:
    sizes = random_sizes(steps)
    same = [one_size(sizes)] * steps
    varying, worst = trained(name, sizes, compares, clock)
    fixed, _ = trained(name, same, False, clock)
    one = fixed.per_word(same)
    of_two_rows = [(2, length) for _, length in random_sizes(steps)]
    four = per_word_already_split(name, of_two_rows, clock)
    four /= per_word_already_split(name, [(2, round(sum(n for _, n in of_two_rows) / steps))] * steps, clock)
    step = sum(fixed.seconds[1:]) / (steps - 1)
    ratio = varying.per_word(sizes) / one
    return Study(sum(varying.captures), varying.capturing, step, ratio, four, worst if compares else None)


def on_rank(name: str, steps: int) -> Study:
    return studied(name, steps, False, time.perf_counter)


HEADERS = ["model", "captures", "their steps, s", "one size, ms/step", "random, × that", "four, × one", "as PyTorch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(STRETCHED), metavar="model", help=", ".join(STRETCHED))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", action="store_true", help="one process a rank; nothing is compared but times")
    given = parser.parse_args()
    rows = []
    for name in given.models:
        if given.processes:
            study = fxpipe.launch(on_rank, STRETCHED[name].case(name).ranks, name, given.steps)[0]
        else:
            study = studied(name, given.steps, True, time.process_time)
        rows.append(study.row(name))
    print(tabulate(rows, HEADERS, disable_numparse=True, colalign=["left", *["right"] * 5, "left"]))


if __name__ == "__main__":
    main()
