"""Samples dealt over replicas and micro-batches by cost train as plain PyTorch does on the global batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import fxpipe
from fxpipe import Topology
from tests.pool import Pool

WORDS, WIDTH, ROWS, REPLICAS = 20, 8, 6, 2
TOPOLOGY = Topology([("pipe", 2), ("data", REPLICAS)])
BATCHES = 8  # of two epochs
LENGTHS = [1 + round(random.Random(row).lognormvariate(1, 1)) for row in range(48)]
TEXTS = [torch.randint(1, WORDS, (n,), generator=torch.Generator().manual_seed(row)) for row, n in enumerate(LENGTHS)]


class Reader(nn.Module):
    """words: (rows, the longest text), with 0 behind each text; a text's label is its first word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        mean = self.embed(words).sum(1) / (words != 0).sum(1, keepdim=True)
        return F.cross_entropy(self.head(fxpipe.stage_boundary(mean)), words[:, 0])


def padded(texts: list[Tensor]) -> Tensor:
    return pad_sequence(texts, batch_first=True)


def dealt(texts: list[Tensor]) -> list[tuple[tuple[Tensor], dict[str, Any]]]:
    return [
        ((padded([texts[number] for number in numbers]),), {})
        for numbers in fxpipe.deal([len(text) for text in texts], 3)
    ]


def trained(begun: int, ended: int, state: dict[str, Tensor] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of batches ``begun`` to ``ended`` of two epochs, and the parameters behind them."""
    fxpipe.init()
    step = fxpipe.compile(Reader(), TOPOLOGY, microbatches=3)
    if state is not None:
        step.load_state_dict(state)
    optimizer = step.optimizer(torch.optim.SGD, lr=0.5)
    sampler, losses, drawn = TOPOLOGY.sampler(TEXTS, costs=LENGTHS, batch_size=ROWS), [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        drawn += BatchSampler(sampler, ROWS, drop_last=True)
    for microbatches in DataLoader(TEXTS, batch_sampler=drawn[begun:ended], collate_fn=dealt):  # type: ignore[arg-type]
        optimizer.zero_grad()
        losses.append(step.step_microbatches(microbatches).item())
        optimizer.step()
    return losses, step.state_dict(full=True)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """The same in plain PyTorch, on whole global batches as torch's sampler draws them."""
    model, losses = Reader(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler: DistributedSampler[Any] = DistributedSampler(TEXTS, 1, 0)  # type: ignore[arg-type]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows in BatchSampler(sampler, ROWS * REPLICAS, drop_last=True):
            optimizer.zero_grad()
            loss = model(padded([TEXTS[row] for row in rows]))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    return losses, model.state_dict()


def test_dealt_samples_train_as_whole_global_batches_do_in_plain_pytorch(pool: Pool) -> None:
    losses, state = plain()
    for got, parameters in pool.run(trained, 0, BATCHES):
        assert got == pytest.approx(losses, rel=1e-5)
        for name, wanted in state.items():
            torch.testing.assert_close(parameters[name], wanted, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(pool: Pool) -> None:
    losses, state = pool.run(trained, 0, BATCHES)[0]
    for got, parameters in pool.run(trained, 3, BATCHES, pool.run(trained, 0, 3)[0][1]):
        assert got == losses[3:]
        assert all(torch.equal(parameters[name], wanted) for name, wanted in state.items())
