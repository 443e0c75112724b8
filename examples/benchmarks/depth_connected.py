"""Models whose layers read more than the layer before them: difference from plain PyTorch, and bytes against a bound.

    python examples/benchmarks/depth_connected.py                         # 2 and 4 processes, about 2 minutes
    python examples/benchmarks/depth_connected.py attention --ranks 2     # of attention, shared and streams

Three decoders of 16 blocks with a plain ``forward``. All are cut from outside, by the names of their blocks.

- attention: attention residuals. The input of a block is a mean of the outputs of all blocks before it, weighted by a
  softmax over depth with a learned query (arXiv:2603.15031).
- shared: keys and values shared across layers. One block makes them, and all blocks behind it read them
  (arXiv:2405.05254).
- streams: hyper-connections. The residual has 4 streams; learned matrices read, mix and write them (arXiv:2409.19606).

Each has 1, 2 and 4 stages a rank: stage i is on rank i mod ranks. Three steps of SGD with 8 micro-batches are compared
with plain PyTorch, which runs the micro-batches one after another. Printed is the largest difference of a loss, of a
gradient and of a parameter.

Bytes are those of the last step, of all ranks together. The bound: a value goes once to each other rank that reads it,
and one gradient of it comes back from each. With s stages on r ranks a value of stage i that all later stages read goes
to min(r - 1, s - 1 - i) of them. "values" is what an evaluation sends, "gradients" what a step sends beside that.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe

BLOCKS, WIDTH, HEADS, STREAMS, WORDS = 16, 32, 4, 4, 64
ROWS, LENGTH, MICROBATCHES, STEPS = 2, 16, 8, 3  # ROWS: of a micro-batch
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
SHARED = BLOCKS // 2 - 1  # the block that makes the keys and values of those behind it
OUTPUT = 4 * ROWS * LENGTH * WIDTH  # bytes of a block's output for a micro-batch, in float32

# --- models ---


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], -1, WIDTH // HEADS).transpose(1, 2)


class Block(nn.Module):
    """Attention, two query heads to a head of keys and values, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.kv, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.kv(self.norms[0](x)).chunk(2, -1)

    def forward(self, x: Tensor, kv: tuple[Tensor, ...] | None = None) -> Tensor:
        k, v = self.keys_and_values(x) if kv is None else kv
        q, k, v = (heads(y) for y in (self.q(self.norms[0](x)), k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Reader(Block):
    """A block that has no keys and values of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.kv


class Decoder(nn.Module):
    """Embedding, blocks, norm, head and loss; each kind has its own ``forward``."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.RMSNorm(WIDTH)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(x[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class AttentionResiduals(Decoder):
    def __init__(self) -> None:
        super().__init__([Block() for _ in range(BLOCKS)])
        self.queries = nn.ParameterList(torch.randn(WIDTH) for _ in range(BLOCKS + 1))

    def mean(self, outputs: list[Tensor], query: Tensor) -> Tensor:
        values = torch.stack(outputs)
        weights = (F.rms_norm(values, (WIDTH,)) @ query).softmax(0)  # over depth
        return (weights.unsqueeze(-1) * values).sum(0)

    def forward(self, ids: Tensor) -> Tensor:
        outputs = [self.embed(ids)]
        for block, query in zip(self.blocks, self.queries, strict=False):
            outputs.append(block(self.mean(outputs, query)))
        return self.loss(self.mean(outputs, self.queries[-1]), ids)


class SharedKeysAndValues(Decoder):
    def __init__(self) -> None:
        super().__init__([Block() if place <= SHARED else Reader() for place in range(BLOCKS)])

    def forward(self, ids: Tensor) -> Tensor:
        x, kv = self.embed(ids), None
        for place, block in enumerate(self.blocks):
            if place == SHARED:
                kv = block.keys_and_values(x)
            x = block(x, kv)
        return self.loss(x, ids)


class Connected(nn.Module):
    """A block with its hyper-connections: S' = M S + w ⊗ block(r · S), for streams S (rows, length, streams, width)."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.block = Block()
        self.read = nn.Parameter(torch.eye(STREAMS)[place % STREAMS])
        self.mix = nn.Parameter(torch.eye(STREAMS) + 0.1 * torch.randn(STREAMS, STREAMS))
        self.write = nn.Parameter(torch.ones(STREAMS, 1))

    def forward(self, streams: Tensor) -> Tensor:
        return self.mix @ streams + self.write * self.block(self.read @ streams).unsqueeze(-2)


class HyperConnections(Decoder):
    def __init__(self) -> None:
        super().__init__([Connected(place) for place in range(BLOCKS)])

    def forward(self, ids: Tensor) -> Tensor:
        streams = self.embed(ids).unsqueeze(-2).repeat(1, 1, STREAMS, 1)
        for block in self.blocks:
            streams = block(streams)
        return self.loss(streams.mean(-2), ids)


MODELS = {"attention": AttentionResiduals, "shared": SharedKeysAndValues, "streams": HyperConnections}

# --- what has to be sent ---


class Value(NamedTuple):
    """A value that other stages read: its bytes for a micro-batch, the stage that makes it and the last that reads it.

    All stages between the two read it.
    """

    bytes: int
    made: int
    last: int


def values(name: str, stages: int) -> Iterator[Value]:
    """What crosses between stages, from the model's shapes alone."""
    for stage in range(stages - 1):
        if name == "attention":  # the outputs of a stage's blocks, and of the embedding
            yield from [Value(OUTPUT, stage, stages - 1)] * (BLOCKS // stages + (stage == 0))
        else:
            yield Value(OUTPUT * (STREAMS if name == "streams" else 1), stage, stage + 1)
    if name == "shared":  # keys and values are half as wide each
        yield from [Value(OUTPUT // 2, SHARED * stages // BLOCKS, stages - 1)] * 2


def bound(name: str, ranks: int, stages: int) -> int:
    """Bytes of a step one way: each value to each other rank that reads it, once a micro-batch."""
    total = 0
    for value in values(name, stages):
        readers = {stage % ranks for stage in range(value.made + 1, value.last + 1)}
        total += value.bytes * len(readers - {value.made % ranks})
    return MICROBATCHES * total


# --- running it ---


class Trained(NamedTuple):
    """Losses of the steps, gradients of the last one, and parameters after it."""

    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def model_of(name: str) -> Decoder:
    torch.manual_seed(0)
    return MODELS[name]()


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (ROWS * MICROBATCHES, LENGTH), generator=generator)


def left_by(losses: dict[str, Tensor], model: nn.Module | fxpipe.ForwardBackward) -> Trained:
    parameters = dict(model.named_parameters())
    gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
    return Trained(losses, gradients, {name: one.detach() for name, one in parameters.items()})


def plainly(name: str) -> Trained:
    """Plain PyTorch, one micro-batch after another."""
    model, losses = model_of(name), {}
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in batch_of(step).chunk(MICROBATCHES):
            loss = model(part) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        losses[f"step {step}"] = total
        optimizer.step()
    return left_by(losses, model)


def compiled(name: str, ranks: int, stages: int) -> fxpipe.ForwardBackward:
    """A stage is called after its first block."""
    each = BLOCKS // stages
    return fxpipe.compile(
        model_of(name),
        fxpipe.Topology([("pipe", ranks)]),
        microbatches=MICROBATCHES,
        boundaries={f"blocks.{first - 1}": "after" for first in range(each, BLOCKS, each)},
        placement={f"blocks.{stage * each}": stage % ranks for stage in range(stages)},
        schedule="1f1b" if stages == ranks else "interleaved_1f1b",
    )


class Measured(NamedTuple):
    """Of one rank: the largest differences of a loss, a gradient and a parameter, and bytes that it sent."""

    differences: tuple[float, ...]
    step: float
    evaluation: float


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((one - wanted[name]).abs().max()) for name, one in found.items())


def sent(forward_backward: fxpipe.ForwardBackward) -> float:
    """Bytes that this rank sent to others in the last call."""
    return sum(row.bytes for row in forward_backward.traffic().select("send"))


def measured(name: str, ranks: int, stages: int, plain: Trained) -> Measured:
    forward_backward, losses = compiled(name, ranks, stages), {}
    optimizer = forward_backward.optimizer(torch.optim.SGD, **SGD)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses[f"step {step}"] = forward_backward(batch_of(step))
        optimizer.step()
    in_step = sent(forward_backward)
    trained = left_by(losses, forward_backward)
    differences = tuple(difference(*pair) for pair in zip(trained, plain, strict=True))
    for _ in range(2):  # in the first evaluation ranks describe what they send
        forward_backward.evaluate(batch_of(0), outputs="loss")
    found = Measured(differences, in_step, sent(forward_backward))
    forward_backward.close()
    return found


def run(name: str, ranks: int, a_rank: Sequence[int]) -> list[Measured]:
    torch.set_num_threads(1)
    plain = plainly(name)
    return [measured(name, ranks, ranks * count, plain) for count in a_rank]


def row_of(name: str, ranks: int, stages: int, found: Sequence[Measured]) -> list[object]:
    furthest = [max(column) for column in zip(*(one.differences for one in found), strict=True)]
    forth, step = (sum(column) for column in zip(*((one.evaluation, one.step) for one in found), strict=True))
    least = bound(name, ranks, stages)
    differences = [f"{one:.0e}" if one else "0" for one in furthest]
    kib = [f"{one / 1024:.0f}" for one in (forth, least, step - forth, least)]
    return [name, ranks, stages // ranks, *differences, *kib, f"{step / (2 * least):.2f}"]


HEADERS = ["model", "ranks", "stages a rank", "loss", "gradient", "parameter"]
HEADERS += ["values, KiB", "bound", "gradients, KiB", "bound", "sent / bound"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 4], help="of a rank")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models or MODELS:
        for ranks in arguments.ranks:
            found = zip(*fxpipe.launch(run, ranks, name, ranks, arguments.stages), strict=True)
            rows += [
                row_of(name, ranks, ranks * a_rank, one) for a_rank, one in zip(arguments.stages, found, strict=True)
            ]
    print(tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
