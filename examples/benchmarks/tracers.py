"""What each tracer makes of real models: those of the tests, from Hugging Face and written by hand.

    python examples/benchmarks/tracers.py                      # all, two minutes
    python examples/benchmarks/tracers.py CLIP "U-Net"         # some of them

A model is compiled on one process, cut into stages, and trained for two steps on other numbers than it was captured
with. A number in the table says that losses, every gradient and every buffer are those of plain PyTorch, to the last
bit or, for tied parameters and values that several stages use, to rounding; it is the seconds of one core
that capture, cut and check took. What a tracer would get wrong it refuses, for the reason below the table. The script
needs transformers, and runs in a checkout, for it reads the tests' models.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the models of the tests

from architectures import MORE

import fxpipe
from fxpipe import stage_boundary
from tests import hf, models
from tests.models import WIDTH, Inputs, linear, vectors

NOTHING = 1e-9
"""A gradient below is nothing but rounding: that of a key's bias, by which no softmax changes."""
TRACERS = [name for name in fxpipe.TRACERS if name != "auto"]


# --- models written by hand ---


class Residual(nn.Module):
    """Batch normalisation between residual sums, one of them around the boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = linear(), linear(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.norm(self.a(x))
        return F.mse_loss(x + self.b(stage_boundary(x)), y)


class Keywords(nn.Module):
    """Nothing but keywords, a dict that holds a list, and a dict that comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, *, batch: dict[str, Any], scale: float = 1.0, weights: Tensor | None = None) -> dict[str, Any]:
        h = stage_boundary({"h": self.a(batch["x"][0]), "y": batch["y"]})
        error = (self.b(h["h"]) * scale - h["y"]).square()
        return {"loss": (error if weights is None else error * weights).mean(), "parts": {"size": h["h"].norm()}}


def keywords(rows: int, generator: torch.Generator) -> Inputs:
    batch = vectors(rows, generator)
    return {"batch": {"x": [batch["x"]], "y": batch["y"]}, "scale": 0.5}


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = linear(), linear(), nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(F.dropout(self.drop(self.a(x)), 0.2, self.training)), y)


class MovingAverage(nn.Module):
    """A buffer that is assigned in forward, and read in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.a(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return F.mse_loss(self.b(stage_boundary(x - self.mean)), y)


class Shifted(nn.Module):
    """A write into a view, as encoder-decoders shift their labels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shifted = y.new_zeros(y.shape)
        shifted[:, 1:] = y[:, :-1].clone()
        shifted[:, 0] = 0.5
        return F.mse_loss(self.b(stage_boundary(self.a(x)).tanh()), shifted)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Two blocks with a boundary between; the subclasses say how a block is called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.call(self.b, stage_boundary(self.call(self.a, x))), y)


class Checkpointed(Blocks):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Autocast(Blocks):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)


class AutocastAround(Blocks):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.b(stage_boundary(self.a(x)))
        return F.mse_loss(x.float(), y)


class NoGrad(Blocks):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            weight = torch.softmax(self.a(x), -1)
        return F.mse_loss(self.b(stage_boundary(self.a(x))) * weight, y)


class Clamp(torch.autograd.Function):
    """The gradient goes through where the value does not."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clamp(-0.1, 0.1)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class OwnGradient(Blocks):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return Clamp.apply(block(x))


class HalvedGradients(Blocks):
    """A hook on a submodule changes what its backward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(half)


def half(module: nn.Module, gradients: tuple[Tensor, ...], _: object) -> tuple[Tensor, ...]:
    return tuple(gradient / 2 for gradient in gradients)


class Branching(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class BranchInBlock(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Branching(), Branching()


class BranchBetween(Blocks):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if x.sum() > 0 else block(-x)


class Noise(nn.Module):
    """Noise as large as the batch, drawn by a function that no tensor was given to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(self.a(x) + 0.1 * torch.randn(x.shape)), y)


BY_HAND: Mapping[str, models.Case] = {
    "U-Net": models.Case(models.UNet, models.images),
    "batch norm, residual": models.Case(Residual, vectors),
    "keywords, nested dicts": models.Case(Keywords, keywords),
    "tied embedding": models.Case(models.Tied, models.tokens, tolerance=1e-6),
    "LSTM": models.Case(models.Recurrent, models.sequences),
    "spectral norm": models.Case(models.Parametrized, vectors),
    "dropout": models.Case(Dropout, vectors),
    "random factory": models.Case(Noise, vectors),
    "buffer assigned": models.Case(MovingAverage, vectors),
    "view written": models.Case(Shifted, vectors),
    "no_grad region": models.Case(NoGrad, vectors),
    "autocast in stages": models.Case(Autocast, vectors),
    "autocast around cut": models.Case(AutocastAround, vectors),
    "checkpointed blocks": models.Case(Checkpointed, vectors),
    "autograd.Function": models.Case(OwnGradient, vectors),
    "backward hook": models.Case(HalvedGradients, vectors),
    "branch in a block": models.Case(BranchInBlock, vectors),
    "branch between blocks": models.Case(BranchBetween, vectors),
}
HUGGING_FACE = {
    **hf.MODELS,
    "Qwen2-VL, images": hf.IMAGES_BY_GRID,
    **MORE,
    "Mixtral, a loop": hf.HFCase(lambda: hf.mixtral("eager"), hf.causal, boundaries=hf.MODELS["Mixtral"].boundaries),
}
CASES: Mapping[str, models.Case] = {**HUGGING_FACE, **BY_HAND}

# --- trying one ---


@dataclass(frozen=True)
class Verdict:
    """``cell``: what the table says; ``reason``: why a tracer refused."""

    cell: str
    reason: str = ""


def tried(case: models.Case, tracer: str) -> Verdict:
    model, batch = case.model().train(), case.batch()
    eager = copy.deepcopy(model)
    start = time.process_time()
    try:
        compiled = fxpipe.compile(
            model,
            fxpipe.Topology([("pipe", 1)]),
            boundaries=case.boundaries if isinstance(case, hf.HFCase) else (),
            microbatches=1,
            batch_dim=dict.fromkeys(batch),  # nothing is cut
            tracer=tracer,
            example_kwargs=batch,
        )
    except fxpipe.TraceError as error:
        return Verdict("refused", str(error))
    seconds = time.process_time() - start
    wrong = difference(case, compiled, eager)
    return Verdict(f"WRONG: {wrong}" if wrong else f"{seconds:.2f}")


def difference(case: models.Case, compiled: fxpipe.ForwardBackward, eager: nn.Module) -> str:
    """What two steps without an optimizer leave that plain PyTorch does not; "" where all is the same."""
    for step in (0, 1):
        batch = case.batch(number=step + 1)
        torch.manual_seed(compiled.seed(0, 0, step))  # of the first stage: models that draw have no other
        loss = loss_of(eager, batch)
        loss.backward()
        if not close(compiled(**batch), loss.detach(), case.tolerance):
            return f"loss of step {step}"
    gradients = {name: parameter.grad for name, parameter in eager.named_parameters()}
    for name, parameter in compiled.named_parameters():
        if name in gradients and not close(parameter.grad, gradients[name], case.tolerance):
            return f"gradient of {name}"
    state = eager.state_dict()
    wrong = [name for name, tensor in compiled.state_dict().items() if not close(tensor, state[name], 0)]
    return f"buffer {wrong[0]}" if wrong else ""


def loss_of(model: nn.Module, batch: Inputs) -> Tensor:
    output = model(**batch)
    return output if isinstance(output, Tensor) else output["loss"]


def close(got: Tensor | None, wanted: Tensor | None, tolerance: float) -> bool:
    if got is None or wanted is None:
        return got is wanted
    largest = wanted.abs().max().clamp(min=NOTHING)
    return torch.equal(got, wanted) or bool((got - wanted).abs().max() <= tolerance * largest)


# --- the table ---


def table(verdicts: Mapping[str, Sequence[Verdict]]) -> str:
    rows = [(name, *(verdict.cell for verdict in row)) for name, row in verdicts.items()]
    return tabulate(rows, headers=["model", *TRACERS], tablefmt="github", disable_numparse=True)


def reasons(verdicts: Mapping[str, Sequence[Verdict]]) -> str:
    """The fact that each refusal states, once, and the models of which it is stated."""
    given: dict[str, list[str]] = {}
    for name, row in verdicts.items():
        for tracer, verdict in zip(TRACERS, row, strict=True):
            if verdict.reason:
                fact, _, _ = verdict.reason.splitlines()[0].partition("; ")
                given.setdefault(f"{tracer}: {fact}", []).append(name)
    return "\n".join(f"- {fact}: *{', '.join(names)}*" for fact, names in given.items())


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(CASES)
    tried(CASES["view written"], "export")  # imports what torch.export needs, in no model's time
    verdicts = {name: [tried(CASES[name], tracer) for tracer in TRACERS] for name in names}
    print(table(verdicts), reasons(verdicts), sep="\n\n")


if __name__ == "__main__":
    main()
